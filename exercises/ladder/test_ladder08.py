"""The ladder of step 8: a run that was stopped or killed goes on, even in another layout. Each test is a rung; exercise.py explains
how to use them."""
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
HANGS = 20                                                # seconds: ranks that wait for each other are stopped


def outcome(function, *arguments):
    """Return a function's result, or if it calls refuse, ("refused", exit status, message)."""
    try:
        return function(*arguments)
    except SystemExit as end:
        return "refused", end.code, getattr(end, "message", "")


def refused(what):
    return isinstance(what, tuple) and what[:2] == ("refused", 2)


def names(paths):
    """Replace paths by names, to compare and to print."""
    return [path.name if isinstance(path, Path) else repr(path) for path in paths] if isinstance(paths, list) else paths


# ------------------------------------------------------------------------------------------------ names
def own_job(folder):
    from resume import list_checkpoints
    return [names(outcome(list_checkpoints, SimpleNamespace(checkpoint=where), *more))
            for where, *more in ((folder,), (folder, ".tmp"), (folder, ".aside"), (f"{folder}/nowhere",))]


@rung({"resume.py": ["list_checkpoints"]}, hints="""
    People keep other things in a checkpoint directory: notes, a log, a copy of a checkpoint. The trainer deletes old
    checkpoints, so it must be sure which names are its own. What do the trainer's names look like?

    `Path(folder).glob(pattern)` returns the paths whose whole name matches the pattern, in no order; for a folder that does not
    exist it returns none. In a pattern, `[0-9]` is one digit. With eight digits, alphabetical order is the order of the
    steps.

    return sorted(Path(args.checkpoint).glob("step_" + "[0-9]" * 8 + ending)).""")
def test_own_names_only(pool, tmp_path):
    """Write `own(args, ending="")`. It returns a list of the checkpoints in the directory args.checkpoint, as Path, the one with
    the fewest steps first. Their names are `step_`, exactly eight digits, and the ending. Leave out all other names: they belong to
    somebody else. If the directory does not exist, the list is empty."""
    folder = tmp_path / "run"
    right = {"": ["step_00000002", "step_00000010", "step_00000011", "step_00000200"],
             ".tmp": ["step_00000004.tmp", "step_00000012.tmp"], ".aside": ["step_00000005.aside"]}
    others = ["step_3", "step_000000020", "step_00000005.aside.d", "my_step_00000001", "step_0000000a", "step_00000002xtmp",
              "step_00000002_best", "step_newest00", "notes.tmp", "step_00000012.tmp.d", "step_0000000\u0663", "step_0000000\u00b2",
              "step_00000002\n", "step_00000004.tmp\n"]
    for i, name in enumerate([*sum(right.values(), []), *others]):
        (folder / name / "step_00000001").mkdir(parents=True)
        os.utime(folder / name, (10**9 - i, 10**9 - i))
    *came, nowhere = pool.call(own_job, STEP, folder=str(folder))[0]
    there = f"a directory has {sorted(os.listdir(folder))}"
    for (ending, expected), listed in zip(right.items(), came):
        assert listed == expected, f"{there}. own with the ending {ending!r} should return the list of {expected}, not {listed}"
    assert nowhere == [], f"for a directory that does not exist, own must return an empty list, not {nowhere}"


# ------------------------------------------------------------------------------------------------ boxes
STORED = {"rows": [(0, 0, 2, 6), (2, 0, 2, 6)], "columns": [(0, 0, 4, 1), (0, 1, 4, 3), (0, 4, 4, 2)],
          "quarters": [(0, 0, 2, 3), (0, 3, 2, 3), (2, 0, 2, 3), (2, 3, 2, 3)]}      # begin and shape, in a tensor of 4 x 6
WANTED = [(0, 0, 4, 6), (0, 3, 4, 3), (1, 0, 2, 6), (1, 2, 2, 3), (3, 5, 1, 1), (2, 1, 1, 4)]


def overlap_job():
    import torch
    from boxes import copy_overlap
    whole, found = torch.arange(24.0).view(4, 6), []

    class Stored:
        """A box in a file, as safetensors gives it. It counts how many numbers are read."""

        def __init__(self, numbers):
            self.numbers, self.read = numbers, 0

        def get_shape(self):
            return list(self.numbers.shape)

        def __getitem__(self, index):
            part = self.numbers[index]
            self.read += part.numel()
            return part
    for stored in itertools.chain(*STORED.values()):
        for wanted in WANTED:
            mine, theirs = (whole[box[0]:box[0] + box[2], box[1]:box[1] + box[3]] for box in (wanted, stored))
            memory, saved = torch.full((6, 8), -1.0), Stored(theirs.clone())
            box = memory[:wanted[2], :wanted[3]]
            copy_overlap(box, list(wanted[:2]), saved, list(stored[:2]))
            in_theirs = torch.zeros(4, 6, dtype=bool)
            in_theirs[stored[0]:stored[0] + stored[2], stored[1]:stored[1] + stored[3]] = True
            in_theirs = in_theirs[wanted[0]:wanted[0] + wanted[2], wanted[1]:wanted[1] + wanted[3]]
            right = torch.where(in_theirs, mine, -1.0)
            found.append((stored, wanted, right.tolist(), box.tolist(), int(in_theirs.sum()), saved.read))
    line, box, saved = torch.arange(7.0), torch.full((3,), -1.0), Stored(torch.arange(4.0, 7.0))
    copy_overlap(box, [2], saved, [4])                    # a vector
    cube, part = torch.arange(24.0).view(2, 3, 4), torch.full((1, 2, 3), -1.0)
    copy_overlap(part, [1, 1, 0], Stored(cube[:, :2, 1:].clone()), [0, 0, 1])
    return found, [(box.tolist(), [-1, -1, line[4].item()]), (part.tolist(), [[[-1, *cube[1, 1, 1:3].tolist()], [-1] * 3]])]


