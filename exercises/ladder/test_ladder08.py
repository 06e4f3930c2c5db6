"""The ladder of step 8: a run that was stopped or killed resumes, even under another layout. Each test is a rung; exercise.py
explains how to use them."""
import contextlib
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cases
from exercise import rung
from harness import assert_same_tensors, relative

STEP = "step08_5d"


def outcome(function, *arguments):
    """Return a function's result, or if it calls fail, ("failed", exit status, message)."""
    try:
        return function(*arguments)
    except SystemExit as end:
        return "failed", end.code, getattr(end, "message", "")


def failed(what):
    return isinstance(what, tuple) and what[:2] == ("failed", 2)


def names(paths):
    """Replace paths by names, to compare and to print."""
    return [path.name if isinstance(path, Path) else repr(path) for path in paths] if isinstance(paths, list) else paths


# ------------------------------------------------------------------------------------------------ names
def list_job(folder):
    from disk import list_checkpoints
    return [names(outcome(list_checkpoints, SimpleNamespace(checkpoint=where), *more))
            for where, *more in ((folder,), (folder, ".tmp"), (folder, ".aside"), (f"{folder}/nowhere",))]


@rung({"disk.py": ["list_checkpoints"]}, hints="""
    People keep other things in a checkpoint directory: notes, a log, a copy of a checkpoint. The trainer deletes old
    checkpoints, so it must be sure which names are its own. What do the trainer's names look like?

    `Path(folder).glob(pattern)` returns the paths whose whole name matches the pattern, in no order; for a folder that does not
    exist it returns none. In a pattern, `[0-9]` is one digit. With eight digits, alphabetical order is the order of the
    steps.

    return sorted(Path(args.checkpoint).glob("step_" + "[0-9]" * 8 + suffix)).""")
def test_own_names_only(pool, tmp_path):
    """Write `list_checkpoints(args, suffix="")`. It returns a list of the checkpoints in the directory args.checkpoint, as Path,
    the one with the fewest steps first. Their names are `step_`, exactly eight of the digits 0 to 9, and the suffix. Leave out all
    other names, because they belong to somebody else. If the directory does not exist, the list is empty."""
    folder = tmp_path / "run"
    right = {"": ["step_00000002", "step_00000010", "step_00000011", "step_00000200"],
             ".tmp": ["step_00000004.tmp", "step_00000012.tmp"], ".aside": ["step_00000005.aside"]}
    others = ["step_3", "step_000000020", "step_00000005.aside.d", "my_step_00000001", "step_0000000a", "step_00000002xtmp",
              "step_00000002_best", "step_newest00", "notes.tmp", "step_00000012.tmp.d", "step_0000000\u0663", "step_0000000\u00b2",
              "step_00000002\n", "step_00000004.tmp\n"]
    for i, name in enumerate([*sum(right.values(), []), *others]):
        (folder / name / "step_00000001").mkdir(parents=True)
        os.utime(folder / name, (10**9 - i, 10**9 - i))
    *came, nowhere = pool.call(list_job, STEP, folder=str(folder))[0]
    there = f"a directory has {sorted(os.listdir(folder))}"
    for (suffix, expected), listed in zip(right.items(), came):
        wrong = [ascii(name) for name in listed if name not in expected] if isinstance(listed, list) else []
        assert listed == expected, (
            f"{there}. list_checkpoints with the suffix {suffix!r} should return the list of {expected}, not {listed}"
            + f": leave out {', '.join(wrong)}" * bool(wrong))
    assert nowhere == [], f"for a directory that does not exist, list_checkpoints must return an empty list, not {nowhere}"


# ------------------------------------------------------------------------------------------------ boxes
STORED = {"rows": [(0, 0, 2, 6), (2, 0, 2, 6)], "columns": [(0, 0, 4, 1), (0, 1, 4, 3), (0, 4, 4, 2)],
          "quarters": [(0, 0, 2, 3), (0, 3, 2, 3), (2, 0, 2, 3), (2, 3, 2, 3)]}      # offsets and sizes, in a tensor of 4 x 6
WANTED = [(0, 0, 4, 6), (0, 3, 4, 3), (1, 0, 2, 6), (1, 2, 2, 3), (3, 5, 1, 1), (2, 1, 1, 4)]


def overlap_job():
    import torch
    from boxes import copy_overlap
    whole, found = torch.arange(24.0).view(4, 6), []

    class Stored:
        """A box in a file, as safetensors returns it. It counts how many elements are read."""

        def __init__(self, elements):
            self.elements, self.read = elements, 0

        def get_shape(self):
            return list(self.elements.shape)

        def __getitem__(self, index):
            part = self.elements[index]
            self.read += part.numel()
            return part
    for stored in itertools.chain(*STORED.values()):
        for wanted in WANTED:
            local, in_file = (whole[box[0]:box[0] + box[2], box[1]:box[1] + box[3]] for box in (wanted, stored))
            memory, saved = torch.full((6, 8), -1.0), Stored(in_file.clone())
            box = memory[:wanted[2], :wanted[3]]
            copy_overlap(box, list(wanted[:2]), saved, list(stored[:2]))
            shared = torch.zeros(4, 6, dtype=bool)
            shared[stored[0]:stored[0] + stored[2], stored[1]:stored[1] + stored[3]] = True
            shared = shared[wanted[0]:wanted[0] + wanted[2], wanted[1]:wanted[1] + wanted[3]]
            right = torch.where(shared, local, -1.0)
            found.append((stored, wanted, right.tolist(), box.tolist(), int(shared.sum()), saved.read))
    line, box, saved = torch.arange(7.0), torch.full((3,), -1.0), Stored(torch.arange(4.0, 7.0))
    copy_overlap(box, [2], saved, [4])                    # a vector
    cube, part = torch.arange(24.0).view(2, 3, 4), torch.full((1, 2, 3), -1.0)
    copy_overlap(part, [1, 1, 0], Stored(cube[:, :2, 1:].clone()), [0, 0, 1])
    return found, [(box.tolist(), [-1, -1, line[4].item()]), (part.tolist(), [[[-1, *cube[1, 1, 1:3].tolist()], [-1] * 3]])]


@rung({"boxes.py": ["copy_overlap"]}, hints="""
    Draw the whole tensor, the box in the file, and the box in memory. Their overlap is a box again. Where does it begin, and
    where does it end? Then write down where it lies in the box in the file, and where in the box in memory.

    In each dimension the overlap goes from the later of the two starts to the earlier of the two ends. If in some dimension
    it ends where it begins, or before, there is no overlap. To get indices inside a box, subtract the box's offsets.
    `saved[index]` with a tuple of slices reads only these elements.

    start = [max(a, b) for a, b in zip(box_offsets, saved_offsets)]; stop = [min(a + n, b + m) for a, n, b, m in zip(box_offsets,
    box.shape, saved_offsets, saved.get_shape())]; if all(a < b for a, b in zip(start, stop)): box_slices = tuple(slice(a - o, b -
    o) for a, b, o in zip(start, stop, box_offsets)); saved_slices, the same with saved_offsets; box[box_slices] =
    saved[saved_slices].""")
