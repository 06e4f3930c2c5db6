"""Hunt for a mistake that is planted in a hidden copy of a step. Find its file and line by asking for numbers.

    make hunt SEED=today                                  # start a hunt: shows the losses without and with the mistake
    make probe OF=grad_norm RANK=1 AT=3                   # one number of one rank in one training step, for both runs
    make probe OF=gradient RANK=0 NAME=model.norm.weight  # AT is 1 if you leave it out; without NAME, over all that the rank has
    make hunt ANSWER="zero.py:120"                        # a line of our code; after LEVEL=any: ANSWER="step03_zero/zero.py:120"

The mistake may be in any of steps 1 to 7; with LEVEL=any beside SEED, you are not told in which. OF= is loss, grad_norm, gradient
(the norm of this rank's gradients, before clipping), weight (norm and digest of what the rank keeps, after the update), bytes (the
payload that the rank sends) or operations (the first collective that differs). An answer may be up to three lines away from a
line that the mistake changes. The fewest probes win.
"""
import datetime
import difflib
import json
import random
import re
import shutil
import sys
import zlib
from pathlib import Path
from unittest.mock import patch as replaced

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from patched import edits, not_in, planted_copy, planted_mistakes
from refuse import refuse, run_and_exit
from steps import PYTHONPATH, ROOT, full_name

HUNT = ROOT / "exercise/hunt"
HIDDEN = HUNT / ".planted"                                # the copy with the planted mistake, and the numbers of both runs
NUMBERS = ("loss", "grad_norm", "gradient", "weight", "bytes", "operations")
NEAR, WRONG = 3, 3                                        # lines; the exit status of a wrong answer, which is not an error
RUN = "--seq_len 16 --global_batch_size 8 --micro_batch_size 1 --steps 6 --lr 1e-2 --warmup 2"
# ranks and flags: the first layout where a planted mistake changes a number is used
LAYOUTS = {1: ["1", "1 --dtype bfloat16"],
           2: ["2 --dp_mode bucket", "2 --dp_mode overlap", "2 --dp_mode naive"],
           3: ["2 --zero 1", "2 --zero 3", "4 --zero 2 --zero_shard 2"],
           4: ["2 --tp 2", "2 --tp 2 --sp off"],
           5: ["2 --cp 2", "2 --cp 2 --cp_mode ring", "4 --cp 2 --dp 2"],
           6: ["2 --pp 2", "2 --pp 2 --schedule zerobubble", "2 --pp 2 --schedule interleaved", "4 --pp 2 --schedule zerobubble",
               "4 --pp 2 --zero 3"],
           7: ["2 --ep 2", "4 --ep 2 --tp 2", "4 --ep 2 --cp 2 --balance aux", "4 --ep 2 --pp 2 --schedule zerobubble"],
           8: []}                                         # its planted mistakes show only when runs are saved, killed or resumed


def probed_job(argv):
    """Train. Return for each training step everything that can be asked for."""
    import torch
    import torch.distributed as dist
    import train
    from prove.unforgiving import unforgiving
    from watch import Watch, collective_of
    steps, models = [], []

    def sent(op, args, kwargs):
        if found := collective_of(op, args):
            among = ", ".join(map(str, dist.get_process_group_ranks(found.group)))
            steps[-1]["operations"].append(f"{found.what} of {found.bytes:,} bytes among ranks {among}")
            steps[-1]["bytes"] += found.bytes * (found.what != "receive")

    def kept(*args):
        models[:] = [build_model(*args)]
        return models[0]

    def watched(*args):
        for step, micro_batches in batches(*args):
            steps.append(dict(bytes=0, operations=[]))
            with Watch(sent):
                yield step, micro_batches

    def named(tensors):
        """Name each parameter of the optimizer after the model's parameter whose memory it lies in."""
        where = [(param.data_ptr(), param.data_ptr() + param.nbytes, name) for name, param in models[0].named_parameters()]
        return {next((name for begin, end, name in where if begin <= param.data_ptr() < end), f"part{i}"): tensor
                for i, (param, tensor) in enumerate(tensors)}

    class Probed(train.Optimizer):
        def clip_grad_norm(self):
            grads = named(zip(self.params, self.grads))
            steps[-1]["gradient"] = {name: float(grad.norm()) for name, grad in grads.items()}
            steps[-1]["gradient"]["all"] = float(torch.stack([grad.norm() for grad in self.grads]).norm())
            return super().clip_grad_norm()

        def step(self, lr):
            super().step(lr)
            steps[-1]["weight"] = {name: described([master]) for name, master in named(zip(self.params, self.masters)).items()}
            steps[-1]["weight"]["all"] = described(self.masters)

    def log(self, step, loss, grad_norm, lr, **more):
        steps[-1].update(loss=float(loss), grad_norm=float(grad_norm))

    build_model, batches = train.build_model, train.batches
    with replaced.multiple(train, build_model=kept, batches=watched, Optimizer=Probed), replaced.object(train.Metrics, "log", log):
        with unforgiving():                               # otherwise chance decides whether a message without a wait arrives
            train.main(argv)
    return steps


