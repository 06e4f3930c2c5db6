"""The ladder of step 8: a run that is stopped, or killed, goes on, also in another layout. Each test is a rung; exercise.py says
how they are used."""
import itertools
import os
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import cases
from exercise import rung
from harness import assert_same_tensors, relative

STEP = "step08_5d"
HANGS = 20                                                # seconds: ranks that wait for each other are ended


def outcome(function, *arguments):
    """What a function returns, or what it refuses: ("refused", exit status, message)."""
    try:
        return function(*arguments)
    except SystemExit as end:
        return "refused", end.code, getattr(end, "message", "")


def refused(what):
    return isinstance(what, tuple) and what[:2] == ("refused", 2)


def base(paths):
    """Names in place of paths, to be compared and to be shown."""
    return [os.path.basename(path) for path in paths] if isinstance(paths, list) else paths


# ------------------------------------------------------------------------------------------------ folders
def own_job(folder, blocked):
    import folders
    return (base(outcome(folders.own, folder)), base(outcome(folders.own, folder, "[.]tmp")),
            outcome(folders.own, f"{folder}/nowhere"), outcome(folders.own, blocked))


@rung({"folders.py": ["own"]}, hints="""
    People keep other things in a checkpoint directory: notes, a log, a copy of a checkpoint. The trainer deletes old
    checkpoints, so it must be sure which names are its own. What does a name look like that the trainer has given?

    `re.fullmatch("step_[0-9]{8}" + ending, name)` is true for own names only. With eight digits the order of the alphabet is
    the order of the steps. `os.path.isdir(folder)` is false if the directory does not exist.

    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []; keep those that match, as os.path.join(folder, name);
    for each of these, if os.path.islink(path) or not os.path.isdir(path): refuse("...") with a message that has the name.
    Return the paths.""")
def test_own_names_only(pool, tmp_path):
    """`own(folder, ending="")` lists the paths of the checkpoints in a directory, oldest first: `step_` and exactly eight
    digits, and then the ending, which is a regular expression. All other names are somebody else's, and are left out. If the
    directory does not exist the list is empty. If something has an own name and is not a folder, or is a link, call
    `refuse(message)`."""
    folder, blocked = tmp_path / "run", tmp_path / "blocked"
    right = ["step_00000002", "step_00000010"], ["step_00000004.tmp", "step_00000012.tmp"]
    others = ["step_3", "step_000000020", "step_00000005.aside", "my_step_00000001", "step_0000000a", "step_00000002tmp"]
    for name in (*right[0], *right[1], *others):
        (folder / name).mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    blocked.mkdir()
    (blocked / "step_00000007").write_text("a file")
    whole, torn, nowhere, in_blocked = pool.call(own_job, STEP, folder=str(folder), blocked=str(blocked))[0]
    there = f"a directory has {sorted(os.listdir(folder))}"
    assert whole == right[0], f"{there}. own(folder) should list {right[0]}, and lists {whole}"
    assert torn == right[1], f"{there}. own(folder, '[.]tmp') should list {right[1]}, and lists {torn}"
    assert nowhere == [], f"of a directory that does not exist own returns an empty list, not {nowhere}"
    assert refused(in_blocked), f"a file has the name step_00000007: own should call refuse, and returned {in_blocked}"
    assert "step_00000007" in in_blocked[2], f"the message should have the name step_00000007; it is: {in_blocked[2]}"


def choose_job(folder, empty, keep):
    from resume import Checkpoints
    checkpoints, removed, remove = object.__new__(Checkpoints), [], shutil.rmtree

    def choose(where, wanted):
        checkpoints.args = SimpleNamespace(checkpoint=where, resume=wanted, keep=keep)
        answer = outcome(checkpoints.choose)
        return answer if refused(answer) else (answer[0] and os.path.basename(answer[0]), base(answer[1]))

    def watched(path, *args, **kwargs):
        removed.append(os.path.basename(path))
        remove(path, *args, **kwargs)
    wanted = [(empty, None), (empty, "newest"), (folder, "newest"), (folder, "step_00000004"), (folder, None),
              (folder, "step_00000005"), (folder, "notes")]
    chosen = [choose(*what) for what in wanted]
    checkpoints.args = SimpleNamespace(checkpoint=folder, resume="newest", keep=keep)
    with patch.object(shutil, "rmtree", watched):
        checkpoints.forget_old_ones()
    return chosen, removed, sorted(os.listdir(folder))