def test_what_two_boxes_share(pool):
    """Write `copy_overlap(box, box_offsets, saved, saved_offsets)`. It copies the elements that `saved` and `box` have in common
    into `box`, a tensor. Both are boxes of one whole tensor, and begin in it at these offsets, lists with a number for each
    dimension. There may be one, two or three dimensions. `saved` is a box in a file. saved.get_shape() is its shape, and
    saved[index] reads from the disk, so read only the overlap, and only once. Leave all other elements of `box` as they are."""
    found, other = pool.call(overlap_job, STEP)[0]
    for stored, wanted, right, came, common, read in found:
        where = (f"from a tensor of 4 x 6 with the elements 0 to 23, the file has the box {stored}, and the box in memory is "
                 f"{wanted} (row, column, rows, columns)")
        assert came == right, f"{where}. The box in memory, which was full of -1, should now have {right}, but has {came}"
        assert read == common, f"{where}. They share {common} elements, but {read} were read"
    for came, right in other:
        assert came == right, f"in one or three dimensions, the box should have {right}, but has {came}"


def fill_job(folder):
    import torch
    from boxes import fill
    from safetensors.torch import save_file
    whole = torch.arange(24.0).view(4, 6)
    others = {"w.exp_avg[0, 0]": 100 + whole, "v[0]": torch.arange(5.0), "other[0, 0]": torch.ones(4, 6)}
    found, paths = {}, {}
    for how, stored in STORED.items():
        paths[how] = [Path(folder, f"{how}_{i}.safetensors") for i in range(len(stored))]
        for i, (row, column, rows, columns) in enumerate(stored):
            part = whole[row:row + rows, column:column + columns].contiguous()
            save_file({f"w[{row}, {column}]": part} | (others if i == 0 else {}), paths[how][i])
    memory = torch.zeros(11, 6)                           # all boxes are views of it, as they are of an optimizer's memory

    def state():
        memory.fill_(7)
        return {"w[0, 0]": memory[:4], "w[1, 2]": memory[4:6, :3], "w.exp_avg[2, 0]": memory[6:8], "v[3]": memory[8, :2],
                "w.exp_avg[0, 5]": memory[9:10, :1]}
    for how in STORED:
        left = fill(state(), paths[how])
        rest = [memory[4:6, 3:], memory[8, 2:], memory[9, 1:], memory[10:]]
        found[how] = (memory[:4].tolist(), memory[4:6, :3].tolist(), memory[6:8].tolist(), memory[8, :2].tolist(),
                      memory[9, 0].item(), left, all(bool((part == 7).all()) for part in rest))
    # the last column is in no file; a box that no file has at all; nothing that is read is missing
    gaps = [fill({"w[0, 0]": memory[:4], "w[0, 1]": memory[4:8, :2]}, paths["columns"][:2]),
            fill({"w[0, 1]": memory[4:8, :2], "w[0, 0]": memory[:4]}, paths["columns"][:2]),
            fill({"w[0, 0]": memory[:4, :1], "v[0]": memory[8, :5], "u[0]": memory[9]}, paths["columns"]),
            fill({"w[0, 1]": memory[4:8, :2]}, paths["columns"][:2])]
    return found, gaps


@rung({"boxes.py": ["fill"]}, hints="""
    A rank that loads does not ask which rank wrote what. It goes through all boxes of all files, and copies from each what overlaps
    with its own. Which of its own boxes may overlap with a box in a file? And how can it know in the end that nothing is missing?

    A key is the name and the offsets of the box: key.split("[")[0] is the name, offsets(key) the list. For each key of a file, only
    boxes of the same name matter, of which there may be several. `with safe_open(path, framework="pt") as file:` has
    file.keys(), and file.get_slice(key), which copy_overlap reads from. Saved elements are finite, so nan marks those that are
    missing.

    for box in state.values(): box.fill_(math.nan). Then for path in paths: with safe_open(path, framework="pt") as file: for key in
    file.keys(): for local_key, box in state.items(): if local_key.split("[")[0] == key.split("[")[0]: copy_overlap(box,
    offsets(local_key), file.get_slice(key), offsets(key)). Last, return next((key for key, box in state.items() if
    box.isnan().any()), None).""")
def test_from_any_files(pool, tmp_path):
    """Write `fill(state, paths)`, which fills the boxes of a rank from files. `state` is {key: box}, and so is a file. A key is the
    tensor's name and the offsets of the box in it, like "w[2, 0]"; `offsets(key)` returns the list, [2, 0]. The boxes are views of
    memory: fill them in place, and ignore what they contain. Files also have boxes of other tensors. Return None, or the key of a
    box that has an element which no file contains. To find such elements, start with nan everywhere."""
    found, gaps = pool.call(fill_job, STEP, folder=str(tmp_path))[0]
    whole = [[6 * i + j for j in range(6)] for i in range(4)]
    right = (whole, [line[2:5] for line in whole[1:3]], [[100 + a for a in line] for line in whole[2:]], [3, 4], 105, None,
             True)
    texts = ["w[0, 0], 4 x 6", "w[1, 2], 2 x 3", "w.exp_avg[2, 0], 2 x 6 (100 + w)", "v[3], of 0 1 2 3 4", "w.exp_avg[0, 5], 1 x 1",
             "fill returns", "memory outside these boxes stays as it is"]
    for how, parts in found.items():
        for text, expected, came in zip(texts, right, parts):
            assert came == expected, f"w, 0 to 23 in 4 x 6, is in files by {how}: {text}: expected {expected}, got {came}"
    texts = ["w[0, 0] lacks two columns, w[0, 1] is complete", "w[0, 1] is complete, w[0, 0] lacks two columns", "u is in no file",
             "nothing is missing"]
    for text, expected, came in zip(texts, ("w[0, 0]", "w[0, 0]", "u[0]", None), gaps):
        assert came == expected, f"{text}: fill should return {expected!r}, but returned {came!r}"