def described(tensors):
    """Return the norm, and a digest of every bit."""
    digest = zlib.crc32(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors))
    return f"{sum(float(tensor.norm()) ** 2 for tensor in tensors) ** 0.5:.6g}, digest {digest:08x}"


def drawn(seed):
    """Return all planted mistakes that can be drawn, in the order of this seed; the first that shows is used."""
    names = sorted(name for name in planted_mistakes().keys() - not_in("hunt").keys() if LAYOUTS[int(name[4:6])])
    return random.Random(seed).sample(names, len(names))


def run(pool, step, layout):
    """Return what every rank has noted, or None if the run fails."""
    import cases
    from harness import JobFailed
    world, *flags = layout.split()
    shape = cases.shape("top2-4" if "--ep" in flags else "dense-4-kv1") | dict(vocab_size=256)
    (pool.folder() / "config.json").write_text(json.dumps(shape))
    try:
        return pool.call(probed_job, step, int(world), timeout=200, argv=["--model", str(pool.folder()), *RUN.split(), *flags])
    except JobFailed:
        return None


def plant(pool, name, folder):
    """Return the copy with this planted mistake, a layout where it shows, and both runs; or None if it never shows."""
    step = full_name(name[:6])
    copy = planted_copy(name, folder)
    for layout in LAYOUTS[int(name[4:6])]:
        right = pool.once((step, layout), lambda: run(pool, step, layout))
        planted = run(pool, copy, layout)
        if planted and right != planted and not re.search("NaN|Infinity", json.dumps(planted)):
            return dict(name=name, step=step, layout=layout, right=right, planted=planted, probes=0)
    shutil.rmtree(copy)


def begin(pool, seed, level):
    shutil.rmtree(HIDDEN, ignore_errors=True)
    hunt = next(filter(None, (plant(pool, name, HIDDEN) for name in drawn(seed))))
    remember(hunt | dict(level=level))
    where = f"{hunt['step']}, --nproc_per_node {hunt['layout']}" if level == "one" else f"a step, {len(hunt['planted'])} ranks"
    print(f"A mistake is planted in a copy of {where}. The losses without and with it:")
    for t, (right, planted) in enumerate(zip(hunt["right"][0], hunt["planted"][0]), 1):
        print(f"    training step {t}   {right['loss']:.4f}   {planted['loss']:.4f}")
    print("Ask for numbers until you know the file and the line:\n    make probe OF=grad_norm RANK=0 AT=1\n"
          f"    OF is {', '.join(NUMBERS)}; with gradient or weight, NAME=model.norm.weight asks for one parameter\n"
          "Answer:\n    make hunt ANSWER=\"FILE.py:LINE\"")


def remember(hunt):
    (HIDDEN / "hunt.json").write_text(json.dumps(hunt))


def present():
    try:
        return json.loads((HIDDEN / "hunt.json").read_text())
    except (FileNotFoundError, ValueError):
        refuse("no hunt has started; run make hunt SEED=today first")


def probe(of, rank="0", at="1", name=""):
    hunt = present()
    if of not in NUMBERS:
        refuse(f"OF={of}: must be one of {', '.join(NUMBERS)}")
    for key, text, first, last in (("RANK", rank, 0, len(hunt["planted"]) - 1), ("AT", at, 1, len(hunt["planted"][0]))):
        if not re.fullmatch("[0-9]{1,6}", text) or not first <= int(text) <= last:
            refuse(f"{key}={text}: must be from {first} to {last}")
    right, planted = (hunt[which][int(rank)][int(at) - 1][of] for which in ("right", "planted"))
    names = right if of in ("gradient", "weight") else {}
    if name and name not in names:
        refuse(f"NAME={name}: " + (f"rank {rank} has no such {of}; choose from {', '.join(names)}" if names else
                                    f"{of} has no names; leave out NAME"))
    if names:
        right, planted = right[name or "all"], planted.get(name or "all")
    if of == "operations":
        both = [*zip([*right, "no more"], [*planted, "no more"])]
        i = next((i for i, (a, b) in enumerate(both) if a != b), len(both) - 1)    # the first that differs
        right, planted = (f"{len(all)} operations; no. {i + 1}: {one}" for all, one in zip((right, planted), both[i]))
    remember(hunt | dict(probes=hunt["probes"] + 1))
    print(f"{of} {name}".strip() + f" of rank {rank} in training step {at} (probe {hunt['probes'] + 1})\n"
          f"    right          {right}\n    with mistake   {planted}" + "\n    no difference" * (right == planted))