@rung({"resume.py": ["Checkpoints.choose", "Checkpoints.forget_old_ones"]}, hints="""
    `own(self.args.checkpoint)` lists what is there, oldest first. Which of the list is the newest, and which are too many? A
    run may be killed at any moment, also while it deletes: what would the next run find then?

    forget_old_ones: a slice of the list is all but the last `keep`. Rename each to its name + ".tmp" first: from then on nobody
    takes it for a whole checkpoint. choose: four cases. Nothing said and something there: refuse. Nothing said, or "newest":
    the last of the list, if there is one. A name that is not there: refuse. A name that is there: it, and the rest of the list.

    forget_old_ones: for folder in own(...)[:-self.args.keep]: os.rename(folder, folder + ".tmp"); shutil.rmtree(folder +
    ".tmp"). choose: there, wanted = own(...), self.args.resume; if there and not wanted: refuse("..."); if wanted in (None,
    "newest"): return (there[-1] if there else None), []; path = os.path.join(self.args.checkpoint, wanted); if path not in
    there: refuse("..."); return path, there[there.index(path) + 1:].""")
def test_the_newest_ones(pool, tmp_path):
    """`Checkpoints.choose()` returns (the path of the checkpoint to go on from, or None; a list of the paths of newer ones).
    self.args.checkpoint is the directory. self.args.resume is "newest" (then nothing is newer), or the name of a checkpoint, or
    None. It calls refuse if such a name is not there, and if resume is None but the directory has checkpoints: a new run would
    mix its own with them. `Checkpoints.forget_old_ones()` deletes all but the newest self.args.keep. Before a folder is deleted
    it is renamed to its name + ".tmp", so that a half deleted one never looks whole."""
    folder, empty, names = tmp_path / "run", tmp_path / "empty", [f"step_{steps:08d}" for steps in (2, 4, 6, 10)]
    empty.mkdir()
    for name in (*names, "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    chosen, removed, left = pool.call(choose_job, STEP, folder=str(folder), empty=str(empty), keep=3)[0]
    right = [(None, []), (None, []), (names[3], []), (names[1], names[2:])]
    texts = ["an empty directory and resume None", "an empty directory and resume 'newest'",
             f"{names} and resume 'newest'", f"{names} and resume 'step_00000004'"]
    for text, came, expected in zip(texts, chosen, right):
        assert came == expected, f"with {text} choose should return {expected}, and returned {came}"
    for text, came in zip(("resume None", "resume 'step_00000005'", "resume 'notes', a folder of somebody else"), chosen[4:]):
        assert refused(came), f"with {names} and {text} choose should call refuse, and returned {came}"
    assert left == ["notes", *names[1:]], f"of {names} and notes, --keep 3 should leave {['notes', *names[1:]]}, and left {left}"
    expected = [names[0] + ".tmp"]
    assert removed == expected, f"deleted were {removed}, and should be {expected}: renamed first"


def digest_job(folder):
    import folders
    index, digests = {"digests": {}}, []
    for i in range(3):
        with folders.create(folder, folders.file_of(i)) as out:
            for part in (b"some ", b"weights", bytes([i])):
                out.write(part)
        index["digests"][folders.file_of(i)] = out.digest.hexdigest()
        with open(os.path.join(folder, folders.file_of(i)), "rb") as file:
            digests.append((file.read(), out.digest.hexdigest()))

    def seen():
        return [folders.damage(folder, index)] + [folders.damage(folder, index, rank, 2) for rank in range(2)]
    found = {"whole": seen()}
    path = os.path.join(folder, folders.file_of(1))
    with open(path, "wb") as file:
        file.write(b"some wEights\1")
    found["changed"] = seen()
    os.remove(path)
    found["missing"] = seen()
    return digests, found


@rung({"folders.py": ["Output.write", "damage"]}, hints="""
    A digest of a file is a short number that is another one if a single byte of the file is. It is taken of what the trainer
    meant to write, and later compared with that of what the disk gives back. To check all files takes long: how do ranks share
    the work?

    A sha256 object takes bytes piece by piece: `self.digest.update(data)`. `hashlib.file_digest(file, "sha256").hexdigest()` is
    the digest of an open file. Rank r of n takes the files number r, r + n, r + 2 n, ... of the sorted names. A file that
    cannot be opened raises OSError.

    write: self.digest.update(data); self.file.write(data). damage: for name in sorted(index["digests"])[rank::ranks]: try: with
    open(os.path.join(folder, name), "rb") as file: if hashlib.file_digest(file, "sha256").hexdigest() !=
    index["digests"][name]: return f"{name} is not as it was written"; except OSError as error: return f"{name}:
    {error.strerror}".""")
def test_as_it_was_written(pool, tmp_path):
    """`Output.write(data)` writes the bytes to self.file, and lets self.digest, a sha256, know them. `damage(folder, index,
    rank, ranks)` reads files of a checkpoint again: index["digests"] is {file name: digest in hexadecimal}. It returns None if
    all is well, or else a text that has the name of a file that is missing or has another digest. The ranks share the work: of
    the sorted names, rank r of n reads the names number r, r + n, r + 2 n and so on, and no others."""
    import hashlib
    digests, found = pool.call(digest_job, STEP, folder=str(tmp_path))[0]
    for i, (written, digest) in enumerate(digests):
        expected = b"some weights" + bytes([i])
        assert written == expected, f"of three pieces that were written, the file should have {expected}, and has {written}"
        assert digest == hashlib.sha256(expected).hexdigest(), "out.digest is not the sha256 of all that was written"
    for state, (alone, first, second) in found.items():
        where = f"of rank_00000, rank_00001 and rank_00002.safetensors, rank_00001 is {state}"
        if state == "whole":
            assert (alone, first, second) == (None, None, None), f"all files are whole, but damage says {alone}, {first}, {second}"
            continue
        for what, text in (("with one rank", alone), ("with two ranks, rank 1", second)):
            named = isinstance(text, str) and "rank_00001" in text
            assert named, f"{where}: damage {what} should return a text with this name, and returned {text!r}"
        assert first is None, f"{where}: rank 0 of two reads the other two, and should return None, not {first!r}"


def lock_job(folder, foreign, left):
    import fcntl
    import gc

    import folders

    class Owner:
        pass

    def read(where):
        path = os.path.join(where, "lock.tmp")
        if os.path.exists(path):
            with open(path) as file:
                return file.read()
    found, owner, taken_over = {"pid": os.getpid()}, Owner(), Owner()
    held = outcome(folders.lock, folder, owner)
    found["first"] = read(folder)
    found["second"] = outcome(folders.lock, folder, Owner())
    gc.collect()
    found["after the second"] = read(folder)
    found["foreign"] = outcome(folders.lock, foreign, Owner()), read(foreign)
    file = outcome(folders.lock, left, taken_over)
    found["left"] = read(left) if not refused(file) else "(lock has refused)"
    if not refused(held):
        held.close()
    del owner
    gc.collect()
    found["ended"] = read(folder)
    flock = fcntl.flock

    def too_late(*args):
        os.remove(os.path.join(folder, "lock.tmp"))       # the run before ends, between open and flock
        return flock(*args)
    third = Owner()
    with patch.object(fcntl, "flock", too_late):
        found["too late"] = refused(outcome(folders.lock, folder, third))
    return found


@rung({"folders.py": ["lock"]}, hints="""
    Two runs in one directory would delete each other's checkpoints. A file that says "taken" is not enough: a run that is
    killed cannot remove it. But the system can hold a lock on an open file, and lets go of it when the process ends, however it
    ends.

    `fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)` locks an open file, or raises BlockingIOError if somebody has it locked.
    Open with "a+": it is made if it is not there, and nothing in it is lost. The run before may have removed the file between
    our open and our lock: then `os.stat(path)` fails (FileNotFoundError) or is of another file than `os.fstat(file.fileno())`
    (os.path.samestat). `weakref.finalize(owner, f)` calls f when owner is no more.

    file = open(path, "a+"); try: flock; taken = not os.path.samestat(os.fstat(file.fileno()), os.stat(path)); except
    (BlockingIOError, FileNotFoundError): taken = True. file.seek(0); whose = file.read(). If taken, or if whose is neither
    empty nor begins with "process ": refuse("... {whose}"). Then file.truncate(0); file.write(f"process {os.getpid()} on
    {socket.gethostname()}"); file.flush(); weakref.finalize(owner, Path(path).unlink, missing_ok=True); return file.""")
def test_only_one_run_in_a_directory(pool, tmp_path):
    """`lock(folder, owner)` locks the file lock.tmp in the folder with fcntl.flock, without waiting, writes "process NUMBER on
    HOST" into it and returns the open file. It calls refuse, and leaves the file as it is, if another run has the lock (with a
    message that has what the file says), and if the file has other text in it: then it is not ours. A file that a killed run
    has left behind is not locked, and is used again. When `owner` is no more the file is removed (weakref.finalize). So it may
    happen that the file is removed after we have opened it: to lock it then is worth nothing, and also refused."""
    folder, foreign, left = tmp_path / "run", tmp_path / "foreign", tmp_path / "left"
    for path, text in ((folder, None), (foreign, "my notes"), (left, "process 1 on another_host_with_a_long_name")):
        path.mkdir()
        if text:
            (path / "lock.tmp").write_text(text)
    found = pool.call(lock_job, STEP, folder=str(folder), foreign=str(foreign), left=str(left))[0]
    mine = f"process {found['pid']} on "
    assert (found["first"] or "").startswith(mine), f"lock.tmp should begin with {mine!r}, and has {found['first']!r}"
    assert refused(found["second"]), f"a second lock in the same folder should call refuse, and returned {found['second']}"
    assert mine in found["second"][2], f"the message should say who has the lock, {mine!r}; it is: {found['second'][2]}"
    assert found["after the second"] == found["first"], \
        f"after the second was refused lock.tmp should still have {found['first']!r}, and has {found['after the second']!r}"
    answer, text = found["foreign"]
    assert refused(answer) and text == "my notes", \
        f"where lock.tmp has the text 'my notes', lock should refuse and leave it; it gave {answer}, and the text is {text!r}"
    last = found["left"] or ""
    assert last.startswith(mine) and "another" not in last, \
        f"a lock.tmp that a killed run left is used again: it should begin with {mine!r} and have nothing else, and has {last!r}"
    assert found["ended"] is None, f"when the owner is no more, lock.tmp is removed; it is there and has {found['ended']!r}"
    assert found["too late"], "lock.tmp was removed between open and flock: lock should refuse, since the next run makes a new file"


# ------------------------------------------------------------------------------------------------ boxes
def boxes_job():
    import resume
    import torch
    from parts import Part
    from placement import Placement

    def boxes(name, shape, *parts):
        param = torch.nn.Parameter(torch.zeros(shape))
        param.untyped_storage().resize_(0)                # as ZeRO stage 3 does
        param.placement = Placement(None, 1, True, [Part(None, *part) for part in parts])
        return [(name, tuple(begin), list(shape), list(whole)) for name, begin, shape, whole in resume.boxes(name, param)]
    return [boxes("model.norm.weight", (5,)), boxes("lm_head.weight", (2, 6), (0, 2, 1)),
            boxes("model.layers.0.mlp.down_proj.weight", (6, 2), (1, 3, 2)),
            boxes("model.layers.1.mlp.experts.w1.weight", (2, 3, 5), (1, 2, 1), (0, 2, 1))]


@rung({"resume.py": ["boxes"]}, hints="""
    A box is a part of a tensor: where it begins in the whole tensor, and its shape. A parameter knows how it is cut:
    param.placement.parts. Two functions of parts.py say what is wanted here. Of experts several are in one parameter, but a
    checkpoint has a tensor for each.

    `my_part(param)` is a tuple of slices; slice(None), for a dimension that is not cut, has start None. `whole_shape(param)` is
    the shape of the whole. `on_disk(name, param)` gives (name, tensor) for each tensor that a parameter is in a checkpoint;
    each has a placement of its own, and they are views of param. No numbers are needed: the meta device has none.

    meta = torch.empty_like(param, device="meta"); meta.placement = param.placement; return [(name, tuple(part.start or 0 for
    part in my_part(one)), one.shape, tuple(whole_shape(one))) for name, one in on_disk(name, meta)].""")
def test_which_box_is_mine(pool):
    """`boxes(name, param)` lists what a rank has of a parameter, with the names of the checkpoint: (name, where the rank's part
    begins in the whole tensor, as a tuple, the part's shape, the whole tensor's shape as a tuple). An ordinary parameter is one
    box. One with several experts is a box for each, as `on_disk` says. Do not touch the parameter's numbers: ZeRO may have
    taken its memory away."""
    experts = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    right = [[("model.norm.weight", (0,), [5], [5])],
             [("lm_head.weight", (2, 0), [2, 6], [4, 6])],
             [("model.layers.0.mlp.down_proj.weight", (0, 4), [6, 2], [6, 6])],
             [(experts.format(e), (3, 0), [3, 5], [6, 5]) for e in (2, 3)]]
    texts = ["5 numbers, not cut", "2 x 6, part 1 of 2 along dimension 0", "6 x 2, part 2 of 3 along dimension 1",
             "2 experts of 3 x 5, part 1 of 2 of each expert's rows, and part 1 of 2 of the experts"]
    for text, expected, came in zip(texts, right, pool.call(boxes_job, STEP)[0]):
        assert came == expected, f"a parameter of {text}: the boxes (name, begin, shape, whole) are {expected}, not {came}"


WHOLE_NAME = "model.layers.0.self_attn.q_proj.weight"
STORED = {"rows": [(0, 0, 2, 6), (2, 0, 2, 6)], "columns": [(0, 0, 4, 1), (0, 1, 4, 3), (0, 4, 4, 2)],
          "quarters": [(0, 0, 2, 3), (0, 3, 2, 3), (2, 0, 2, 3), (2, 3, 2, 3)]}      # begin and shape, of a tensor of 4 x 6
WANTED = [(0, 0, 4, 6), (0, 3, 4, 3), (1, 0, 2, 6), (1, 2, 2, 3), (3, 5, 1, 1)]


def read_job(folder):
    import torch
    from resume import Checkpoints
    from safetensors.torch import save_file
    whole, found = torch.arange(24.0).view(4, 6), {}
    for how, stored in STORED.items():
        os.mkdir(f"{folder}/{how}")
        index = {"boxes": {WHOLE_NAME: [], "model.experts.0.w": [["rank_00000.safetensors", [0]]],
                           "model.experts.1.w": [["rank_00001.safetensors", [0]]]}}
        for rank, (row, column, rows, columns) in enumerate(stored):
            file, part = f"rank_{rank:05d}.safetensors", whole[row:row + rows, column:column + columns].contiguous()
            one = {f"model.experts.{rank}.w": torch.full((2,), 7.0 + rank)}
            save_file({WHOLE_NAME: part, WHOLE_NAME + ".exp_avg": 100 + part} | one, f"{folder}/{how}/{file}")
            index["boxes"][WHOLE_NAME].append([file, [row, column]])
        checkpoints, files = object.__new__(Checkpoints), {}
        checkpoints.optimizer = SimpleNamespace(masters=[torch.zeros(1)])
        for row, column, rows, columns in WANTED:
            param = torch.nn.Parameter(torch.zeros(rows, columns))
            checkpoints.boxes = {param: [(WHOLE_NAME, (row, column), param.shape, (4, 6))]}
            for end in ("", ".exp_avg"):
                mine = checkpoints.read(param, end, index, f"{folder}/{how}", files)
                found[how, (row, column, rows, columns), end] = mine.tolist()
        param = torch.nn.Parameter(torch.zeros(2, 2))
        checkpoints.boxes = {param: [(f"model.experts.{e}.w", (0,), param.shape[1:], (2,)) for e in range(2)]}
        found[how, "experts", ""] = checkpoints.read(param, "", index, f"{folder}/{how}", files).tolist()
        index["boxes"][WHOLE_NAME].pop()
        param = torch.nn.Parameter(torch.zeros(4, 6))
        checkpoints.boxes = {param: [(WHOLE_NAME, (0, 0), param.shape, (4, 6))]}
        try:
            found[how, "gap", ""] = checkpoints.read(param, "", index, f"{folder}/{how}", files).tolist()
        except ValueError as error:
            found[how, "gap", ""] = "ValueError", str(error)
    return found


@rung({"resume.py": ["Checkpoints.read"]}, hints="""
    Draw the whole tensor, one box of a file, and the box that this rank wants. What both have is a rectangle again. Where does
    it begin, and where does it end? Then write down where this rectangle lies in the file's box, and where in the wanted one.

    In each dimension the common rectangle goes from the larger of the two begins to the smaller of the two ends. If in some
    dimension low >= high they have nothing in common. To get places inside of a box, take its begin away. `stored =
    safe_open(path, framework="pt").get_slice(name)` reads nothing yet, stored.get_shape() is the box's shape, and
    stored[slices] reads just these numbers. Keep open files in the dictionary `files`.

    part = torch.full(param.shape, math.nan, dtype=self.optimizer.masters[0].dtype); for (name, begin, shape, _), into in
    zip(self.boxes[param], in_files(self.boxes[param], part)): for file, box in index["boxes"][name]: get stored of name + end;
    low = [max(a, b) for a, b in zip(begin, box)]; high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, box,
    stored.get_shape())]; if all(l < h for l, h in zip(low, high)): to, of = (tuple(slice(l - o, h - o) for l, h, o in zip(low,
    high, origin)) for origin in (begin, box)); into[to] = stored[of]. If into has a nan then, raise ValueError. Return part.""")
def test_what_overlaps_with_mine(pool, tmp_path):
    """`Checkpoints.read(param, end, index, folder, files)` returns this rank's part of a tensor, made of the boxes in a
    checkpoint's files, however these were cut. self.boxes[param] is what rung 5 lists: the boxes that this rank wants;
    `in_files(boxes, part)` are the tensors for them, which are views of a tensor like param. index["boxes"][name] lists [file,
    where its box begins], and the file has the box under the name `name + end`. Read only what is wanted (get_slice), and open
    each file once: `files` is {file: what safe_open has returned}. The dtype is that of self.optimizer.masters[0]. Raise
    ValueError if boxes leave a gap: begin with nan everywhere, and see whether one is left."""
    found, = pool.call(read_job, STEP, folder=str(tmp_path))
    whole = [[6 * i + j for j in range(6)] for i in range(4)]
    for (how, wanted, end), came in found.items():
        where = f"a tensor of 4 x 6 with the numbers 0 to 23 lies in files as {how} (row, column, rows, columns: {STORED[how]})"
        if wanted == "gap":
            assert came[0] == "ValueError", f"{where}; without the last of these read should raise ValueError, not return {came}"
        elif wanted == "experts":
            assert came == [[7, 7], [8, 8]], f"two experts, 7 7 and 8 8, lie in two files; read should return both, not {came}"
        else:
            row, column, rows, columns = wanted
            expected = [[(100 if end else 0) + a for a in line[column:column + columns]] for line in whole[row:row + rows]]
            plus = " (.exp_avg: plus 100)" if end else ""
            assert came == expected, \
                f"{where}{plus}. Wanted are {rows} x {columns} from row {row}, column {column}: {expected}, not {came}"


# ------------------------------------------------------------------------------------------------ slices, and the moment to save
def slices_job():
    """Three ranks, a unit of 3 + 1 numbers: slices of 2, the last is padding only. And a parameter without ZeRO."""
    import torch
    import torch.distributed as dist
    from placement import Placement
    from resume import Checkpoints
    from zero import Unit
    dist.init_process_group("gloo")
    params = [torch.nn.Parameter(torch.tensor(numbers)) for numbers in ([[1.0], [2.0], [3.0]], [4.0])]
    alone = torch.nn.Parameter(torch.zeros(1, 2))
    for param in params:
        param.placement = Placement(dist.group.WORLD, 3, True)
    unit = Unit([], params, dist.group.WORLD, None, SimpleNamespace(global_batch_size=3, micro_batch_size=1, dp=3, pp=1))
    for param in params:
        unit.add(param)
    pieces = unit.pieces()
    checkpoints = object.__new__(Checkpoints)
    masters = [10 * piece.detach() for piece in pieces] + [torch.tensor([[5.0, 6.0]])]
    states = {master: dict(step=torch.zeros(()), exp_avg=10 * master, exp_avg_sq=100 * master) for master in masters}
    checkpoints.optimizer = SimpleNamespace(params=[*pieces, alone], masters=masters, adamw=SimpleNamespace(state=states))
    checkpoints.blocks = {unit: list(range(len(pieces))), alone: [len(pieces)]}
    gathered = {}
    for kind in ("weight", "exp_avg"):
        whole = checkpoints.gather(unit, kind)
        gathered[kind] = [whole[param].tolist() for param in params], checkpoints.gather(alone, kind)[alone].tolist()
    checkpoints.scatter(unit, "exp_avg", {params[0]: torch.tensor([[7.0], [8.0], [9.0]]), params[1]: torch.tensor([-1.0])})
    checkpoints.scatter(alone, "weight", {alone: torch.tensor([[-5.0, -6.0]])})
    after = [states[master]["exp_avg"].flatten().tolist() for master in masters[:-1]], masters[-1].tolist()
    return gathered, after, [master.flatten().tolist() for master in masters[:-1]]


@rung({"resume.py": ["Checkpoints.gather", "Checkpoints.scatter"]}, hints="""
    With ZeRO a rank's optimizer has only pieces: what of its slice of the flat unit belongs to one parameter. To have whole
    parameters put the pieces in a row, which is the slice, and gather all slices. Is the row always as long as a slice?

    The last ranks' slices end with padding, and the pieces do not have it; a rank may have no piece at all. A slice is
    len(unit.grad_slice) long: F.pad makes the row so long. `dist.all_gather_into_tensor(flat, row, group=unit.shard)`, and
    `unit.views(flat)` is {parameter: its part}. Back: every rank has read all its parameters, so it only takes `unit.mine`, a
    slice of the flat numbers, and cuts it into its pieces.

    gather: pieces = [self.state(i)[kind].flatten() for i in self.blocks[unit]]; if not isinstance(unit, Unit): return {unit:
    pieces[0].view(unit.shape)}; piece = torch.cat([*pieces, unit.grad_slice.new_zeros(0)]); pad; flat =
    piece.new_empty(unit.shard.size() * len(piece)); gather; return unit.views(flat). scatter: without a Unit
    self.state(self.blocks[unit][0])[kind].copy_(parts[unit]); else flat = torch.cat([part.flatten() for part in
    parts.values()])[unit.mine]; for each i: piece.copy_(flat[:piece.numel()].view(piece.shape)); flat = flat[piece.numel():].""")
def test_out_of_slices_and_back(pool):
    """`self.state(i)[kind]` is a tensor of the i-th piece that this rank optimizes: of kind "weight" in full precision, or of
    Adam's averages. self.blocks[unit] lists the numbers of a unit's pieces, in their order in the slice. `gather(unit, kind)`
    returns {parameter: its whole tensor of this kind}, of all parameters of the unit. `scatter(unit, kind, parts)` is the
    opposite: parts is such a dictionary, in the order of unit.params, and what of it is this rank's goes into the tensors of
    its pieces (copy_). Without ZeRO a "unit" is a parameter, which has one piece, all of it."""
    for rank, (gathered, (averages, alone), masters) in enumerate(pool.call(slices_job, STEP, world=3, timeout=HANGS)):
        where = f"Parameters of 3 and 1 numbers in slices of 2, on rank {rank} of 3"
        for kind, factor in (("weight", 10), ("exp_avg", 100)):
            expected = [[[factor * a] for a in (1, 2, 3)], [4 * factor]], [[5 * factor / 10, 6 * factor / 10]]
            assert gathered[kind] == expected, \
                f"{where}: of the unit, and of a parameter without ZeRO, gather of {kind} is {expected}, not {gathered[kind]}"
        expected = [[[7, 8]], [[9], [-1]], []][rank]
        assert averages == expected, f"{where}: after scatter of 7 8 9 and -1 as exp_avg the pieces are {expected}, not {averages}"
        assert alone == [[-5, -6]], f"{where}: after scatter of -5 -6 the parameter without ZeRO has {alone}"
        expected = [[[10, 20]], [[30], [40]], []][rank]
        assert masters == expected, f"{where}: scatter of exp_avg must leave the weights at {expected}; they are {masters}"


def after_job(heard_at, checkpoint):
    """Eight steps, a checkpoint after each third. On rank 1 a signal comes in step heard_at."""
    import signal

    import torch.distributed as dist
    from resume import Checkpoints
    dist.init_process_group("gloo")
    checkpoints, saved, ended = object.__new__(Checkpoints), [], None
    checkpoints.args = SimpleNamespace(checkpoint=checkpoint, save_every=3, steps=8, device="cpu")
    checkpoints.signals, checkpoints.save = [], saved.append
    for step in range(8):
        if step == heard_at and dist.get_rank() == 1:
            checkpoints.signals.append(signal.SIGTERM)
        if checkpoints.after(step):
            ended = step
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
            heard = resume.hear_signals()
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None):
                found.append((number.name, None, None))
                continue
            signal.raise_signal(number)
            found.append((number.name, [int(n) for n in heard], signal.getsignal(signal.SIGINT) == signal.SIG_DFL))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        resume.hear_signals()
        return found, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@rung({"resume.py": ["hear_signals", "Checkpoints.after"]}, hints="""
    Slurm tells a job some time before its end, with a signal, that it is about to be ended. A signal may come at any line of
    the program, and one rank may hear it a step before another. So it is only noted at first. All ranks must save after the
    same step, since saving takes all of them: how do they agree?

    `signal.signal(number, f)` has f(number, frame) called when the signal comes; f appends the number to a list. Numbers are
    above 0, so that 0 can mean that nothing was heard: the maximum over all ranks says whether somebody has heard one. A second
    Ctrl-C should end the program at once: in f, `signal.signal(signal.SIGINT, signal.SIG_DFL)`.

    hear_signals: for number in (SIGTERM, SIGHUP, SIGINT): if number == signal.SIGINT or signal.getsignal(number) !=
    signal.SIG_IGN: signal.signal(number, hear); return the list. after: without self.args.checkpoint return False; told =
    torch.tensor(float(max(self.signals, default=0)), device=self.args.device); dist.all_reduce(told, op=dist.ReduceOp.MAX); if
    told or (step + 1) % self.args.save_every == 0 or step + 1 == self.args.steps: self.save(step + 1); return bool(told).""")