SHAPES = [(5,), (3, 4), (4, 1), (1, 6), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


def fewest(shape, start, stop):
    """Return the boxes: from where one ends, take the largest that begins there."""
    found = []
    while start < stop:
        offsets, left, sizes = [], start, [1]
        for size in reversed(shape):
            offsets.insert(0, left % size)
            left //= size
        for i in reversed(range(len(shape))):                 # rows, if it begins with a whole one
            inside, below = sizes[0], offsets[i + 1:]
            count = min((stop - start) // inside, shape[i] - offsets[i]) if not any(below) else 0
            if count:
                best = (tuple(offsets), (*[1] * i, count, *shape[i + 1:]))
            sizes.insert(0, inside * shape[i])
        found.append(best)
        size = 1
        for n in best[1]:
            size *= n
        start += size
    return found


def rectangles_job():
    from math import prod

    from boxes import rectangles
    return {(shape, start, stop): outcome(rectangles, shape, start, stop)
            for shape in SHAPES for start in range(prod(shape)) for stop in range(start, prod(shape) + 1)}


@rung({"boxes.py": ["rectangles"]}, hints="""
    ZeRO cuts a tensor's elements in memory order, anywhere: a shard may begin in the middle of a row. Write 3 x 4 elements
    down and mark those from 2 to 9. How few rectangles do they form, and which? What if they begin or end with a row,
    and what if they are inside one?

    A row of a tensor is what one index of its first dimension selects: row_size = math.prod(shape[1:]) elements. The whole rows
    begin with start_row = -(-start // row_size), which rounds up, and end before stop_row = stop // row_size. Together they are one
    rectangle. What remains before and after is a part of one row: the same task again, with shape[1:].

    if start >= stop: return []. Elements start to stop of a row, counted in that row, are inside_row(row, start, stop) = [((row,
    *rest), (1, *sizes)) for rest, sizes in rectangles(shape[1:], start, stop)]. If start_row > stop_row, all elements are in row
    stop_row: return inside_row(stop_row, start - stop_row * row_size, stop - stop_row * row_size). Else return
    inside_row(start_row - 1, start - (start_row - 1) * row_size, row_size), plus [((start_row, 0, ...), (stop_row - start_row,
    *shape[1:]))] if start_row < stop_row, plus inside_row(stop_row, 0, stop - stop_row * row_size).""")
def test_a_shard_is_a_few_boxes(pool):
    """Write `rectangles(shape, start, stop)`. Number the elements of a tensor in memory order. Which rectangles do those from
    `start` up to but not including `stop` form? Return a list, in this order, of (offsets, sizes): tuples with a number for each
    dimension. The elements of each rectangle follow one another in memory, and there are as few rectangles as possible: first the
    rest of a row, then whole rows, then the beginning of a row. In more than two dimensions, a "row" has rows itself."""
    for (shape, start, stop), came in pool.call(rectangles_job, STEP)[0].items():
        expected = fewest(shape, start, stop)
        assert came == expected, f"elements {start} to {stop} (without {stop}) of a tensor of {shape} are {expected}, not {came}"


def boxes_job():
    import torch
    from boxes import boxes
    from shards import Shard
    from placement import Placement
    found = []
    for name, shape, start, count, shards in SHARDED:
        param = torch.nn.Parameter(torch.zeros(shape))
        param.placement = Placement(1, True, None, [Shard(None, *shard) for shard in shards])
        param.untyped_storage().resize_(0)                # as ZeRO stage 3 does
        memory = torch.arange(100.0)
        elements = memory[10:10 + count]
        elements = elements.view(shape) if count == param.numel() else elements
        made = boxes(name, param, start, elements)
        values = {key: box.tolist() for key, box in made.items()}
        for box in made.values():
            box += 1000
        found.append((values, (memory >= 1000).nonzero().flatten().tolist()))
    return found


# name, shape of this rank's part, index of the first element in it, how many elements, shards: (dim, num_shards, index)
SHARDED = [("norm", (5,), 0, 5, []), ("norm", (5,), 2, 3, []), ("head", (2, 6), 0, 12, [(0, 2, 1)]),
           ("down", (3, 2), 0, 6, [(1, 3, 2)]), ("down", (3, 2), 3, 3, [(1, 3, 2)]), ("up", (4, 3), 1, 7, [(0, 2, 1)]),
           ("experts", (2, 3, 2), 1, 8, [(0, 4, 2)])]
BOXES = [{"norm[0]": [10, 11, 12, 13, 14]}, {"norm[2]": [10, 11, 12]},
         {"head[2, 0]": [[10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21]]}, {"down[0, 4]": [[10, 11], [12, 13], [14, 15]]},
         {"down[1, 5]": [[10]], "down[2, 4]": [[11, 12]]},
         {"up[4, 1]": [[10, 11]], "up[5, 0]": [[12, 13, 14]], "up[6, 0]": [[15, 16]]},
         {"experts[4, 0, 1]": [[[10]]], "experts[4, 1, 0]": [[[11, 12], [13, 14]]], "experts[5, 0, 0]": [[[15, 16]]],
          "experts[5, 1, 0]": [[[17]]]}]


@rung({"boxes.py": ["boxes"]}, hints="""
    Combine three things. tp and ep have left this rank a part of a parameter; ZeRO has left it consecutive elements of this part;
    and consecutive elements form a few rectangles. Where does a rectangle begin in the whole parameter?

    `local_slices(param)` is a tuple of slices, one for each dimension; slice(None), for a dimension that is not sharded, has start
    None. `rectangles(param.shape, start, start + elements.numel())` returns the offsets of the rectangles in the part, and their
    sizes. `tensor.split(counts)` returns views with these numbers of elements, in order, and view(sizes) gives each its shape.

    param_offsets = [dim_slice.start or 0 for dim_slice in local_slices(param)]; rects = rectangles(...); views =
    elements.view(-1).split([math.prod(sizes) for _, sizes in rects]); return {f"{name}{[a + b for a, b in zip(param_offsets,
    rect_offsets)]}": view.view(sizes) for (rect_offsets, sizes), view in zip(rects, views)}.""")
def test_which_boxes_a_rank_has(pool):
    """Write `boxes(name, param, start, elements)`. The parameter is this rank's part of the whole one (`local_slices(param)` says
    which), and `elements` has consecutive elements of this part, from index `start` on. Return {key: box}. A key is the name and
    the offsets of the box in the whole parameter, like "model.norm.weight[4]" or "lm_head.weight[2, 0]", and the box is a view of
    the memory of `elements`, in its shape. Do not read the parameter's own elements: ZeRO may have freed their memory."""
    for (name, shape, start, count, shards), right, (came, changed) in zip(SHARDED, BOXES, pool.call(boxes_job, STEP)[0]):
        sharded = ", ".join(f"shard {index} of {num_shards} along dimension {dim}" for dim, num_shards, index in shards)
        where = f"{name}, of {shape} ({sharded or 'not sharded'}); its elements from index {start} on are 10, 11, ..., {9 + count}"
        assert came == right, f"{where}: the boxes are {right}, not {came}"
        assert changed == list(range(10, 10 + count)), f"{where}: writing to the boxes must write to the memory of elements"


# for each rank, {key: (elements, bytes of an element)}
HAVE = {"alone": [{"a[0]": (5, 4), "b[0]": (3, 4)}],
        "replicas": [{f"w{i}[0]": (10, 4) for i in range(7)} for _ in range(3)],
        "some": [{"a[0]": (100, 4), "b[0]": (10, 4), "c[0]": (10, 4)}, {"c[0]": (10, 4), "a[0]": (100, 4), "d[0]": (8, 4)},
                 {"e[0]": (12, 4), "d[0]": (8, 4), "b[0]": (10, 4), "f[4]": (1, 4), "f[0]": (4, 4)}],
        "bytes": [{"a[0]": (4, 8), "b[0]": (5, 4), "c[0]": (3, 4), "d[0]": (3, 4)} for _ in range(2)],
        "order": [{"b[0]": (6, 4), "a[0]": (10, 4), "c[0]": (5, 4)} for _ in range(2)]}


def assign_job(have):
    import torch
    import torch.distributed as dist
    from boxes import assign_writers
    dist.init_process_group("gloo")
    dtypes = {4: torch.float32, 8: torch.float64}
    state = {key: torch.zeros(count, dtype=dtypes[size]) for key, (count, size) in have[dist.get_rank()].items()}
    return assign_writers(state)


def assigned(have):
    writer, load = {}, [0] * len(have)
    for key, (count, size) in [item for state in have for item in state.items()]:
        if key not in writer:
            writer[key] = min((rank for rank, state in enumerate(have) if key in state), key=load.__getitem__)
            load[writer[key]] += count * size
    return [[key for key in state if writer[key] == rank] for rank, state in enumerate(have)]


@rung({"boxes.py": ["assign_writers"]}, hints="""
    Ranks of dp have the same weights, and it is enough if one of them writes a box. If that were always the first, the others would
    wait for it. How do the ranks agree, although no rank decides for the others?

    All compute the same result from the same list: `all_gather_object(value)` returns on all ranks a list of every rank's value.
    Keys and sizes are enough, box.nbytes. Then go through the boxes and assign each to a rank; keep track of how many bytes each
    rank already has to write.

    per_rank = all_gather_object({key: box.nbytes for key, box in state.items()}); writer, load = {}, Counter(); for held in
    per_rank: for key, nbytes in held.items(): if key not in writer: holders = [rank for rank, held in enumerate(per_rank) if key in
    held]; writer[key] = min(holders, key=load.__getitem__); load[writer[key]] += nbytes. Return [key for key in state if
    writer[key] == dist.get_rank()].""")
def test_each_box_is_written_once(pool):
    """Write `assign_writers(state)`, which all ranks call, each with its own {key: box}. It returns the list of the keys that this
    rank writes, in the order of its state. One of the ranks that have a box with the same key writes it. Assign the boxes one after
    another: those of rank 0 in the order of its state, then those that rank 1 has besides, and so on. Assign each to the rank with
    the fewest bytes so far, among those that have the box; if several have equally few, to the first of them. All ranks must come
    to the same result."""
    for have in HAVE.values():
        came = pool.call(assign_job, STEP, world=len(have), have=have)
        shown = [{key: count * size for key, (count, size) in state.items()} for state in have]
        expected = assigned(have)
        assert came == expected, f"ranks have boxes of these bytes: {shown}. They should write {expected}, but would write {came}"


# ------------------------------------------------------------------------------------------------ corrupt, and in use
def exchange(a, b):
    a.rename(a.with_suffix(".a"))
    b.rename(a)
    a.with_suffix(".a").rename(b)


def corruption_job(folder):
    import disk
    folder = Path(folder, "step_00000004")
    folder.mkdir()
    files = [folder / f"rank_{i:05d}.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(b"some\nweights" + bytes([i]) * 70_000)
    flushed, fsync = [], os.fsync
    with patch.object(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino) or fsync(number)):
        digests = {file.name: disk.digest(file) for file in files}
    flushed = flushed == [file.stat().st_ino for file in files]
    digests[files[0].name] = digests.pop(files[0].name)   # so that they are in no order
    index = dict(steps=4, digests=digests, run={})
    (folder / "index.json").write_text(json.dumps(index))
    read, digest = [], disk.digest

    def noted(path):
        read.append(Path(path).name)
        return digest(path)

    def seen(index=index):
        found = []
        for rank, ranks in ((0, 1), (0, 2), (1, 2)):
            read.clear()
            with patch.object(disk, "digest", noted):
                share = [rank, ranks] if ranks > 1 else []            # by default one rank reads everything
                found.append((outcome(disk.find_corruption, folder, index, *share), sorted(read)))
        return found
    found = {"whole": seen(), "other": seen({**index, "digests": {**digests, files[1].name: "0"}}), "none": seen(None)}
    text = files[1].read_bytes()
    files[1].write_bytes(text[:-1] + b"x")
    found["changed"] = seen()
    found["alone"] = outcome(disk.find_corruption, folder, index)
    files[1].unlink()
    found["missing"] = seen()
    files[1].mkdir()
    found["a folder"] = seen()
    files[1].rmdir()
    files[1].write_bytes(text)
    exchange(*files[:2])
    found["exchanged"] = seen()
    exchange(*files[:2])
    files[1].rename(folder / "other.safetensors")
    found["renamed"] = seen()
    (folder / "other.safetensors").rename(files[1])
    nearly = digests[files[1].name][:-1] + ("0" if digests[files[1].name][-1] != "0" else "1")
    nearly = {**index, "digests": {**digests, files[1].name: nearly}}
    (folder / "index.json").write_text(json.dumps(nearly))
    found["nearly"] = outcome(disk.find_corruption, folder, nearly)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "other.safetensors").write_bytes(text)
    found["one too many"] = seen()
    (folder / "index.json").unlink()
    found["no index"] = seen(None)
    return digests, [hashlib.sha256(b"some\nweights" + bytes([i]) * 70_000).hexdigest() for i in range(3)], flushed, found


@rung({"disk.py": ["digest", "find_corruption"]}, hints="""
    A digest of a file is a short number that changes if a single byte of the file does. It is computed when the file is
    written, and compared with that of the file when a run resumes. Reading all files takes long: how do ranks share the
    work?

    `hashlib.file_digest(file, "sha256").hexdigest()` is the digest of an open file, and os.fsync(file.fileno()) waits until all of
    it is on disk. a ^ b has the elements that are in only one of two sets. Rank r of n takes number r, r + n, r + 2 n, ... of
    the sorted names: a slice with a step.

    digest: with open(path, "rb") as file: os.fsync(file.fileno()); return hashlib.file_digest(file, "sha256").hexdigest().
    find_corruption: if index is None or index != index_of(folder): return "..."; problem = find_wrong_file(folder,
    index["digests"]); if problem: return problem; for name in sorted(index["digests"])[rank::world_size]: if digest(folder /
    name) != index["digests"][name]: return f"{name} has changed since it was written".""")
def test_as_it_was_written(pool, tmp_path):
    """Write `digest(path)`, which forces a file to disk (os.fsync) and returns its SHA-256, in hexadecimal. Write
    `find_corruption(folder, index, rank=0, world_size=1)`, which returns what is wrong with a checkpoint, as a text, or None. index
    is what rank 0 has read from index.json, and index["digests"] is {file name: digest}. The checkpoint is corrupt if index is
    None, or if this rank reads something else (`index_of(folder)`); if a file *.safetensors is missing, or is there but not in
    index["digests"] (use `find_wrong_file`); or if a file's digest differs. In the last two cases the text contains the file's
    name. Every rank compares the names, but only one rank reads each file (digest): rank r of n reads the
    sorted names number r, r + n, r + 2 n and so on."""
    came, right, flushed, found = pool.call(corruption_job, STEP, folder=str(tmp_path))[0]
    files = [f"rank_{i:05d}.safetensors" for i in range(3)]
    assert came == dict(zip(files, right)), f"the digests should be {right}, but are {came}"
    assert flushed, "digest should call os.fsync on the file, once"
    alone, nearly = found.pop("alone"), found.pop("nearly")
    assert isinstance(alone, str) and files[1] in alone, \
        f"without rank and world_size, find_corruption reads all files, and {files[1]} has changed; it returned {alone!r}"
    assert isinstance(nearly, str) and files[1] in nearly, \
        f"compare whole digests: that of {files[1]} differs from the index in its last digit; find_corruption returned {nearly!r}"
    share = {(0, 1): files, (0, 2): files[::2], (1, 2): files[1:2]}
    named = {"changed": files[1], "missing": files[1], "a folder": files[1], "exchanged": "rank_0000", "renamed": ".safetensors",
             "one too many": "other.safetensors"}
    for state, answers in found.items():
        for (rank, ranks), (text, read) in zip(share, answers):
            where = f"with {files} in a checkpoint (case {state!r}), find_corruption on rank {rank} of {ranks}"
            healthy = state == "whole" or state == "changed" and (rank, ranks) == (0, 2)
            if healthy:
                assert text is None, f"{where} should return None, not {text!r}: the files that this rank reads are intact"
            else:
                assert isinstance(text, str) and named.get(state, "") in text, \
                    f"{where} should return a text with the name {named.get(state, '')!r}, but returned {text!r}"
            expected = share[rank, ranks]
            if state == "whole":
                assert read == expected, f"{where} should read {expected}, but read {read}"
            if state not in ("whole", "changed", "exchanged"):
                assert not read, f"{where}: it can tell that without reading a file, but it read {read}"


def choose_job(folder):
    import fcntl

    import disk
    import resume
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, found, printed = dist.get_rank(), {}, []

    def lock(directory):                                  # as another run would
        file = open(Path(directory, ".lock"), "a")
        disk.lock(file, f"--checkpoint {directory}")
        return file

    def choose(where, resumes):
        checkpoints = object.__new__(resume.Checkpoints)
        checkpoints.args = SimpleNamespace(checkpoint=where, resume=resumes)
        with patch("resume.print0", printed.append):
            answer = outcome(checkpoints.choose)
        dist.barrier()
        again = None
        if rank == 0 and not failed(answer):              # the directory stays locked as long as Checkpoints lives
            again = failed(outcome(lock, where))
        if isinstance(answer, tuple) and not failed(answer):
            answer = names([answer[0]]), answer[1] and answer[1]["steps"]
        file = getattr(checkpoints, "lock_file", None)
        file.close() if hasattr(file, "close") else None
        return answer, again
    full, empty = f"{folder}/run", f"{folder}/empty"
    other = lock(full) if rank == 0 else None
    found["in use"] = choose(full, True)[0], sorted(os.listdir(full))
    other and other.close()
    dist.barrier()
    for case in CASES:
        printed.clear()
        found[case] = *choose(empty if "nothing there" in case else full, "no --resume" not in case), "".join(printed)
        if case == "--resume":
            left = sorted(os.listdir(full))
    dist.barrier()
    if rank == 0:
        Path(empty, ".lock").write_text("my notes")
        first = lock(empty)
        found["second"] = outcome(lock, empty)
        first.close()
        third = outcome(lock, empty)
        found["third"] = failed(third)
        third.close() if hasattr(third, "close") else None
        printed.clear()
        with patch.object(fcntl, "flock", side_effect=OSError("no locks")), patch("disk.print0", printed.append):
            found["no locks"] = hasattr(outcome(lock, empty), "close") and bool(printed)
        found["text"] = Path(empty, ".lock").read_text()
    return found, left


CASES = "nothing there, no --resume", "nothing there, --resume", "--resume", "no --resume"


@rung({"disk.py": ["lock"], "resume.py": ["Checkpoints.choose"]}, hints="""
    Two runs in one directory would delete each other's checkpoints. A file that says "in use" is not enough: a run that is
    killed cannot remove it. But the system can hold a lock on an open file, and it releases the lock when the file is closed or its
    process ends, however it ends.

    `fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)` locks an open file, or raises BlockingIOError if another process has locked
    it. Opening with "a" creates the file if it does not exist, and loses nothing in it. choose: list_checkpoints(self.args) returns
    the oldest first. What if there are some, and self.args.resume is False? And what if there are none, and it is True?

    lock: try: flock; except BlockingIOError: fail("..."); except OSError: print0("..."). choose: if dist.get_rank() > 0: return
    None; self.lock_file = open(Path(self.args.checkpoint, ".lock"), "a"); lock(self.lock_file, f"--checkpoint ..."); for
    unfinished in list_checkpoints(self.args, ".tmp"): shutil.rmtree(unfinished, ignore_errors=True); checkpoints =
    list_checkpoints(self.args); if checkpoints and not self.args.resume: fail("..."); if checkpoints: return checkpoints[-1],
    index_of(checkpoints[-1]); if self.args.resume: print0("...").""")
def test_where_to_resume(pool, tmp_path):
    """Write `lock(file, flag)`. It locks an open file with fcntl.flock, without waiting. It calls fail(message) if another run has
    locked the file; if locks are not supported (any other OSError) it says so, with `print0`, and returns. Both messages name
    `flag`. Write `Checkpoints.choose()`, which all ranks call; its decorator makes all of them exit if fail is called on rank 0. It
    returns None on all ranks but rank 0, which does this: open the file .lock in the directory self.args.checkpoint without
    changing its text, lock it, and keep it open in self.lock_file; delete what killed runs have left (the checkpoints with the
    suffix ".tmp"); and, if self.args.resume is True, return (path, index_of(path)) of the newest checkpoint. If there is none,
    return None, and print that the run starts from the beginning. If self.args.resume is False, return None, too, but fail if there
    are checkpoints, which a new run would mix with its own."""
    run, empty, steps = tmp_path / "run", tmp_path / "empty", (2, 4, 10)
    for name in [*(f"step_{step:08d}" for step in steps), "step_00000006.tmp", "step_00000012.tmp", "notes", "notes.tmp"]:
        (run / name).mkdir(parents=True)
        index = dict(steps=int(name[5:13]) if name.startswith("step") else 0, digests={}, run={})
        (run / name / "index.json").write_text(json.dumps(index))
    empty.mkdir()
    (found, left), (other, _) = pool.call(choose_job, STEP, world=2, folder=str(tmp_path))
    right = dict(zip(CASES, (None, None, (["step_00000010"], 10), "fail")))
    came, there = found.pop("in use")
    other.pop("in use")
    assert failed(came) and "step_00000006.tmp" in there, (
        f"while another run trains in the directory, choose should call fail and delete nothing (names in .tmp may be the "
        f"other's); it returned {came}, and {there} were left")
    for case, expected in right.items():
        came, again, said = found[case]
        where = f"checkpoints after steps {steps}, rank 0 ({case}): choose"
        if expected == "fail":
            assert failed(came), f"{where} should call fail, but returned {came}"
            continue
        assert came == expected, f"{where} should return {expected} (path, steps of its index), but returned {came}"
        assert again, f"{where}: afterwards the directory should be locked, so that lock fails in another run"
        assert said or case != "nothing there, --resume", f"{where} should say, with print0, that it starts from the beginning"
    for case, (came, *_) in other.items():
        if right[case] != "fail":                         # then all ranks exit together
            assert came is None, f"{case}: on rank 1 choose must return None and do nothing, but it returned {came}"
    assert failed(found["second"]), f"a second lock in the same directory should call fail, but returned {found['second']}"
    assert not found["third"], "once the first file is closed, or its process has ended, another run can lock the directory"
    assert found["no locks"], "if flock raises OSError, lock should say so with print0, and return"
    assert found["text"] == "my notes", f".lock had the text 'my notes' and should keep it; it has {found['text']!r}"
    expected = ["notes", "notes.tmp", *(f"step_{step:08d}" for step in steps)]
    assert sorted({*left} - {".lock"}) == expected, \
        f"after choose has run once, {expected} should be there (and .lock), but {left} are"


# ------------------------------------------------------------------------------------------------ the moment to save
def save_if_due_job(signal_at, checkpoint):
    """Run eight steps, with a checkpoint after every third. Rank 1 gets a signal in step signal_at."""
    import signal

    import torch.distributed as dist
    from resume import Checkpoints
    dist.init_process_group("gloo")
    checkpoints, saved, ended = object.__new__(Checkpoints), [], None
    checkpoints.args = SimpleNamespace(checkpoint=checkpoint, save_every=3, steps=8, device="cpu")
    checkpoints.signals, checkpoints.save = [], saved.append

    def unwanted(*args, **kwargs):
        raise AssertionError("without --checkpoint, save_if_due must do nothing: ranks must not communicate")
    collectives = "all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "all_gather_into_tensor"
    watch = patch.multiple(dist, **dict.fromkeys(collectives, unwanted)) if not checkpoint else contextlib.nullcontext()
    for step in range(8):
        if step == signal_at and dist.get_rank() == 1:
            checkpoints.signals.append(signal.SIGTERM)
        with watch:
            answer = checkpoints.save_if_due(step)
        if answer or not isinstance(answer, bool):
            ended = step if answer is True else f"{step}, {answer!r}"
            break
    return saved, ended


def signals_job():
    import signal

    import resume
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
    before, found = [signal.getsignal(number) for number in numbers], []
    try:
        for number in numbers:
            for other, handler in zip(numbers, before):
                signal.signal(other, handler)
            signals = resume.install_signal_handlers()
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None):
                found.append((number.name, None, None))
                continue
            for _ in range(1 if number == signal.SIGINT else 2):
                signal.raise_signal(number)
            found.append((number.name, [int(n) for n in signals], signal.getsignal(signal.SIGINT) == signal.SIG_DFL))
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signals = resume.install_signal_handlers()
        kept = [signal.getsignal(number) == signal.SIG_IGN for number in numbers]
        if not kept[2]:
            signal.raise_signal(signal.SIGINT)
        return found, kept, [int(n) for n in signals]
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@rung({"resume.py": ["install_signal_handlers", "Checkpoints.save_if_due"]}, hints="""
    Some time before it ends a job, Slurm sends it a signal. A signal may arrive at any line of the program, and one rank may
    receive it a step before another. So the handler only appends it to a list. All ranks must save after the same step, because
    they save together: how do they agree?

    `signal.signal(number, handler)` makes Python call handler(number, frame) when the signal arrives; the handler appends the
    number to a list. Numbers are above 0, so 0 can mean that there was no signal: the maximum over all ranks says whether any rank
    has received one. A second Ctrl-C should end the program at once: in the handler, `signal.signal(signal.SIGINT,
    signal.SIG_DFL)`.

    install_signal_handlers: for number in (SIGTERM, SIGHUP, SIGINT): if number == signal.SIGINT or signal.getsignal(number) !=
    signal.SIG_IGN: signal.signal(number, handler); return the list. save_if_due: without self.args.checkpoint return False;
    stop_signal = torch.tensor(max(self.signals, default=0), device=self.args.device); dist.all_reduce(stop_signal,
    op=dist.ReduceOp.MAX); is_last = step + 1 == self.args.steps; if stop_signal or is_last or (step + 1) % self.args.save_every ==
    0: self.save(step + 1); return bool(stop_signal) and not is_last.""")
