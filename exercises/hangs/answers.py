"""Which rank and line each answer is. Do not read this before you have tried."""

ANSWERS = {
    1: dict(ranks=[2],
            lines=["if loss < GOOD_ENOUGH", "break", "dist.barrier()"],
            hints=["All four lists end with the same sequence number. Is it the same operation?",
                   "Which rank has left the loop, and by which line?"],
            why="Rank 2 stops because its own loss is smaller, and waits in the barrier; the others wait for it in the "
                "next all-reduce. All ranks must decide alike about a collective: sum the loss first."),
    2: dict(ranks=[3],
            lines=["for name in sorted", "dist.all_reduce(tensors[name]", "MEASURED ="],
            hints=["Compare the last calls of ranks 2 and 3, which are a pair.",
                   "Three ranks are in their pair's sum, or past it. Who went to the norm first, and who chose the order?"],
            why="Rank 3 measured different times, so it enters the norm's group first, and waits for rank 2, which waits for "
                "it in the pair. The order of groups is part of the program and must not come from what one rank has "
                "measured."),
    3: dict(ranks=[2],
            lines=["SEQUENCES =", "theirs = torch.empty", "work = dist.irecv", "dist.send(mine", "work.wait()"],
            hints=["Gloo itself ended one process, and that ended the others. What did gloo print?",
                   "Follow the last messages round the ring: where does a message of one size meet a buffer of another?"],
            why="Rank 2's last batch has 6 sequences, and it expects to get as many: rank 1 sends it 8. Gloo "
                "ends a process whose buffer is too small; nccl waits, or leaves wrong numbers. Send the size first, pad "
                "the batch, or drop the rest."),
    4: dict(ranks=[0, 1, 2, 3],
            lines=["dist.send(mine"],
            hints=["Every rank is on the same line. What would have to happen for one of them to leave it?",
                   "A send is over when its receiver receives, if nothing buffers it."],
            why="All ranks send, and nobody receives. Start both at once (batch_isend_irecv, or irecv before send), or "
                "let even ranks send first and odd ones receive. A transport that buffers small messages hides this until "
                "they are large."),
    5: dict(ranks=[3],
            lines=["if len(rows)", "((6, 2),        (8, 0))", "dist.all_reduce(torch.ones(1))"],
            hints=["Three ranks are in the same collective. For whom does the fourth wait, and in which group?",
                   "How much did rank 3 get in its last all-to-all?"],
            why="In step 2 no token chose rank 3's expert, so rank 3 skips the sum of its gradient, where its "
                "copy on rank 1 waits, and is already in the norm. A rank with nothing to add still has to call the "
                "collective, with zeros."),
    6: dict(ranks=[0],
            lines=["if rank == 0 and step", "save(weights, world)", "dist.all_gather_into_tensor", "return whole"],
            hints=["One rank is in a different operation from the others. Who calls it?",
                   "The stack of that rank has the answer a few frames up: do all ranks reach that line?"],
            why="Only rank 0 saves, and saving gathers the parts of all. All ranks have to go into save(); inside, one of "
                "them may write."),
    7: dict(ranks=[1],
            lines=["batches.get()", "batches.put", "lines = ["],
            hints=["Three ranks wait in a collective. Where does the fourth wait, and for whom?",
                   "Its output has a traceback, but from another thread than the one you see."],
            why="On rank 1 the thread that reads has died on a word that is not a number. The main thread waits for a batch "
                "for ever, and the other ranks wait for it. An exception in a thread ends that thread alone: catch it, put it "
                "into the queue, and raise it in the main one."),
    8: dict(ranks=[3], slow=True,
            lines=["time.sleep", "batch = read(rank)", "return torch.ones"],
            hints=["Is the second look the same as the first one?",
                   "Three ranks wait for the fourth. Where is it each time?"],
            why="Nothing hangs: rank 3 reads for a second in each step, and all wait for it. Sequence numbers go on, "
                "slowly. One look cannot tell this from a hang; two can."),
}