def changed_lines(step, copy):
    """Return {file: the lines of our code that the planted mistake changes}."""
    changed = {}
    for path in sorted((ROOT / step).glob("*.py")):
        ours, theirs = path.read_text().splitlines(), (copy / path.name).read_text().splitlines()
        for kind, first, last, *_ in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if kind != "equal":
                changed.setdefault(path.name, set()).update(range(first + 1, max(last, first + 1) + 1))
    return changed


def judge(hunt, answer, copy):
    """Return whether the answer is right."""
    found = re.fullmatch(r"(?:(step0[1-8]\w*)/)?(\w+\.py):([0-9]{1,6})", answer.strip())
    if not found or hunt["level"] == "any" and not found[1]:
        refuse(f'ANSWER="{answer}": must be like "zero.py:120", or with LEVEL=any like "step03_zero/zero.py:120"')
    step, file, line = found[1] or hunt["step"], found[2], int(found[3])
    changed = changed_lines(hunt["step"], copy).get(file, ())
    return hunt["step"].startswith(step) and any(abs(line - one) <= NEAR for one in changed)


def answered(answer):
    hunt, best_of = present(), HUNT / "best.json"
    if not judge(hunt, answer, HIDDEN / hunt["step"]):
        print(f"no: the mistake is somewhere else ({hunt['probes']} probes so far)")
        return WRONG
    best = json.loads(best_of.read_text()) if best_of.exists() else {}
    best[hunt["name"]] = min(hunt["probes"], best.get(hunt["name"], hunt["probes"]))
    best_of.write_text(json.dumps(best))
    print(f"yes, with {hunt['probes']} probes; the fewest that anybody needed here: {best[hunt['name']]}\n\n"
          + solved(hunt["name"]) + looks_like(hunt["name"]))


def solved(name):
    """Return what a mistake does, what the loss shows, the test that sees it, and what it changes."""
    mistake, lines = planted_mistakes()[name], []
    for edit in edits(mistake):
        pieces = edit["old"].splitlines(), edit["new"].splitlines()
        lines += [f"{full_name(name[:6])}/{edit['file']}:", *(line for line in difflib.ndiff(*pieces) if line[0] != "?")]
    return "\n".join([f"{name}: {mistake['what']}", f"loss: {mistake['loss']}", f"test: {mistake['test']}", "", *lines]) + "\n"


def looks_like(name):
    """Return the rows of tools/prove's table of causes that tell of this mistake."""
    from plants import STEPS
    from prove.causes import CAUSES
    causes = [CAUSES[cause] for cause in sorted(STEPS[name].causes) if cause in CAUSES] if name in STEPS else []
    return "".join(f"\nHow it looks from outside: {cause.looks}.\nThe usual cause: {cause.means}.\n" for cause in causes)


def main():
    sys.path += [path for path in PYTHONPATH if path not in sys.path]
    what, *words = sys.argv[1:] or ["hunt"]
    if unknown := [word for word in words if "=" not in word]:
        refuse(f"{unknown[0]}: not understood; write NAME=VALUE, such as SEED=today")
    given = dict(word.split("=", 1) for word in words if not word.endswith("="))   # make passes FLAG= where nothing is set
    if what == "probe":
        return probe(given.get("OF", ""), given.get("RANK", "0"), given.get("AT", "1"), given.get("NAME", ""))
    if "ANSWER" in given:
        return answered(given["ANSWER"])
    seed, level = given.get("SEED", ""), given.get("LEVEL", "one")
    if not re.fullmatch(r"[\w.-]{1,40}", seed):
        refuse(f'SEED={seed}: must be today or another word; ANSWER="FILE:LINE" answers the current hunt')
    if level not in ("one", "any"):
        refuse(f"LEVEL={level}: must be one or any")
    from harness import shared_pool
    begin(shared_pool(), datetime.date.today().isoformat() if seed == "today" else seed, level)


if __name__ == "__main__":
    import hunt                                           # workers find their functions under this name
    run_and_exit(hunt.main)