def test_when_to_save_and_when_to_end(pool):
    """Write `install_signal_handlers()`. It returns an empty list. From then on, each SIGTERM, SIGHUP and SIGINT (Ctrl-C) only
    appends its number to this list. But after any of them, the next SIGINT ends the program (SIG_DFL). If SIGTERM or SIGHUP is
    ignored (SIG_IGN, as with nohup), it stays ignored; SIGINT is handled in any case. Write `Checkpoints.save_if_due(step)`, which
    all ranks call after every step (the first is 0). Call self.save(number of steps done), once, if this number is a multiple of
    self.args.save_every, if it is self.args.steps, or if any rank has a number in self.signals. Return True, on all ranks, if the
    run has to end here because a rank has received a signal, and otherwise False: after the last step, too. Without
    self.args.checkpoint, do nothing and return False."""
    found, kept, signals = pool.call(signals_job, STEP)[0]
    import signal
    for name, came, ends in found:
        times = 1 if name == "SIGINT" else 2
        expected = [int(getattr(signal, name))] * times
        assert came == expected, \
            f"after {times} {name} the list should be {expected}, but was {came} (None: no handler is installed)"
        assert ends, f"after {name}, the handler of SIGINT should be SIG_DFL, so that Ctrl-C ends the program"
    assert kept[:2] == [True, True], "SIGTERM and SIGHUP were ignored (SIG_IGN) before the call, and should stay ignored"
    assert signals == [int(signal.SIGINT)], f"SIGINT was ignored before the call, but should be handled after it; list: {signals}"
    for signal_at, checkpoint, saves, end in ((None, "folder", [3, 6, 8], None), (4, "folder", [3, 5], 4), (5, "folder", [3, 6], 5),
                                             (7, "folder", [3, 6, 8], None), (4, None, [], None)):
        for rank, (saved, ended) in enumerate(pool.call(save_if_due_job, STEP, world=2, signal_at=signal_at,
                                                        checkpoint=checkpoint)):
            where = f"8 steps, save_every 3, --checkpoint {checkpoint}, on rank 1 a signal in step {signal_at}: rank {rank}"
            assert saved == saves, f"{where} should call save with {saves}, but called it with {saved}"
            right, came = ("in no step" if step is None else f"in step {step}" for step in (end, ended))
            assert ended == end, f"{where} should get True from save_if_due {right}, but got it {came}"