def test_when_to_save_and_when_to_end(pool):
    """`hear_signals()` returns an empty list, to which from now on the number of each SIGTERM, SIGHUP and SIGINT (Ctrl-C) is
    appended, and nothing else happens; but once one was heard, the next SIGINT ends the program (SIG_DFL). SIGTERM and SIGHUP
    that are ignored (SIG_IGN, as nohup does) stay ignored. `Checkpoints.after(step)` comes after every step (the first is 0).
    It calls self.save(number of steps done) if this number is a multiple of self.args.save_every, if it is self.args.steps, or
    if a rank has something in its self.signals. It returns True, on all ranks, if one has, and else False. Without
    self.args.checkpoint it does nothing and returns False."""
    found, ignored = pool.call(signals_job, STEP)[0]
    import signal
    for name, heard, ends in found:
        expected = [int(getattr(signal, name))]
        assert heard == expected, f"when {name} came, the list should be {expected}, and was {heard} (None: nobody listens)"
        assert ends, f"after {name} was heard the handler of SIGINT should be SIG_DFL, so that Ctrl-C ends the program"
    assert ignored, "SIGHUP was ignored (SIG_IGN) before hear_signals, and should be ignored after it"
    for heard_at, checkpoint, saves, end in ((None, "folder", [3, 6, 8], None), (4, "folder", [3, 5], 4), (4, None, [], None)):
        for rank, (saved, ended) in enumerate(pool.call(after_job, STEP, world=2, timeout=HANGS, heard_at=heard_at,
                                                        checkpoint=checkpoint)):
            where = f"8 steps, save_every 3, --checkpoint {checkpoint}, on rank 1 a signal in step {heard_at}: rank {rank}"
            assert saved == saves, f"{where} should call save with {saves}, and called it with {saved}"
            assert ended == end, f"{where} should get True from after in step {end}, and got it in step {ended} (None: never)"


