"""The answers: for each run, the rank and the lines to blame. Do not read this before you have tried."""

ANSWERS = {
    1: dict(ranks=[2],
            lines=["if loss < GOOD_ENOUGH", "break", "dist.barrier()"],
            hints=["All four lists end with the same sequence number. Is it the same operation?",
                   "Which rank has left the loop, and by which line?"],
            why="Rank 2 stops because its own loss is small enough, and waits in the barrier. The others wait for it in the "
                "next all-reduce. All ranks must make the same decision, so all-reduce the loss before you compare it."),
    2: dict(ranks=[3],
            lines=["for name in sorted", "dist.all_reduce(tensors[name]", "MEASURED ="],
            hints=["Compare the last calls of ranks 2 and 3, which are a pair.",
                   "Three ranks are in their pair's sum, or past it. Who went to the norm first, and who chose the order?"],
            why="Rank 3 measured different times, so it enters the norm's group first. There it waits for rank 2, which waits "
                "for it in their pair. All ranks must enter groups in the same order, so the order must not depend on what "
                "one rank has measured."),
    3: dict(ranks=[2],
            lines=["SEQUENCES =", "theirs = torch.empty", "work = dist.irecv", "dist.send(mine", "work.wait()"],
            hints=["Gloo itself ended one process, and that ended the others. What did gloo print?",
                   "Follow the last messages round the ring: where does a message of one size meet a buffer of another?"],
            why="Rank 2's last batch has 6 sequences, and it expects to receive as many, but rank 1 sends it 8. Gloo "
                "aborts a process whose buffer is too small; nccl waits, or leaves wrong numbers. Send the size first, pad "
                "the batch, or drop the last sequences."),
    4: dict(ranks=[0, 1, 2, 3],
            lines=["dist.send(mine"],
            hints=["Every rank is on the same line. What would have to happen for one of them to leave it?",
                   "If nothing buffers a message, a send ends only when its receiver receives."],
            why="All ranks send, and nobody receives. Start both at once (batch_isend_irecv, or irecv before send), or "
                "let even ranks send first and odd ones receive. A transport that buffers small messages hides this until "
                "they are large."),
    5: dict(ranks=[3],
            lines=["if len(rows)", "((6, 2),        (8, 0))", "dist.all_reduce(torch.ones(1))"],
            hints=["Three ranks are in the same collective. Whom does the fourth wait for, and in which group?",
                   "How much did rank 3 get in its last all-to-all?"],
            why="In step 2 no token of ranks 2 and 3 chose rank 3's expert, so rank 3 skips the all-reduce of its gradient and "
                "goes on to the norm. Rank 1, which has a copy of the expert, waits in the all-reduce. A rank with nothing to add "
                "still has to call the collective, with zeros."),
    6: dict(ranks=[0],
            lines=["if rank == 0 and step", "save(weights, world)", "dist.all_gather_into_tensor", "return whole"],
            hints=["One rank is in a different operation from the others. Who calls it?",
                   "The stack of that rank has the answer a few frames up: do all ranks reach that line?"],
            why="Only rank 0 calls save(), but save() gathers the shards of all ranks. All of them have to call it; inside, "
                "only one needs to write."),
    7: dict(ranks=[1],
            lines=["batches.get()", "batches.put", "lines = ["],
            hints=["Three ranks wait in a collective. Where does the fourth wait, and for what?",
                   "Its output has a traceback, but not from the thread whose stack you see."],
            why="On rank 1 the reading thread died on a word that is not a number. The main thread waits for a batch for ever, "
                "and the other ranks wait for rank 1. An exception ends only the thread that raises it, so catch it, put it "
                "into the queue, and raise it again in the main thread."),
    8: dict(ranks=[3], slow=True,
            lines=["time.sleep", "batch = read(rank)", "return torch.ones"],
            hints=["Is the second look the same as the first one?",
                   "Three ranks wait for the fourth. Where is it each time?"],
            why="Nothing hangs. Rank 3 reads for a second in each step, and all others wait for it, so the sequence numbers "
                "still grow, slowly. One look cannot tell this from a hang; two can."),
    9: dict(ranks=[3],
            lines=["if len(rows)", "complete = len(grads)", "    reduce(grads)", "dist.all_to_all_single(tokens",
                   "((6, 2),        (8, 0))"],
            hints=["In which group does rank 2 wait for rank 3? In which does rank 3 wait for rank 2?",
                   "In every step all ranks make the same three calls. In which order did rank 3 make them before, and how now?"],
            why="All ranks make the same calls, but when `step` is 2, no token of ranks 2 and 3 chose rank 3's expert. Without "
                "rows the expert gets no gradient, so rank 3 reduces at the end of backward, and the others between the two "
                "all-to-alls. Now rank 2 waits in the reduce-scatter for rank 3, which waits for rank 2 in the second all-to-all."
                " The order must not depend on the data: reduce after both all-to-alls, and give an expert without rows a "
                "gradient of zeros. With nccl this program hangs, too. With an asynchronous reduction, as FSDP has, it may pass, "
                "and hangs when the two operations do not fit on the GPU together. KempnerForge reported a reduction between the "
                "two all-to-alls as a deadlock; its cure was one unit for attention and one for the experts, which reduces after "
                "both."),
}