# ------------------------------------------------------------------------------------------------ what is saved
def state_job(argv):
    """Return what state() gives before the first step and after the last, and whether its boxes are the optimizer's own memory."""
    import torch
    import train
    from resume import Checkpoints
    found = {}

    def load(self):
        found["before"] = {key: box.clone() for key, box in self.state().items()}
        adam = [self.optimizer.adamw.state[master] for master in self.optimizer.masters]
        found["adam"] = all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() and state["step"].shape == () for state in adam)
        found["masters"] = {str(master.dtype) for master in self.optimizer.masters}
        return 0

    def save_if_due(self, step):
        if step + 1 == self.args.steps:
            state, memory = self.state(), []
            found["after"] = {key: box.clone() for key, box in state.items()}
            for box in state.values():
                box.fill_(step)
            for master in self.optimizer.masters:
                memory += [master, *(self.optimizer.adamw.state[master][name] for name in ("exp_avg", "exp_avg_sq"))]
            found["views"] = all(bool((tensor == step).all()) for tensor in memory) and bool((self.balancer.bias == step).all())
            for key, box in state.items():
                box.copy_(found["after"][key])
        return False
    with torch.no_grad(), patch.multiple(Checkpoints, load=load, save_if_due=save_if_due), torch.enable_grad():
        train.main(argv)
    return found


