"""Plant each mistake of capstone/mistakes.toml in a solution of the capstone, and print what the certificates say, as JSON.

    python tests/support/capstone_mistakes.py dp/same_rows tp/copy_without_sum      # these; without arguments, all
    python tests/support/capstone_mistakes.py dp/                                   # the solution as it is
"""
import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("exercises", "tools")]
from certify import CERTIFICATES, COPIED, SOURCE, arguments, beyond, measurements

SOLUTIONS = Path(__file__).with_name("capstone")
MISTAKES = tomllib.loads((SOLUTIONS / "mistakes.toml").read_text())
PAIRS = [f"{certificate}/{name}" for certificate in CERTIFICATES for name, one in MISTAKES.items()
         if certificate in one["refused"].split()]


def planted(name):
    """Return the solution with a mistake; without a name, as it is."""
    source = (SOLUTIONS / "collectives.py").read_text()
    if not name:
        return source
    one = MISTAKES[name]
    assert source.count(one["old"]) == 1, f"{name}: occurs {source.count(one['old'])} times: {one['old']}"
    return source.replace(one["old"], one["new"])


def verdict(certificate, source, baselines):
    """Return why a certificate is refused to a trainer, or None. Unlike make certify, leave out diagnoses and self-tests."""
    from prove import CannotRun
    from prove.__main__ import STEPS, load_adapter, parse_args
    from prove.compare import activity
    from prove.ranks import How
    from prove.trial import Baseline, Trial
    row, args = CERTIFICATES[certificate], parse_args(arguments(certificate))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        for name in COPIED:
            shutil.copy(SOURCE / name, folder)
        Path(folder, "trainer.py").write_text(source)
        os.environ.update(TRAINER=folder, MEASURED=folder)
        adapter, key = load_adapter(args.adapter, args.resume), (str(args.both), args.mask)
        if key not in baselines:
            baselines[key] = Baseline(adapter, args)
        baselines[key].adapter, half = adapter, STEPS // 2
        try:
            if args.resume:
                Trial(baselines[key], *args.resume, range(half), How(save=saved)).compare()
                trial = Trial(baselines[key], args.world, args.flags, range(half, STEPS), How(load=saved))
            else:
                trial = Trial(baselines[key], args.world, args.flags)
            apart = trial.compare()
        except CannotRun as error:
            return f"cannot run: {str(error).splitlines()[0]}"
        if any(map(any, apart)):
            step = next(k for k, row in enumerate(apart) if any(row))
            return f"apart in step {step + 1}: {', '.join(what for what, far in apart[step]._asdict().items() if far)}"
        return beyond(row, activity(trial.run, trial.one, trial.inputs[0].numel()) | measurements(folder))


def main(pairs):
    import torch
    torch.set_num_threads(1)
    baselines, said = {}, {}
    for pair in pairs or PAIRS:
        certificate, name = pair.split("/")
        said[pair] = verdict(certificate, planted(name), baselines)
        print(f"{pair}: {said[pair]}", file=sys.stderr, flush=True)
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