@rung({"boxes.py": ["copy_overlap"]}, hints="""
    Draw the whole tensor, the box in the file, and the box in memory. Their overlap is a box again. Where does it begin, and
    where does it end? Then write down where it lies in the box in the file, and where in the box in memory.

    In each dimension the overlap goes from the later of the two starts to the earlier of the two ends. If in some dimension
    it ends where it begins, or before, there is no overlap. To get indices inside a box, subtract its start.
    `saved[index]` with a tuple of slices reads only these numbers.

    low = [max(a, b) for a, b in zip(here, there)]; high = [min(a + n, b + m) for a, n, b, m in zip(here, box.shape, there,
    saved.get_shape())]; if all(l < h for l, h in zip(low, high)): into, part = (tuple(slice(l - o, h - o) for l, h, o in
    zip(low, high, origin)) for origin in (here, there)); box[into] = saved[part].""")
def test_what_overlaps_with_mine(pool):
    """Write `copy_overlap(box, here, saved, there)`. It copies the numbers that `saved` shares with `box`, a tensor, into `box`.
    Both are boxes of one whole tensor, in which `box` begins at `here` and `saved` at `there`: lists with a number for each
    dimension, of which there may be one, two or three. `saved` is a box in a file: saved.get_shape() is its shape, and saved[index]
    reads from the disk, so read only the overlap, and only once. Leave all other numbers of `box` as they are."""
    found, other = pool.call(overlap_job, STEP)[0]
    for stored, wanted, right, came, common, read in found:
        where = (f"from a tensor of 4 x 6 with the numbers 0 to 23, the file has {stored}, wanted is {wanted} (row, column, rows, "
                 "columns)")
        assert came == right, f"{where}. The wanted box, which was full of -1, should now have {right}, but has {came}"
        assert read == common, f"{where}. They have {common} numbers in common, but {read} were read"
    for came, right in other:
        assert came == right, f"in one or three dimensions, the box should have {right}, but has {came}"


def fill_job(folder):
    import torch
    from boxes import fill
    from safetensors.torch import save_file
    whole = torch.arange(24.0).view(4, 6)
    others = {"w.exp_avg[0, 0]": 100 + whole, "v[0]": torch.arange(5.0), "theirs[0, 0]": torch.ones(4, 6)}
    found, paths = {}, {}
    for how, stored in STORED.items():
        paths[how] = [Path(folder, f"{how}_{i}.safetensors") for i in range(len(stored))]
        for i, (row, column, rows, columns) in enumerate(stored):
            part = whole[row:row + rows, column:column + columns].contiguous()
            save_file({f"w[{row}, {column}]": part} | (others if i == 0 else {}), paths[how][i])
    memory = torch.zeros(12, 6)                           # all boxes are views of it, as they are of an optimizer's memory

    def state():
        memory.fill_(7)
        return {"w[0, 0]": memory[:4], "w[1, 2]": memory[4:6, :3], "w.exp_avg[2, 0]": memory[6:8], "v[3]": memory[8, :2],
                "w.exp_avg[0, 5]": memory[9:10, :1]}
    for how in STORED:
        left = fill(state(), paths[how])
        rest = [memory[4:6, 3:], memory[8, 2:], memory[9, 1:], memory[10:]]
        found[how] = (left, memory[:4].tolist(), memory[4:6, :3].tolist(), memory[6:8].tolist(), memory[8, :2].tolist(),
                      memory[9, 0].item(), all(bool((part == 7).all()) for part in rest))
    # the last column is in no file; a box that no file has at all; nothing that is read is missing
    gaps = [fill({"w[0, 0]": memory[:4], "w[0, 1]": memory[4:8, :2]}, paths["columns"][:2]),
            fill({"w[0, 1]": memory[4:8, :2], "w[0, 0]": memory[:4]}, paths["columns"][:2]),
            fill({"w[0, 0]": memory[:4, :1], "v[0]": memory[8, :5], "u[0]": memory[9]}, paths["columns"]),
            fill({"w[0, 1]": memory[4:8, :2]}, paths["columns"][:2])]
    return found, gaps


@rung({"boxes.py": ["fill"]}, hints="""
    The reader does not ask who wrote what. It goes through all boxes of all files, and takes from each what overlaps its own.
    Which of its own boxes may overlap a box in a file? And how can it know in the end that nothing is missing?

    A key is the name and where the box begins: key.split("[")[0] is the name, begin(key) the list. For each key of a file, only
    boxes of the same name matter, of which there may be several. `with safe_open(path, framework="pt") as file:` has
    file.keys(), and file.get_slice(key), which copy_overlap reads from. Saved weights are finite: so nan means that
    nothing came.

    for box in state.values(): box.fill_(math.nan). Then for path in paths: with safe_open(path, framework="pt") as file: for
    key in file.keys(): for mine, box in state.items(): if mine.split("[")[0] == key.split("[")[0]: copy_overlap(box,
    begin(mine), file.get_slice(key), begin(key)). Last, return next((key for key, box in state.items() if
    box.isnan().any()), None).""")