def whole(answers, when):
    """Return {name: whole tensor}, put together from all ranks' boxes."""
    import torch
    boxes = {}
    for answer in answers:
        boxes |= answer[when]
    sizes = {}
    for key, box in boxes.items():
        name, offsets = key.split("[")[0], json.loads(key[key.index("["):])
        ends = [a + n for a, n in zip(offsets, box.shape)]
        sizes[name] = [max(a, b) for a, b in zip(sizes.get(name, ends), ends)]
    tensors = {name: torch.full(size, torch.nan, dtype=torch.float64) for name, size in sizes.items()}
    for key, box in boxes.items():
        name, offsets = key.split("[")[0], json.loads(key[key.index("["):])
        tensors[name][tuple(slice(a, a + n) for a, n in zip(offsets, box.shape))] = box.double()
    return tensors


@rung({"resume.py": ["Checkpoints.state"]}, hints="""
    What exists now that cannot be computed again? The weights, in the precision in which they are updated; AdamW's
    moments; and the experts' biases. Not the gradients, and nothing random. Which object has these, and which parameter does each
    belong to?

    self.optimizer.params and self.optimizer.masters belong together, and self.optimizer.adamw.state[master] is a dictionary,
    which is empty before the first step: allocate zeros then, so that they can be filled. With ZeRO a param is a sharded parameter,
    and its `origin` is (parameter, index where it begins in it); without ZeRO it is the parameter itself, from index 0 on. Names
    are those of self.model.named_parameters().

    param_names, state = {param: name for name, param in self.model.named_parameters()}, {}; for sharded_param, master in
    zip(params, masters): param, start = getattr(sharded_param, "origin", (sharded_param, 0)); adam_state = adamw.state[master]; if
    not adam_state: adam_state.update(step=torch.zeros((), device=master.device), exp_avg=torch.zeros_like(master),
    exp_avg_sq=torch.zeros_like(master)); state |= boxes(param_names[param], param, start, master), and the same for both moments,
    with the name f"{param_names[param]}.{average}". Then for layer, bias in zip(self.model.model.layers, self.balancer.bias):
    state[f"balance.bias[{layer}, 0]"] = bias.unsqueeze(0).""")