# ------------------------------------------------------------------------------------------------ a run that goes on
def train_job(argv, optimizer, nan=False):
    """Trains. Of each rename: the old and the new name, and what is in the folder then. nan: the first step breaks the
    weights."""
    import train
    renamed, rename, step = [], os.rename, train.Optimizer.step

    def watched(old, new):
        files = sorted(os.listdir(old)) if os.path.isdir(old) else []
        renamed.append((os.path.basename(old), os.path.basename(new), files))
        rename(old, new)

    def broken(self, lr):
        step(self, lr)
        self.masters[-1].view(-1)[0] = float("nan")
    with patch.object(os, "rename", watched), patch.object(train.Optimizer, "step", broken if nan else step):
        try:
            train.main(argv)
        except SystemExit as end:
            if not nan:
                raise
            return end.code
    return renamed


@rung({"resume.py": ["Checkpoints.save", "Checkpoints.write"]}, hints="""
    Whoever finds a folder step_00000200 takes it for whole. So it must get this name when every file is complete, at one
    moment. Until then it is step_00000200.tmp. Who makes the folder, who has to wait for that, and how does rank 0 know that
    all have written? Only few numbers may be whole at a time: a block is gathered, written and forgotten before the next.

    Rank 0 deletes what own(self.args.checkpoint, "[.]tmp") lists and makes the folder; dist.barrier(). self.writer =
    self.writer or self.share_out() says who writes which box; self.mine(unit) lists (param, number of its box, name, shape) of
    what this rank writes. A file begins with `header({name + end: shape for all that it has}, dtype)`, in the order in which
    the numbers follow: for unit in self.blocks, for end in KINDS.values(), for each box of mine. dist.all_gather_object of
    (digest, finite) tells rank 0 that all are done.

    write: whole = self.gather(unit, kind); for param, expert, *_ in self.mine(unit): value = in_files(self.boxes[param],
    whole[param])[expert]; out.finite = out.finite and bool(value.isfinite().all());
    out.write(value.cpu().contiguous().view(torch.uint8).numpy().data). save: with create(folder + ".tmp", file_of(rank)) as
    out: header, then write of each unit and kind. After the exchange refuse("...", status=3) if something is not finite. Rank
    0: index = dict(steps=steps, biases=self.all_biases() (a collective, on all ranks), shapes=self.shapes, boxes={name: [(file,
    begin) ...]}, digests={file: digest}, facts=self.facts), written with create as json, `.encode()`; os.rename;
    self.forget_old_ones().""")
