"""A checkpoint for every layout: saved under tp 2 x dp 2 with ZeRO-1, read under tp 4 and by one process.

    python step08_5d/by_hand_checkpoint.py
"""
import glob
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS, COLS, BATCH, LR = 5, 8, 8, 0.1                      # a tp shard of 5 x 4: ZeRO cuts it inside a row
NAMES = ["weight", "exp_avg", "exp_avg_sq"]                # what a checkpoint must hold


# Cut elements [start, stop) of a flattened shard: into the rest of a row, whole rows, and part of a row.
def rectangles(start, stop, width):
    while start < stop:
        row, col = divmod(start, width)
        whole = (stop - start) // width if col == 0 else 0
        rows, cols = (whole, width) if whole else (1, min(width - col, stop - start))
        yield row, col, rows, cols
        start += rows * cols


def boxes(state, start, stop, width, first_col):          # {(name, row, column): a view of state}
    found = {}
    for name, elements in state.items():
        at = 0
        for row, col, rows, cols in rectangles(start, stop, width):
            found[name, row, first_col + col] = elements[at:at + rows * cols].view(rows, cols)
            at += rows * cols
    return found


def copy_overlap(mine, theirs):                           # each is ((name, row, column), box)
    (name, *my_offsets), my_box = mine
    (other, *offsets), box = theirs
    begin = [max(pair) for pair in zip(my_offsets, offsets)]
    end = [min(a + n, b + m) for a, n, b, m in zip(my_offsets, my_box.shape, offsets, box.shape)]
    if name == other and begin[0] < end[0] and begin[1] < end[1]:
        here = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, my_offsets))
        my_box[here] = box[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offsets))]


def main(rank, folder, tp, dp, steps, read):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp * dp)
    tp_groups = [dist.new_group(range(d * tp, d * tp + tp)) for d in range(dp)]    # all ranks make all groups
    dp_groups = [dist.new_group(range(t, tp * dp, tp)) for t in range(tp)]
    tp_group, dp_group, width = tp_groups[rank // tp], dp_groups[rank % tp], COLS // tp
    cols = slice(rank % tp * width, (rank % tp + 1) * width)
    size = -(-ROWS * width // dp)                         # of a ZeRO shard, rounded up
    start = rank // tp * size
    stop = min(start + size, ROWS * width)

    weight = torch.randn(ROWS, COLS, generator=torch.manual_seed(0)).double()[:, cols].flatten()
    state = {name: torch.zeros(stop - start).double() for name in NAMES}
    state["weight"] += weight[start:stop]
    mine = boxes(state, start, stop, width, cols.start)
    for file in glob.glob(f"{read}/rank_*"):              # however many ranks wrote them
        for theirs in torch.load(file).items():
            for box in mine.items():
                copy_overlap(box, theirs)
    for step in steps:
        weight = torch.zeros(ROWS * width).double()       # gathers: each rank adds its shard to zeros
        weight[start:stop] = state["weight"]
        dist.all_reduce(weight, group=dp_group)
        x = torch.randn(BATCH, COLS, generator=torch.manual_seed(step)).double().chunk(dp)[rank // tp]
        out = x[:, cols] @ weight.view(ROWS, width).T
        dist.all_reduce(out, group=tp_group)
        grad = (2 * (out - 1) / BATCH).T @ x[:, cols]     # of the mean over the batch of |out - 1| squared
        dist.all_reduce(grad, group=dp_group)
        grad, beta1, beta2, n = grad.flatten()[start:stop], 0.9, 0.95, step + 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad * grad, 1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**n)).sqrt() + 1e-8
        state["weight"] -= LR * state["exp_avg"] / (1 - beta1**n) / denominator
    torch.save(mine, f"{folder}/rank_{rank}")             # each rank writes what it holds
    dist.barrier()                                        # no rank exits while others still communicate
    dist.destroy_process_group()


def run(tp, dp, steps, read, folder):                     # it reads one checkpoint and writes another
    mp.start_processes(main, (folder, tp, dp, steps, read), nprocs=tp * dp, start_method="fork")
    saved = [torch.load(file) for file in sorted(glob.glob(f"{folder}/rank_*"))]
    whole = torch.full((3, ROWS, COLS), torch.nan).double()
    for rank, of_rank in enumerate(saved):
        for (name, row, col), box in of_rank.items():
            rows, cols = box.shape
            whole[NAMES.index(name), row:row + rows, col:col + cols] = box
            if name == "weight":
                print(f"tp {tp} x dp {dp}, rank {rank}: {rows} x {cols} at [{row}, {col}]", flush=True)
    return whole


with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b, \
        tempfile.TemporaryDirectory() as c, tempfile.TemporaryDirectory() as d:
    run(2, 2, range(0, 3), None, a)                       # three steps, then a checkpoint
    resumed = run(4, 1, range(3, 6), a, b), run(1, 1, range(3, 6), a, c)
    never_stopped = run(1, 1, range(0, 6), None, d)
for whole in resumed:
    torch.testing.assert_close(whole, never_stopped, rtol=1e-12, atol=1e-12)
print("under both layouts, the run continues as if it had never stopped")