def test_what_must_not_be_lost(pool, tmp_path):
    """Write `Checkpoints.state()`. It returns {key: box} of everything that this rank has of the training state, as `boxes` returns
    them: for each of self.optimizer.params the master, under the parameter's name, and Adam's "exp_avg" and "exp_avg_sq", under the
    name + ".exp_avg" and ".exp_avg_sq". Boxes are views: writing to them writes to the optimizer. Before the first step, Adam has
    no moments; then allocate them, as zeros, and its count "step", a tensor of no dimension. With ZeRO, a param is a piece of a
    parameter, and its `origin` is (parameter, index of its first element there). In a model with experts, add
    `balance.bias[LAYER, 0]` for each layer of self.model.model.layers, whose keys are the layers' numbers: the layer's row of
    self.balancer.bias, as a box of 1 x experts."""
    alone = {}

    def made(shape, dtype="float64"):
        folder = tmp_path / f"{shape}-{dtype}"
        return f"{cases.make(tmp_path / shape, **cases.shape(shape))} --dtype {dtype} --checkpoint {folder} --steps 2"
    for shape, world, more in (("dense-2", 3, "--zero 1 --micro_batch_size 4"), ("dense-2", 2, "--tp 2 --micro_batch_size 12"),
                               ("top2-2", 4, "--pp 2 --ep 2 --zero 3 --micro_batch_size 6")):
        if shape not in alone:
            alone[shape] = pool.call(state_job, STEP, argv=f"{made(shape)} --micro_batch_size 12".split())
        one, many = alone[shape], pool.call(state_job, STEP, world=world, timeout=60, argv=f"{made(shape)} {more}".split())
        weights = pool.train(STEP, f"{made(shape).split(' --checkpoint')[0]} --micro_batch_size 12 --steps 2").weights
        in_file = {name: tensor for name, tensor in whole(one, "after").items() if ".exp_avg" not in name}
        biases = in_file.pop("balance.bias", None)
        assert sum(t.numel() for t in in_file.values()) == sum(t.numel() for t in weights.values()), \
            f"{shape}, one process: state should have all weights, but has {sorted(in_file)}"
        assert (biases is not None) == (shape != "dense-2"), f"{shape}: balance.bias belongs to models with experts; it is {biases}"
        if biases is not None:
            keys = {key: list(box.shape) for key, box in one[0]["after"].items() if key.startswith("balance")}
            expected = {f"balance.bias[{layer}, 0]": [1, biases.shape[-1]] for layer in range(2)}
            assert keys == expected, f"{shape}, one process: balance.bias should have boxes with the shapes {expected}, not {keys}"
        ends = {name[name.index(".exp_avg"):] for name in whole(one, "after") if ".exp_avg" in name}
        assert ends == {".exp_avg", ".exp_avg_sq"}, f"{shape}: the moments should be named .exp_avg and .exp_avg_sq, not {ends}"
        for when in ("before", "after"):
            what = f"{shape}, {world} ranks with {more}, {when} the training: the boxes of all ranks together, and of one process"
            assert_same_tensors(whole(many, when), whole(one, when), 1e-9, what)
            for name, tensor in whole(many, when).items():
                zero = ".exp_avg" in name and when == "before"
                assert bool(tensor.abs().sum() == 0) == zero or name == "balance.bias", f"{name} {when} the training: {tensor}"
        for answer in (*one, *many):
            assert answer["adam"], (f"{shape}: before step 0, adamw.state[master] should get step, of no dimension, exp_avg "
                                    "and exp_avg_sq")
            assert answer["views"], f"{shape}: writing to the boxes should write to masters, moments and balance.bias"
    low = pool.call(state_job, STEP, argv=f"{made('dense-2', 'bfloat16')} --micro_batch_size 12".split())[0]
    dtypes = {str(box.dtype) for box in low["after"].values()}
    assert dtypes == low["masters"] == {"torch.float32"}, f"with --dtype bfloat16, boxes should be float32 masters, not {dtypes}"


# ------------------------------------------------------------------------------------------------ a run that resumes
def train_job(argv, optimizer, breaks=None):
    """Train. Return for each rename the old and the new name, and the folder's content at that time; and what is deleted.
    `breaks` says what to break when `write` begins: a box that another rank writes, or the folder; then return the status that
    ends the run."""
    import torch
    import train
    from resume import Checkpoints
    renamed, rename, write, rmtree = [], os.rename, Checkpoints.write, shutil.rmtree

    def watched(old, new, *more, **named):
        files = sorted(os.listdir(old)) if os.path.isdir(old) else []
        renamed.append((os.path.basename(old), os.path.basename(new), files))
        rename(old, new, *more, **named)

    def deleted(path, *more, **named):
        renamed.append((os.path.basename(path), "deleted", []))
        rmtree(path, *more, **named)

    def broken(self, folder, state):
        if breaks == "box":
            key = next(key for key in state if key not in self.local_keys)
            state = {**state, key: torch.full_like(state[key], torch.inf)}
        else:
            folder.touch()
        return write(self, folder, state)
    with (patch.object(os, "rename", watched), patch.object(shutil, "rmtree", deleted),
          patch.object(Checkpoints, "write", broken if breaks else write)):
        try:
            train.main(argv)
        except SystemExit as end:
            if not breaks:
                raise
            return end.code
    return [what for what in renamed if what[0].startswith("step_")]