def test_goes_on_under_another_layout(pool, tmp_path):
    """`Checkpoints.save(steps)` writes self.args.checkpoint/step_00000200 (steps with eight digits), for now as
    step_00000200.tmp. Rank 0 removes what a killed run has left (own names with .tmp), and makes the folder. Every rank writes
    one file, `file_of(rank)`, through `create`: a `header`, then for each unit and kind what `write(unit, kind, out)` writes:
    of the gathered unit those boxes that are this rank's (`self.mine`), as bytes; if a number is not finite, it sets out.finite
    to False. If that happened on any rank, all call refuse with status 3. Else rank 0 writes index.json (steps, biases, shapes,
    boxes, digests and facts; read_index and read say what is in them), renames the folder and forgets old ones. A run of two
    ranks with --ep 2 and ZeRO-2, resumed after two steps by two ranks with --tp 2, has the losses, norms and weights of one
    process."""
    case, folder = cases.make(tmp_path / "case", **cases.shape("top2-2")) + " --dtype float64", tmp_path / "run"
    (folder / "step_00000001.tmp").mkdir(parents=True)
    (folder / "notes.tmp").mkdir()
    one = pool.train(STEP, f"{case} --micro_batch_size 12")
    first = pool.train(STEP, f"{case} --micro_batch_size 6 --ep 2 --zero 2 --checkpoint {folder} --save_every 2", world=2,
                       timeout=HANGS, weights=False, job=train_job)
    files = ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"]
    right = [(f"step_{steps:08d}.tmp", f"step_{steps:08d}", files) for steps in (2, 4)]
    assert [what for what in first.answers[0] if what[1].startswith("step_")] == right, \
        f"rank 0 should rename (from, to, files in it) {right}, and renamed {first.answers[0]}"
    expected = ["notes.tmp", "step_00000002", "step_00000004"]
    left = sorted(set(os.listdir(folder)) - {"lock.tmp"})
    assert left == expected, f"step_00000001.tmp and notes.tmp were there: after the run {expected} should be, and {left} are"
    shutil.rmtree(folder / "step_00000004")
    second = pool.train(STEP, f"{case} --micro_batch_size 12 --tp 2 --checkpoint {folder} --resume", world=2, timeout=HANGS,
                        job=train_job)
    assert [line["step"] for line in second.lines] == [2, 3], f"the resumed run should do steps 2 and 3: {second.output}"
    for name in ("losses", "grad_norms"):
        for step, ours, theirs in zip(itertools.count(2), getattr(second, name), getattr(one, name)[2:]):
            assert relative(ours, theirs) < 1e-9, f"{name} of step {step}, resumed: expected is {theirs}, came {ours}"
    assert_same_tensors(second.weights, one.weights, 1e-9, "the weights at the end of the resumed run")
    argv = f"{case} --micro_batch_size 12 --ep 2 --save_every 1 --checkpoint {tmp_path / 'broken'}".split()
    broken = pool.call(train_job, STEP, world=2, timeout=HANGS, argv=argv, optimizer="adamw", nan=True)
    assert broken == [3, 3], f"where a weight is nan all ranks should end with status 3, by refuse; they ended with {broken}"
    names = [name for name in os.listdir(tmp_path / "broken") if not name.endswith(".tmp")]
    assert not names, f"where a weight is nan nothing may look like a whole checkpoint; there is {names}"


# ------------------------------------------------------------------------------------------------ no rung: puzzle08.py
def test_the_puzzle():
    """Its table has the least that any layout of the planner sends; and it counts the bytes of all ranks."""
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
    assert puzzle08.on_the_wire(two) == {"pp": 2 * 15 * 64 * 8192 * 4096 * 2}      # each border, there and back