def test_from_whatever_files(pool, tmp_path):
    """Write `fill(state, paths)`, which fills the boxes of a rank from files. `state` is {key: box}, and so is a file. A key is the
    tensor's name and where the box begins in it, like "w[2, 0]"; `begin(key)` is the list, [2, 0]. The boxes are views of memory:
    fill them in place, and ignore what they contain. Files have boxes of other tensors, too. Return None, or the key of a box with
    a number that is in no file: start with nan everywhere."""
    found, gaps = pool.call(fill_job, STEP, folder=str(tmp_path))[0]
    whole = [[6 * i + j for j in range(6)] for i in range(4)]
    right = (None, whole, [line[2:5] for line in whole[1:3]], [[100 + a for a in line] for line in whole[2:]], [3, 4], 105, True)
    texts = ["fill returns", "w[0, 0], 4 x 6", "w[1, 2], 2 x 3", "w.exp_avg[2, 0], 2 x 6 (100 + w)", "v[3], of 0 1 2 3 4",
             "w.exp_avg[0, 5], 1 x 1", "memory outside these boxes stays as it is"]
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
        begin, left, sizes = [], start, [1]
        for size in reversed(shape):
            begin.insert(0, left % size)
            left //= size
        for i in reversed(range(len(shape))):                 # rows, if it begins with a whole one
            inside, below = sizes[0], begin[i + 1:]
            count = min((stop - start) // inside, shape[i] - begin[i]) if not any(below) else 0
            if count:
                best = (tuple(begin), (*[1] * i, count, *shape[i + 1:]))
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
    ZeRO cuts a tensor's numbers in memory order, anywhere: a slice may begin in the middle of a row. Write 3 x 4 numbers
    down and mark those from 2 to 9. What is the smallest number of rectangles, and which? What if they begin or end with a row,
    and what if they lie inside one?

    A row of a tensor is what one index of its first dimension selects: math.prod(shape[1:]) numbers. The whole rows of a run
    begin with row -(-start // row), which rounds up, and end before row stop // row. Together they are one box. Whatever is
    left before and after is a part of one row: the same task again, with shape[1:].

    if start >= stop: return []; row = prod(shape[1:]); first, last = -(-start // row), stop // row; if first > last the run is
    inside row last. A part of row i: [((i, *begin), (1, *size)) for begin, size in rectangles(shape[1:], start - i * row,
    stop - i * row)]. Else: that for row first - 1 up to its end, [((first, 0, ...), (last - first, *shape[1:]))] if first <
    last, and that for row last from its beginning.""")
def test_a_run_is_a_few_boxes(pool):
    """Write `rectangles(shape, start, stop)`. Count the numbers of a tensor in the order in which they lie in memory: which boxes
    make up those from `start` up to but not including `stop`? Return a list, in this order, of (where the box begins, its shape):
    tuples with a number for each dimension. Each box is a run of those numbers without gaps, and there are as few boxes as
    possible: first the rest of a row, then whole rows, then the beginning of a row. In more than two dimensions, a "row" has rows
    itself."""
    for (shape, start, stop), came in pool.call(rectangles_job, STEP)[0].items():
        expected = fewest(shape, start, stop)
        assert came == expected, f"numbers {start} to {stop} (without {stop}) of a tensor of {shape} are {expected}, not {came}"


def boxes_job():
    import torch
    from boxes import boxes
    from shards import Shard
    from placement import Placement
    found = []
    for name, shape, first, count, parts in CUT:
        param = torch.nn.Parameter(torch.zeros(shape))
        param.placement = Placement(1, True, [Shard(None, *part) for part in parts])
        param.untyped_storage().resize_(0)                # as ZeRO stage 3 does
        memory = torch.arange(100.0)
        run = memory[10:10 + count]
        run = run.view(shape) if count == param.numel() else run
        made = boxes(name, param, first, run)
        values = {key: box.tolist() for key, box in made.items()}
        for box in made.values():
            box += 1000
        found.append((values, (memory >= 1000).nonzero().flatten().tolist()))
    return found


# name, shape of this rank's part, where the run begins in it, how long it is, parts: (dimension, number of parts, which)
CUT = [("norm", (5,), 0, 5, []), ("norm", (5,), 2, 3, []), ("head", (2, 6), 0, 12, [(0, 2, 1)]),
       ("down", (3, 2), 0, 6, [(1, 3, 2)]), ("down", (3, 2), 3, 3, [(1, 3, 2)]), ("up", (4, 3), 1, 7, [(0, 2, 1)]),
       ("w1", (2, 3, 2), 1, 8, [(1, 2, 1), (0, 4, 2)])]
BOXES = [{"norm[0]": [10, 11, 12, 13, 14]}, {"norm[2]": [10, 11, 12]},
         {"head[2, 0]": [[10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21]]}, {"down[0, 4]": [[10, 11], [12, 13], [14, 15]]},
         {"down[1, 5]": [[10]], "down[2, 4]": [[11, 12]]},
         {"up[4, 1]": [[10, 11]], "up[5, 0]": [[12, 13, 14]], "up[6, 0]": [[15, 16]]},
         {"w1[4, 3, 1]": [[[10]]], "w1[4, 4, 0]": [[[11, 12], [13, 14]]], "w1[5, 3, 0]": [[[15, 16]]],
          "w1[5, 4, 0]": [[[17]]]}]


@rung({"boxes.py": ["boxes"]}, hints="""
    Combine three things. tp and ep have left this rank a part of a parameter; ZeRO has left it a run of this part's
    numbers; and a run is a few rectangles. Where does a rectangle begin in the whole parameter?

    `my_part(param)` is a tuple of slices, one for each dimension; slice(None), for a dimension that is not cut, has start None.
    `rectangles(param.shape, first, first + run.numel())` says where boxes begin in the part. `tensor.split(sizes)` gives views
    of as many numbers one after the other, and view(shape) gives each its shape.

    part = [index.start or 0 for index in my_part(param)]; found = rectangles(...); views =
    run.view(-1).split([math.prod(shape) for _, shape in found]); return {f"{name}{[a + b for a, b in zip(part, begin)]}":
    view.view(shape) for (begin, shape), view in zip(found, views)}.""")
def test_which_boxes_are_mine(pool):
    """Write `boxes(name, param, first, run)`, which says which boxes a run of numbers consists of. The parameter is this rank's
    part of the whole one (`my_part(param)` says which), and the run begins with its number `first`. Return {key: box}. A key is the
    name and where the box begins in the whole parameter, like "model.norm.weight[4]" or "lm_head.weight[2, 0]", and the box is a
    view of the run's memory, in its shape. You do not need the parameter's own numbers: ZeRO may have freed their memory."""
    for (name, shape, first, count, parts), right, (came, changed) in zip(CUT, BOXES, pool.call(boxes_job, STEP)[0]):
        cut = ", ".join(f"part {index} of {of} of dimension {dim}" for dim, of, index in parts) or "not cut"
        where = f"{name}, of {shape} ({cut}); {count} numbers from number {first} on are 10, 11, 12, ..."
        assert came == right, f"{where}: the boxes are {right}, not {came}"
        assert changed == list(range(10, 10 + count)), f"{where}: writing to the boxes must write to the run's own memory"


# for each rank, {key: (numbers, bytes of a number)}
HAVE = {"alone": [{"a[0]": (5, 4), "b[0]": (3, 4)}],
        "replicas": [{f"w{i}[0]": (10, 4) for i in range(7)} for _ in range(3)],
        "some": [{"a[0]": (100, 4), "b[0]": (10, 4), "c[0]": (10, 4)}, {"c[0]": (10, 4), "a[0]": (100, 4), "d[0]": (8, 4)},
                 {"e[0]": (12, 4), "d[0]": (8, 4), "b[0]": (10, 4), "f[4]": (1, 4), "f[0]": (4, 4)}],
        "bytes": [{"a[0]": (4, 8), "b[0]": (5, 4), "c[0]": (3, 4), "d[0]": (3, 4)} for _ in range(2)],
        "order": [{"b[0]": (6, 4), "a[0]": (10, 4), "c[0]": (5, 4)} for _ in range(2)]}


def share_out_job(have):
    import torch
    import torch.distributed as dist
    from boxes import assign_writers
    dist.init_process_group("gloo")
    dtypes = {4: torch.float32, 8: torch.float64}
    state = {key: torch.zeros(count, dtype=dtypes[size]) for key, (count, size) in have[dist.get_rank()].items()}
    return assign_writers(state)


def shared_out(have):
    writer, load = {}, [0] * len(have)
    for key, (count, size) in [item for state in have for item in state.items()]:
        if key not in writer:
            writer[key] = min((rank for rank, state in enumerate(have) if key in state), key=load.__getitem__)
            load[writer[key]] += count * size
    return [[key for key in state if writer[key] == rank] for rank, state in enumerate(have)]


@rung({"boxes.py": ["assign_writers"]}, hints="""
    Ranks of dp have the same weights, and it is enough if one of them writes a box. If that were always the first, the others would
    wait for it. How do ranks agree without a list that somebody sends around?

    All compute the same thing from the same list: `from_all_ranks(value)` returns on all ranks a list of every rank's value. Keys
    and sizes are enough, box.nbytes. Then go through the boxes and give each to a rank; keep track of how much each already has to
    write.

    every = from_all_ranks({key: box.nbytes for key, box in state.items()}); writer, load = {}, Counter(); for held in every: for
    key, size in held.items(): if key not in writer: the ranks that have it are those whose every[rank] has key; writer[key] =
    min(those, key=load.__getitem__); load[writer[key]] += size. Return [key for key in state if writer[key] ==
    dist.get_rank()].""")
def test_each_box_is_written_once(pool):
    """Write `share_out(state)`, which all ranks call, each with its own {key: box}. It returns the list of the keys that this rank
    is to write, in the order of its state. One of the ranks that have a box with the same key writes it. Assign the boxes one after
    another: those of rank 0 in the order of its state, then those that rank 1 has besides, and so on. Assign each to the rank that
    has had the fewest bytes so far, among those that have the box; if several have as few, to the first of them. All ranks must
    come to the same result."""
    for have in HAVE.values():
        came = pool.call(share_out_job, STEP, world=len(have), timeout=HANGS, have=have)
        shown = [{key: count * size for key, (count, size) in state.items()} for state in have]
        expected = shared_out(have)
        assert came == expected, f"ranks have boxes of these bytes: {shown}. They should write {expected}, but would write {came}"


# ------------------------------------------------------------------------------------------------ damaged, and in use
def exchange(a, b):
    a.rename(a.with_suffix(".a"))
    b.rename(a)
    a.with_suffix(".a").rename(b)


def damage_job(folder):
    import resume
    folder = Path(folder, "step_00000004")
    folder.mkdir()
    files = [folder / f"rank_{i:05d}.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(b"some\nweights" + bytes([i]) * 70_000)
    flushed, fsync = [], os.fsync
    with patch.object(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino) or fsync(number)):
        digests = {file.name: resume.digest(file) for file in files}
    flushed = flushed == [file.stat().st_ino for file in files]
    digests[files[0].name] = digests.pop(files[0].name)   # so that they are in no order
    index = dict(steps=4, digests=digests, run={}, log=[0, "", 0])
    (folder / "index.json").write_text(json.dumps(index))
    read, digest = [], resume.digest

    def noted(path):
        read.append(Path(path).name)
        return digest(path)

    def seen(index=index):
        found = []
        for rank, ranks in ((0, 1), (0, 2), (1, 2)):
            read.clear()
            with patch.object(resume, "digest", noted):
                share = [rank, ranks] if ranks > 1 else []            # by default one rank reads everything
                found.append((outcome(resume.find_corruption, folder, index, *share), sorted(read)))
        return found
    found = {"whole": seen(), "other": seen({**index, "digests": {**digests, files[1].name: "0"}}), "none": seen(None)}
    text = files[1].read_bytes()
    files[1].write_bytes(text[:-1] + b"x")
    found["changed"] = seen()
    found["alone"] = outcome(resume.find_corruption, folder, index)
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
    found["nearly"] = outcome(resume.find_corruption, folder, nearly)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "other.safetensors").write_bytes(text)
    found["one too many"] = seen()
    (folder / "index.json").unlink()
    found["no index"] = seen(None)
    return digests, [hashlib.sha256(b"some\nweights" + bytes([i]) * 70_000).hexdigest() for i in range(3)], flushed, found


@rung({"resume.py": ["digest", "find_corruption"]}, hints="""
    A digest of a file is a short number that changes if a single byte of the file does. It is taken when the file is
    written, and later compared with the digest of what the disk returns. Reading all files takes long: how do ranks share the
    work?

    `hashlib.file_digest(file, "sha256").hexdigest()` is the digest of an open file, and os.fsync(file.fileno()) waits until all of
    it is on the disk. a ^ b has the elements that are in only one of two sets. Rank r of n takes number r, r + n, r + 2 n, ... of
    the sorted names: a slice with a step.

    digest: with open(path, "rb") as file: os.fsync(file.fileno()); return hashlib.file_digest(file, "sha256").hexdigest().
    damage: if index is None or index != index_of(folder): return "..."; there = {path.name for path in
    folder.glob("*.safetensors") if path.is_file()}; for name in sorted(there ^ index["digests"].keys()): return f"{name} is
    missing, or too many"; for name in sorted(there)[rank::ranks]: if digest(folder / name) != index["digests"][name]: return
    f"{name} is not as it was written".""")
def test_as_it_was_written(pool, tmp_path):
    """Write `digest(path)`, which flushes a file to the disk (os.fsync) and returns its SHA-256, in hexadecimal. Write
    `damage(folder, index, rank=0, ranks=1)`, which says what is wrong with a checkpoint: None, or a text. index is what rank 0 has
    read from index.json, and index["digests"] is {file name: digest}. The checkpoint is damaged if index is None, or if this rank
    reads something else (`index_of(folder)`); if a file *.safetensors is missing, or is there but not in index["digests"]; or if a
    file's digest differs. In the last two cases the text contains the file's name. Every rank compares the names, but only one rank
    reads each file (digest): rank r of n reads the sorted names number r, r + n, r + 2 n and so on."""
    came, right, flushed, found = pool.call(damage_job, STEP, folder=str(tmp_path))[0]
    files = [f"rank_{i:05d}.safetensors" for i in range(3)]
    assert came == dict(zip(files, right)), f"the digests should be {right}, but are {came}"
    assert flushed, "digest should call os.fsync on the file, once"
    alone, nearly = found.pop("alone"), found.pop("nearly")
    assert isinstance(alone, str) and files[1] in alone, \
        f"without rank and ranks, damage reads all files, and {files[1]} has changed; it returned {alone!r}"
    assert isinstance(nearly, str) and files[1] in nearly, \
        f"compare whole digests: that of {files[1]} differs from the index in its last digit, but damage returned {nearly!r}"
    share = {(0, 1): files, (0, 2): files[::2], (1, 2): files[1:2]}
    named = {"changed": files[1], "missing": files[1], "a folder": files[1], "exchanged": "rank_0000", "renamed": ".safetensors",
             "one too many": "other.safetensors"}
    for state, answers in found.items():
        for (rank, ranks), (text, read) in zip(share, answers):
            where = f"with {files} in a checkpoint (case {state!r}), damage on rank {rank} of {ranks}"
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

    import torch.distributed as dist
    from resume import Checkpoints, lock
    dist.init_process_group("gloo")
    rank, found, printed = dist.get_rank(), {}, []

    def choose(where, wanted, restarts="0"):
        checkpoints = object.__new__(Checkpoints)
        checkpoints.args = SimpleNamespace(checkpoint=where, resume=wanted)
        with patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=restarts), patch("resume.say", printed.append):
            answer = outcome(checkpoints.choose)
        dist.barrier()
        again = None
        if rank == 0 and not refused(answer):             # the chosen directory stays locked as long as Checkpoints lives
            again = refused(outcome(lock, where))
        if isinstance(answer, tuple) and not refused(answer):
            answer = names([answer[0]]), answer[1] and answer[1]["steps"]
        file = getattr(checkpoints, "lock", None)
        file.close() if hasattr(file, "close") else None
        return answer, again
    full, empty = f"{folder}/run", f"{folder}/empty"
    other = lock(full) if rank == 0 else None
    found["in use"] = choose(full, "newest")[0], sorted(os.listdir(full))
    other and other.close()
    dist.barrier()
    for case, where in zip(CASES, (empty, empty, full, full, full, full, full, full, full, full, empty)):
        printed.clear()
        found[case] = *choose(where, *CASES[case]), "".join(printed)
        if case == "--resume":
            left = sorted(os.listdir(full))
    dist.barrier()
    if rank == 0:
        Path(empty, ".lock").write_text("my notes")
        first = lock(empty)
        found["second"] = outcome(lock, empty)
        first.close()
        third = outcome(lock, empty)
        found["third"] = refused(third)
        third.close() if hasattr(third, "close") else None
        printed.clear()
        with patch.object(fcntl, "flock", side_effect=OSError("no locks")), patch("resume.say", printed.append):
            found["no locks"] = hasattr(outcome(lock, empty), "close") and bool(printed)
        found["text"] = Path(empty, ".lock").read_text()
    return found, left


CASES = {"nothing there, no --resume": (None,), "nothing there, --resume": ("newest",), "--resume": ("newest",),
         "--resume step_00000004": ("step_00000004",), "no --resume": (None,), "--resume step_00000005": ("step_00000005",),
         "--resume notes": ("notes",), "--resume 00000004": ("00000004",),
         "a restart, --resume step_00000004": ("step_00000004", "3"),
         "a restart, no --resume": (None, "2"), "a restart, nothing there": ("step_00000004", "1")}


@rung({"resume.py": ["lock", "Checkpoints.choose"]}, hints="""
    Two runs in one directory would delete each other's checkpoints. A file that says "taken" is not enough: a run that is
    killed cannot remove it. But the system can hold a lock on an open file, and it releases the lock when the file is closed or its
    process ends, however it ends.

    `fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)` locks an open file, or raises BlockingIOError if somebody has it locked.
    Opening with "a" creates the file if it does not exist, and loses nothing in it. choose: which checkpoints exist, and what is
    wanted? A restart turns a name into "newest". Choose the newest of those with the wanted name, or of all.

    lock: file = open(Path(folder, ".lock"), "a"); try: flock; except BlockingIOError: refuse("..."); except OSError: say("...");
    return file. choose: if dist.get_rank() > 0: return None; self.lock = lock(self.args.checkpoint); for left in own(self.args,
    ".tmp"): shutil.rmtree(left, ignore_errors=True); there, wanted = own(self.args), self.args.resume; if there and not wanted:
    refuse("..."); if the restart count is not "0" and wanted: wanted = "newest"; found = [path for path in there if wanted in
    (path.name, "newest")]; if wanted not in (None, "newest") and not found: refuse("..."); return (found[-1],
    index_of(found[-1])) if found else None.""")
def test_where_to_go_on(pool, tmp_path):
    """Write `lock(folder)`. It locks the file .lock in the folder with fcntl.flock, without waiting, leaves its text as it is, and
    returns the open file. It calls refuse(message) if another run has the lock; if locks are not supported (any other OSError) it
    says so, with `say`, and returns the file all the same. Write `Checkpoints.choose()`. It returns None on all ranks but rank 0,
    which does this: keep the lock of the directory self.args.checkpoint in self.lock; delete what killed runs have left (own names
    that end in ".tmp"); and return (path, index_of(path)) of the checkpoint to go on from. That is the newest if self.args.resume
    is "newest", or else the one of this name; refuse a missing one. If there are no checkpoints, "newest" gives None and says so.
    A self.args.resume of None gives None, too, but refuse it if there are checkpoints, which a new run would mix with its own. If
    torchrun has restarted the run (TORCHELASTIC_RESTART_COUNT is in the environment and not "0"), take the newest, whichever name
    was given."""
    run, empty, steps = tmp_path / "run", tmp_path / "empty", (2, 4, 10)
    for name in [*(f"step_{step:08d}" for step in steps), "step_00000006.tmp", "step_00000012.tmp", "notes", "notes.tmp"]:
        (run / name).mkdir(parents=True)
        index = dict(steps=int(name[5:13]) if name.startswith("step") else 0, digests={}, run={}, log=[])
        (run / name / "index.json").write_text(json.dumps(index))
    empty.mkdir()
    (found, left), (other, _) = pool.call(choose_job, STEP, world=2, timeout=HANGS, folder=str(tmp_path))
    newest, older = (["step_00000010"], 10), (["step_00000004"], 4)
    right = dict(zip(CASES, (None, None, newest, older, "refuse", "refuse", "refuse", "refuse", newest, "refuse", None)))
    came, there = found.pop("in use")
    other.pop("in use")
    assert refused(came) and "step_00000006.tmp" in there, (
        f"while another run trains in the directory, choose should call refuse and delete nothing (names in .tmp may be the "
        f"other's); it returned {came}, and {there} were left")
    for case, expected in right.items():
        came, again, said = found[case]
        where = f"checkpoints after steps {steps}, rank 0 ({case}): choose"
        if expected == "refuse":
            assert refused(came), f"{where} should call refuse, but returned {came}"
            continue
        assert came == expected, f"{where} should return {expected} (path, steps of its index), but returned {came}"
        assert again, f"{where}: afterwards the directory should be locked, so that lock refuses another run"
        assert said or case != "nothing there, --resume", f"{where} should say that it starts at the beginning"
    for case, (came, *_) in other.items():
        assert came is None, f"{case}: on rank 1 choose must return None and do nothing, but it returned {came}"
    assert refused(found["second"]), f"a second lock in the same folder should call refuse, but returned {found['second']}"
    assert not found["third"], "once the first file is closed, or its process has ended, another run can lock the folder"
    assert found["no locks"], "if flock raises OSError, lock should say so, and return the file"
    assert found["text"] == "my notes", f".lock had the text 'my notes' and should keep it; it has {found['text']!r}"
    expected = ["notes", "notes.tmp", *(f"step_{step:08d}" for step in steps)]
    assert sorted({*left} - {".lock"}) == expected, \
        f"after choose has run once, {expected} should be there (and .lock), but {left} are"


# ------------------------------------------------------------------------------------------------ the moment to save
def save_if_due_job(heard_at, checkpoint):
    """Run eight steps, with a checkpoint after every third. Rank 1 gets a signal in step heard_at."""
    import signal

    import torch.distributed as dist
    from resume import Checkpoints
    dist.init_process_group("gloo")
    checkpoints, saved, ended = object.__new__(Checkpoints), [], None
    checkpoints.args = SimpleNamespace(checkpoint=checkpoint, save_every=3, steps=8, device="cpu")
    checkpoints.signals, checkpoints.save = [], saved.append

    def refused_call(*args, **kwargs):
        raise AssertionError("without --checkpoint, save_if_due must do nothing: ranks must not communicate")
    collectives = "all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "all_gather_into_tensor"
    watch = patch.multiple(dist, **dict.fromkeys(collectives, refused_call)) if not checkpoint else contextlib.nullcontext()
    for step in range(8):
        if step == heard_at and dist.get_rank() == 1:
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
            heard = resume.install_signal_handlers()
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None):
                found.append((number.name, None, None))
                continue
            for _ in range(1 if number == signal.SIGINT else 2):
                signal.raise_signal(number)
            found.append((number.name, [int(n) for n in heard], signal.getsignal(signal.SIGINT) == signal.SIG_DFL))
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        heard = resume.install_signal_handlers()
        kept = [signal.getsignal(number) == signal.SIG_IGN for number in numbers]
        if not kept[2]:
            signal.raise_signal(signal.SIGINT)
        return found, kept, [int(n) for n in heard]
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@rung({"resume.py": ["install_signal_handlers", "Checkpoints.save_if_due"]}, hints="""
    Some time before it ends a job, Slurm sends it a signal. A signal may come at any line of the program, and one rank may hear it
    a step before another. So at first the program only notes it. All ranks must save after the same step, since saving takes all of
    them: how do they agree?

    `signal.signal(number, f)` arranges that f(number, frame) is called when the signal comes; f appends the number to a list.
    Numbers are above 0, so that 0 can mean that nothing was heard: the maximum over all ranks says whether any rank has heard one.
    A second Ctrl-C should end the program at once: in f, `signal.signal(signal.SIGINT, signal.SIG_DFL)`.

    hear_signals: for number in (SIGTERM, SIGHUP, SIGINT): if number == signal.SIGINT or signal.getsignal(number) !=
    signal.SIG_IGN: signal.signal(number, hear); return the list. save_if_due: without self.args.checkpoint return False;
    stop_signal = torch.tensor(max(self.signals, default=0), device=self.args.device); dist.all_reduce(stop_signal,
    op=dist.ReduceOp.MAX); last = step + 1 == self.args.steps; if stop_signal or last or (step + 1) % self.args.save_every == 0:
    self.save(step + 1); return bool(stop_signal) and not last.""")
def test_when_to_save_and_when_to_end(pool):
    """Write `hear_signals()`. It returns an empty list, to which from now on the number of each SIGTERM, SIGHUP and SIGINT (Ctrl-C)
    is appended, and nothing else happens; but once one was heard, the next SIGINT ends the program (SIG_DFL). SIGTERM and SIGHUP
    that are ignored (SIG_IGN, as with nohup) stay ignored; SIGINT is heard anyway. Write `Checkpoints.save_if_due(step)`, which all
    ranks call after every step (the first is 0). Call self.save(number of steps done), once, if this number is a multiple of
    self.args.save_every, if it is self.args.steps, or if any rank has a number in self.signals. Return True, on all ranks, if the
    run has to end here because a rank has heard a signal, and otherwise False: after the last step, too. Without
    self.args.checkpoint, do nothing and return False."""
    found, kept, heard = pool.call(signals_job, STEP)[0]
    import signal
    for name, came, ends in found:
        times = 1 if name == "SIGINT" else 2
        expected = [int(getattr(signal, name))] * times
        assert came == expected, \
            f"when {name} came, {times} times, the list should be {expected}, but was {came} (None: nobody listens)"
        assert ends, f"after {name}, the handler of SIGINT should be SIG_DFL, so that Ctrl-C ends the program"
    assert kept[:2] == [True, True], "SIGTERM and SIGHUP were ignored (SIG_IGN) before hear_signals, and should stay so after it"
    assert heard == [int(signal.SIGINT)], f"SIGINT was ignored before hear_signals, but should be heard after it; heard: {heard}"
    for heard_at, checkpoint, saves, end in ((None, "folder", [3, 6, 8], None), (4, "folder", [3, 5], 4), (5, "folder", [3, 6], 5),
                                             (7, "folder", [3, 6, 8], None), (4, None, [], None)):
        for rank, (saved, ended) in enumerate(pool.call(save_if_due_job, STEP, world=2, timeout=HANGS, heard_at=heard_at,
                                                        checkpoint=checkpoint)):
            where = f"8 steps, save_every 3, --checkpoint {checkpoint}, on rank 1 a signal in step {heard_at}: rank {rank}"
            assert saved == saves, f"{where} should call save with {saves}, but called it with {saved}"
            assert ended == end, f"{where} should get True from save_if_due in step {end}, but got it in {ended} (None: never)"


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
            state, own = self.state(), []
            found["after"] = {key: box.clone() for key, box in state.items()}
            for box in state.values():
                box.fill_(step)
            for master in self.optimizer.masters:
                own += [master, *(self.optimizer.adamw.state[master][name] for name in ("exp_avg", "exp_avg_sq"))]
            found["views"] = all(bool((tensor == step).all()) for tensor in own) and bool((self.balance.bias == step).all())
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
        name, begin = key.split("[")[0], json.loads(key[key.index("["):])
        ends = [a + n for a, n in zip(begin, box.shape)]
        sizes[name] = [max(a, b) for a, b in zip(sizes.get(name, ends), ends)]
    tensors = {name: torch.full(size, torch.nan, dtype=torch.float64) for name, size in sizes.items()}
    for key, box in boxes.items():
        name, begin = key.split("[")[0], json.loads(key[key.index("["):])
        tensors[name][tuple(slice(a, a + n) for a, n in zip(begin, box.shape))] = box.double()
    return tensors


@rung({"resume.py": ["Checkpoints.state"]}, hints="""
    What exists now that cannot be computed again? The weights, in the precision in which they are updated; AdamW's
    averages; and the experts' biases. Not the gradients, and nothing random. Who has these, and what do they belong to?

    self.optimizer.params and self.optimizer.masters belong together, and self.optimizer.adamw.state[master] is a dictionary,
    which is empty before the first step: make its zeros then, so that they can be filled. With ZeRO a param is a piece of a
    parameter, and piece.part_of says (parameter, index where it begins there); without ZeRO it is the parameter itself, from
    number 0 on. Names are those of self.model.named_parameters().

    names, state = {param: name for name, param in self.model.named_parameters()}, {}; for piece, master in zip(params,
    masters): param, first = getattr(piece, "part_of", (piece, 0)); adam = adamw.state[master]; if not adam:
    adam.update(step=torch.zeros((), device=master.device), exp_avg=torch.zeros_like(master),
    exp_avg_sq=torch.zeros_like(master)); state |= boxes(names[param], param, first, master), and the same for both averages,
    with the name f"{names[param]}.{average}". Then for layer, bias in zip(self.model.model.layers, self.balance.bias):
    state[f"balance.bias[{layer}, 0]"] = bias.unsqueeze(0).""")
def test_what_must_not_be_lost(pool, tmp_path):
    """Write `Checkpoints.state()`. It returns {key: box} of everything that this rank has of the training state, as `boxes` gives
    them: for each of self.optimizer.params the master, under the parameter's name, and Adam's "exp_avg" and "exp_avg_sq", under the
    name + ".exp_avg" and ".exp_avg_sq". Boxes are views: writing to them writes to the optimizer. Before the first step, Adam has
    no averages; then make them, as zeros, and its count "step", a tensor of no dimension. In a model with experts, add
    `balance.bias[LAYER, 0]` for each layer of self.model.model.layers, whose keys are the layers' numbers: the layer's row of
    self.balance.bias, as a box of 1 x experts."""
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
        assert ends == {".exp_avg", ".exp_avg_sq"}, f"{shape}: averages' names should end in .exp_avg and .exp_avg_sq, not {ends}"
        for when in ("before", "after"):
            what = f"{shape}, {world} ranks with {more}, {when} the training: the boxes of all ranks together, and of one process"
            assert_same_tensors(whole(many, when), whole(one, when), 1e-9, what)
            for name, tensor in whole(many, when).items():
                zero = ".exp_avg" in name and when == "before"
                assert bool(tensor.abs().sum() == 0) == zero or name == "balance.bias", f"{name} {when} the training: {tensor}"
        for answer in (*one, *many):
            assert answer["adam"], (f"{shape}: before step 0, adamw.state[master] should get step, of no dimension, exp_avg "
                                    "and exp_avg_sq")
            assert answer["views"], f"{shape}: writing to the boxes should write to masters, averages and balance.bias"
    low = pool.call(state_job, STEP, argv=f"{made('dense-2', 'bfloat16')} --micro_batch_size 12".split())[0]
    dtypes = {str(box.dtype) for box in low["after"].values()}
    assert dtypes == low["masters"] == {"torch.float32"}, f"with --dtype bfloat16, boxes should be float32 masters, not {dtypes}"


# ------------------------------------------------------------------------------------------------ a run that goes on
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
            key = next(key for key in state if key not in self.mine)
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
    Whoever finds a folder step_00000200 takes it for whole. So it must get this name when every file is complete, at one
    moment. Until then it is step_00000200.tmp. `save`, which is there, has `write` done by all ranks, waits for all of them,
    and then has `finish` done. When older ones are deleted, a kill may come in the middle as well: what would be found?

    safetensors' `save_file({key: tensor on the CPU}, path)`; `digest(path)`. Path.rename(other) renames, path.with_suffix("")
    takes .tmp away. `own(self.args)[:-keep]` are those that are too many. `fill(self.state(), paths)` returns a key that is not
    filled, or None. Masters and averages are filled then; what Adam counts, and the weights that compute, are not.

    write: if not all(box.isfinite().all() for box in state.values()): refuse("...", 3); folder.mkdir(exist_ok=True);
    save_file({key: state[key].cpu() for key in self.mine}, file); return file.name, digest(file). finish: on rank 0
    (folder / "index.json").write_text(json.dumps(dict(steps=int(folder.stem[5:]), digests=digests, run=self.run)));
    folder.rename(folder.with_suffix("")); for old in own(self.args)[:-self.args.keep]:
    shutil.rmtree(old.rename(old.with_suffix(".tmp"))). restore: if fill(self.state(), [folder / name for name in
    index["digests"]]): refuse("..."); for param, master in zip(...): adamw.state[master]["step"].fill_(int(folder.name[5:]));
    param.data.copy_(master).""")
def test_goes_on_under_another_layout(pool, tmp_path):
    """Write `Checkpoints.write(folder, state)`, which all ranks call. folder, a Path, is step_00000200.tmp; whoever comes first
    creates it. If a number of the state is not finite, call refuse(message, 3). Write the boxes that are this rank's to write
    (self.mine, a list of keys) to the file rank_00003.safetensors (on rank 3) and return (file name, its digest). Write
    `Checkpoints.finish(folder, digests)`, which is called when all have written, with {file name: digest} of all ranks, and acts
    only on rank 0: it writes index.json, {"steps": 200, "digests": digests, "run": self.run}, renames the folder to step_00000200,
    and deletes all checkpoints but the newest self.args.keep; first rename each of these to its name + ".tmp", so that a
    half-deleted one never looks whole. (`with written(folder, self.args):` around all of that turns a full disk into a refusal.)
    Write `Checkpoints.restore(folder, index)`, which fills self.state() from the files of index["digests"], refuses if a box is not
    filled, sets Adam's "step" to the number of steps that are done, and copies the masters to the parameters. A run of two ranks
    with --ep 2 and ZeRO-2, resumed after two steps by two ranks with --tp 2, must have the losses, norms and weights of one
    process."""
    from safetensors.torch import load_file
    case, folder = cases.make(tmp_path / "case", **cases.shape("top2-2")) + " --dtype float64", tmp_path / "run"
    one = pool.train(STEP, f"{case} --micro_batch_size 12")
    base = f"{case} --micro_batch_size 6 --ep 2 --zero 2 --checkpoint {folder} --save_every 1 --keep 3"
    first = pool.train(STEP, base, world=2, timeout=HANGS, weights=False, job=train_job)
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
        assert len(keys) == len({*keys}), f"{name}: a rank must write self.mine, so no box is in both files: {sorted(keys)}"
        said = index["steps"], index["digests"]
        assert said == (int(name[5:]), digests), f"{name}: index.json should have {int(name[5:])} steps and {digests}, not {said}"
    pool.train(STEP, f"{base} --steps 5 --keep 1 --resume", world=2, timeout=HANGS, weights=False, job=train_job)
    left = sorted(os.listdir(folder))
    assert left == [".lock", "step_00000005"], f"with --keep 1 only the newest should be there, but {left} are"
    shutil.rmtree(folder)
    pool.train(STEP, base.replace("--save_every 1", "--save_every 2"), world=2, timeout=HANGS, weights=False, job=train_job)
    shutil.rmtree(folder / "step_00000004")
    second = pool.train(STEP, f"{case} --micro_batch_size 12 --tp 2 --checkpoint {folder} --resume", world=2, timeout=HANGS,
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
    broken = pool.call(train_job, STEP, world=2, timeout=HANGS, argv=argv, optimizer="adamw", breaks="box")
    assert broken == [3, 3], \
        f"if a number of the state is infinite, all ranks should end with status 3, by refuse; they ended with {broken}"
    there = [name for name in os.listdir(tmp_path / "broken") if name != ".lock" and not name.endswith(".tmp")]
    assert not there, f"if a number is infinite, nothing may look like a whole checkpoint; there is {there}"
    argv[-1] = str(tmp_path / "not a folder")
    broken = pool.call(train_job, STEP, world=2, timeout=HANGS, argv=argv, optimizer="adamw", breaks="folder")
    said = "".join(pool.last.printed.values())
    assert broken == [2, 2] and "cannot be fail_on_io_error" in said, \
        f"a failed write should end all ranks with status 2, by written(...); they ended with {broken}, and said: {said}"
    argv = f"{case} --micro_batch_size 12 --checkpoint {folder} --resume --steps 6".split()
    came = pool.call(incomplete_job, STEP, timeout=HANGS, argv=argv)[0]
    assert refused(came), f"if a box is in no file, the checkpoint should be refused, with refuse; the run gave {came}"


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