def incomplete_job(argv):
    """Take a box out of the newest checkpoint, and correct its digest."""
    import train
    from safetensors.torch import load_file, save_file
    folder = sorted(Path(argv[argv.index("--checkpoint") + 1]).glob("step_*"))[-1]
    index = json.loads((folder / "index.json").read_text())
    file = next(path for path in folder.glob("*.safetensors") if "model.norm.weight[0]" in load_file(path))
    tensors = load_file(file)
    tensors.pop("model.norm.weight[0]")
    save_file(tensors, file)
    index["digests"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    return outcome(train.main, argv)


@rung({"resume.py": ["Checkpoints.write", "Checkpoints.finish", "Checkpoints.restore"]}, hints="""
    Every run takes a folder named step_00000200 for complete. So it must get this name when every file is complete, at one moment.
    Until then it is step_00000200.tmp. `save`, which is there, calls `write` on all ranks, and `finish` when all of them have
    written. The run may also be killed while it deletes older checkpoints. What would the next run find then?

    safetensors' `save_file({key: tensor on the CPU}, path)`; `digest(path)`. Path.rename(other) renames, and path.with_suffix("")
    removes .tmp. `list_checkpoints(self.args)[:-keep]` are those to delete. `fill(self.state(), paths)` returns the key of a box
    that it could not fill, or None. It fills masters and moments, but neither Adam's count nor the weights with which the model
    computes.

    write: if not all(box.isfinite().all() for box in state.values()): fail("...", 3); folder.mkdir(exist_ok=True); save_file({key:
    state[key].cpu() for key in self.local_keys}, path); return path.name, digest(path). finish: on rank 0 (folder /
    "index.json").write_text(json.dumps(dict(steps=int(folder.stem[5:]), digests=digests, run=self.run,
    planned_steps=self.args.steps))); folder.rename(folder.with_suffix("")); for outdated in
    list_checkpoints(self.args)[:-self.args.keep]: shutil.rmtree(outdated.rename(outdated.with_suffix(".tmp"))). restore: if
    fill(self.state(), [folder / name for name in index["digests"]]): fail("..."); for param, master in zip(self.optimizer.params,
    self.optimizer.masters): adamw.state[master]["step"].fill_(int(folder.name[5:])); param.data.copy_(master).""")
def test_resumes_under_another_layout(pool, tmp_path):
    """Write `Checkpoints.write(folder, state)`, which all ranks call. folder, a Path, is step_00000200.tmp; whichever rank comes
    first creates it. If an element of the state is not finite, call fail(message, 3); the decorator makes all ranks exit. Write the
    boxes that this rank has to write (self.local_keys, a list of keys) to the file rank_00003.safetensors (on rank 3) and return
    (file name, its digest). Write `Checkpoints.finish(folder, digests)`, which all ranks call when all have written, with {file
    name: digest} of all ranks, and which acts only on rank 0: it writes index.json, {"steps": 200, "digests": digests, "run":
    self.run, "planned_steps": self.args.steps}, renames the folder to step_00000200, and deletes all checkpoints but the newest
    self.args.keep; first rename each of these to its name + ".tmp", so that a half-deleted one never looks complete. (Create and
    write inside `with fail_on_io_error(folder, self.args):`, which fails with one line if the disk is full.) Write
    `Checkpoints.restore(folder, index)`, which fills self.state() from the files of index["digests"], fails if a box is not filled,
    sets Adam's "step" to the number of steps that are done, and copies the masters to the parameters. A run of two ranks with --ep
    2 and ZeRO-2, resumed after two steps by two ranks with --tp 2, must have the losses, norms and weights of one process."""
    from safetensors.torch import load_file
    case, folder = cases.make(tmp_path / "case", **cases.shape("top2-2")) + " --dtype float64", tmp_path / "run"
    one = pool.train(STEP, f"{case} --micro_batch_size 12")
    base = f"{case} --micro_batch_size 6 --ep 2 --zero 2 --checkpoint {folder} --save_every 1 --keep 3"
    first = pool.train(STEP, base, world=2, weights=False, job=train_job)
    files, right = ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"], []
    for step in range(1, 5):
        right.append((f"step_{step:08d}.tmp", f"step_{step:08d}", files))
        if step > 3:
            right += [(f"step_{step - 3:08d}", f"step_{step - 3:08d}.tmp", files), (f"step_{step - 3:08d}.tmp", "deleted", [])]
    assert first.answers[0] == right, \
        f"with --save_every 1 --keep 3 rank 0 should rename and delete (from, to, files in it) {right}, but did {first.answers[0]}"
    assert first.answers[1] == [], f"rank 1 must rename and delete nothing; it did {first.answers[1]}"
    expected, left = [".lock", "step_00000002", "step_00000003", "step_00000004"], sorted(os.listdir(folder))
    assert left == expected, f"after the run {expected} should be there, but {left} are"
    for name in expected[1:]:
        index = json.loads((folder / name / "index.json").read_text())
        digests = {file: hashlib.sha256((folder / name / file).read_bytes()).hexdigest() for file in files[1:]}
        keys = [key for file in files[1:] for key in load_file(folder / name / file)]
        assert len(keys) == len({*keys}), f"{name}: a rank must write self.local_keys, so no box is in both files: {sorted(keys)}"
        came = index["steps"], index["digests"]
        assert came == (int(name[5:]), digests), f"{name}: index.json should have {int(name[5:])} steps and {digests}, not {came}"
    pool.train(STEP, f"{base} --steps 5 --keep 1 --resume", world=2, weights=False, job=train_job)
    left = sorted(os.listdir(folder))
    assert left == [".lock", "step_00000005"], f"with --keep 1 only the newest should be there, but {left} are"
    shutil.rmtree(folder)
    pool.train(STEP, base.replace("--save_every 1", "--save_every 2"), world=2, weights=False, job=train_job)
    shutil.rmtree(folder / "step_00000004")
    second = pool.train(STEP, f"{case} --micro_batch_size 12 --tp 2 --checkpoint {folder} --resume", world=2,
                        job=train_job)
    assert [line["step"] for line in second.lines] == [2, 3], f"the resumed run should do steps 2 and 3: {second.output}"
    for name in ("losses", "grad_norms"):
        for step, ours, theirs in zip(itertools.count(2), getattr(second, name), getattr(one, name)[2:]):
            assert relative(ours, theirs) < 1e-9, f"{name} of step {step}, resumed: expected {theirs}, got {ours}"
    assert_same_tensors(second.weights, one.weights, 1e-9, "the weights at the end of the resumed run")
    low = f"{case.replace('float64', 'bfloat16')} --micro_batch_size 12 --checkpoint {tmp_path / 'low'}"
    whole_run = pool.train(STEP, f"{low} --save_every 2", weights=False)
    shutil.rmtree(tmp_path / "low" / "step_00000004")
    losses = pool.train(STEP, f"{low} --resume", weights=False).losses
    assert losses == whole_run.losses[2:], f"bfloat16: a resumed run should have the losses {whole_run.losses[2:]}, not {losses}"
    argv = f"{case} --micro_batch_size 12 --ep 2 --save_every 1 --checkpoint {tmp_path / 'broken'}".split()
    broken = pool.call(train_job, STEP, world=2, argv=argv, optimizer="adamw", breaks="box")
    assert broken == [3, 3], \
        f"if an element of the state is infinite, all ranks should exit with status 3, by fail; they exited with {broken}"
    there = [name for name in os.listdir(tmp_path / "broken") if name != ".lock" and not name.endswith(".tmp")]
    assert not there, f"if an element is infinite, nothing may look like a complete checkpoint; there is {there}"
    argv[-1] = str(tmp_path / "not a folder")
    broken = pool.call(train_job, STEP, world=2, argv=argv, optimizer="adamw", breaks="folder")
    said = "".join(pool.last.printed.values())
    assert broken == [2, 2] and "cannot be written" in said, \
        (f"if the folder cannot be created or written, fail_on_io_error should make all ranks exit with status 2, and say that it "
         f"cannot be written; they exited with {broken}, and printed: {said}")
    argv = f"{case} --micro_batch_size 12 --checkpoint {folder} --resume --steps 6".split()
    came = pool.call(incomplete_job, STEP, argv=argv)[0]
    assert failed(came), f"if a box is in no file, restore should call fail; the run returned {came}"


# ------------------------------------------------------------------------------------------------ no rung: puzzle08.py
def test_the_puzzle():
    """Check that the puzzle's table has the fewest bytes that any of the planner's layouts sends, and that it counts the bytes of
    all ranks."""
    import re

    import puzzle08
    limits, least = (re.findall(r"[\d,.]+", line.split("step" if "step" in line else "used")[1])
                     for line in re.findall("^    GiB .*", puzzle08.__doc__, re.M))
    found = {limit: sum(puzzle08.on_the_wire(l).values()) / 2**30 for limit, l in puzzle08.least().items()}
    assert found and [f"{size:,.1f}" for size in found.values()] == least and list(map(int, limits)) == list(found)
    weights = puzzle08.costs.model_parameters(puzzle08.C)
    one = puzzle08.plan.parse_config("dp=16,zero=1", puzzle08.C, puzzle08.CLUSTER, puzzle08.SEQ_LEN, puzzle08.SEQUENCES)
    assert puzzle08.on_the_wire(one) == {"dp": 15 * (4 + 2) * weights}             # 15/16 of each, by 16 ranks
    two = puzzle08.plan.parse_config("dp=1,tp=1,pp=16,acc=64", puzzle08.C, puzzle08.CLUSTER, puzzle08.SEQ_LEN, puzzle08.SEQUENCES)
    assert puzzle08.on_the_wire(two) == {"pp": 2 * 15 * 64 * 8192 * 4096 * 2}      # each border, out and back
