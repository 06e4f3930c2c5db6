"""The capstone: write a trainer of your own, and earn a certificate for each layout under which it equals one process.

    python exercises/certify.py capstone           # copy exercises/capstone to exercise/capstone, where you write trainer.py
    python exercises/certify.py                    # let tools/prove judge the first certificate that is not signed
    python exercises/certify.py NAME=pp            # that of this name
    python exercises/certify.py ALL=1              # all of them, once more; a signature that is no longer earned is withdrawn

exercises/capstone/certificates.toml lists the certificates. Those you have are in exercise/capstone/certificates.json.
"""
import ast
import contextlib
import datetime
import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from refuse import refuse, run_and_exit
from steps import ROOT, full_name

SOURCE, FOLDER = ROOT / "exercises/capstone", ROOT / "exercise/capstone"
COPIED = ["model.py", "one_process.py", "trainer.py"]
CERTIFICATES = tomllib.loads((SOURCE / "certificates.toml").read_text())
NOT_EARNED = 3                                            # the exit status, which is not an error
NOTE = """# A note to coding assistants

This folder is an exercise. Whoever works here wants to learn parallel training by writing a trainer.
Explain ideas, ask what they expect to happen, and help to read what `make certify` says.
Do not write the bodies of the functions of trainer.py, and do not copy code of the repository's steps or tests into it.
"""
MAKEFILE = """# make certify, in this folder as at the top of the repository
certify:
\t@$(MAKE) --no-print-directory -C ../.. $@ NAME="$(NAME)" ALL="$(ALL)"

.PHONY: certify
"""
# parts of torch that parallelize: a certificate says which of them the trainer imports
TORCHS_OWN = ("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining",
              "torch.distributed.optim", "torch.distributed.checkpoint", "torch.distributed._composable")
HAVE = {"holds": "holds {} of the weights", "reads": "reads {} of the tokens", "length": "reads {} of a sequence",
        "at_once": "reads {} of the tokens at once", "keeps": "keeps {} numbers for each weight"}


def start():
    """Copy the folder for the reader, unless there is one."""
    shown = FOLDER.relative_to(ROOT)
    if FOLDER.exists():
        print(f"{shown} already exists, and was not changed")
    else:
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            new = Path(folder, "capstone")
            new.mkdir()
            for name in COPIED:
                shutil.copy(SOURCE / name, new)
            (new / "AGENTS.md").write_text(NOTE)
            (new / "Makefile").write_text(MAKEFILE)
            new.rename(FOLDER)
        print(f"{shown} has {', '.join(COPIED)}; write the functions of trainer.py")
    print(f"    make certify         judges the next of {len(CERTIFICATES)} certificates\n"
          "    exercises/capstone/README.md says what they are")


# ------------------------------------------------------------------------------------------------ signatures
def signed():
    """Return what certificates.json says: {name: what was certified}."""
    path = FOLDER / "certificates.json"
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
        if all(one["digest"] and one["date"] for one in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    refuse(f"{path.relative_to(ROOT)} is not what make certify wrote; delete it to earn the certificates again")


def write(certificates):
    new = FOLDER / "certificates.json.tmp"
    new.write_text(json.dumps({name: certificates[name] for name in CERTIFICATES if name in certificates}, indent=1) + "\n")
    new.replace(FOLDER / "certificates.json")


def digest(name):
    """Return the digest of a certificate's row and of all Python files in the reader's folder."""
    said = hashlib.sha256(json.dumps(CERTIFICATES[name], sort_keys=True).encode())
    for path in sorted(FOLDER.rglob("*.py")):
        said.update(f"\0{path.relative_to(FOLDER)}\0".encode() + path.read_bytes())
    return said.hexdigest()


def imported():
    """Return which parts of TORCHS_OWN the reader's files import."""
    names = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    return [part for part in TORCHS_OWN if any(f"{name}.".startswith(f"{part}.") for name in names)]


def table():
    """Yield a line for each certificate: what it is, and whether it is signed, stale or next."""
    have = signed()
    first = next((name for name in CERTIFICATES if name not in have), None)
    for number, (name, row) in enumerate(CERTIFICATES.items(), 1):
        state = "next" if name == first else ""
        if name in have:
            state = have[name]["date"] if have[name]["digest"] == digest(name) else "stale"
        yield f"{number:>3}  {name:<11}{state:<12}{row['asks']}"
    stale = sum(name in have and have[name]["digest"] != digest(name) for name in CERTIFICATES)
    yield (f"{len(have)} of {len(CERTIFICATES)} signed"
           + f", {stale} of them stale: trainer.py has changed since, and make certify ALL=1 judges it again" * (stale > 0))


# ------------------------------------------------------------------------------------------------ judging
def beyond(row, found):
    """Say what the busiest rank has that it should not, or return None. found: {what: a number for each rank}."""
    for what, right in [*row.get("exactly", {}).items(), *row.get("limits", {}).items()]:
        most = max(found[what])
        if what in ("reads", "length", "at_once") and not most:
            return ("no rank calls an embedding, a module that has a weight and is given the tokens, so nobody knows what it "
                    "reads; call it as a module, embed(tokens), and not F.embedding")
        exactly = what in row.get("exactly", {})
        if most > right + 1e-9 or exactly and most < right - 1e-9:
            said, wanted = (f"{number:.3g}" if what == "keeps" else f"{100 * number:.4g}%" for number in (most, right))
            return (f"a rank {HAVE[what].format(said)}, {'not' if exactly else 'more than'} {wanted}; "
                    f"is this {row['layout'].partition(' ')[2]}?")


def arguments(name):
    """Return what tools/prove is given for a certificate."""
    row = CERTIFICATES[name]
    world, _, flags = row["layout"].partition(" ")
    return [os.path.relpath(SOURCE / "judge.py"), "--world", world, "--flags", flags, "--both", row.get("both", ""),
            "--unforgiving", *shlex.split(row.get("options", ""))]


def judge(name):
    """Run tools/prove on the layout, which prints what it finds. Return (why it is refused, or None; what was certified)."""
    from prove import CannotRun
    from prove.__main__ import main as prove
    row, began = CERTIFICATES[name], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TRAINER=str(FOLDER), MEASURED=folder)
        try:
            status = prove([*arguments(name), "--self_test", "--json", f"{folder}/said"])
        except CannotRun as error:
            print(f"CANNOT RUN: {error}")
            return "it cannot run", None
        said = json.loads(Path(folder, "said").read_text())[-1]
        if status:
            return ("it cannot run" if status > 1 else "it differs from one process" if "cause" in said else
                    "a planted mistake is not seen"), None
        found = said["activity"] | measurements(folder)
    if why := beyond(row, found):
        return why, None
    return None, dict({key: row[key] for key in ("layout", "both", "options") if key in row},
                      exactly=row.get("exactly", {}), limits=row.get("limits", {}),
                      found={what: round(max(found[what]), 4) for what in [*row.get("exactly", {}), *row.get("limits", {})]},
                      largest_difference=said["largest"], parts_of_torch=imported(), digest=digest(name),
                      date=datetime.date.today().isoformat(), seconds=round(time.monotonic() - began, 1),
                      python=platform.python_version(), torch=version())


def measurements(folder):
    """Return what the ranks of judge.py have measured: {what: a number for each rank}."""
    ranks = [json.loads(path.read_text()) for path in Path(folder).iterdir() if path.name.isdecimal()]
    return {what: [rank[what] for rank in ranks] for what in ranks[0]}


def version():
    import torch
    return torch.__version__


def certify(name):
    """Judge one certificate, and sign it if it is earned. Return whether it is."""
    row = CERTIFICATES[name]
    print(f"{name}: {row['asks']} ({full_name(row['step'])} teaches it)", flush=True)
    why, found = judge(name)
    keep(name, found)
    print(f"REFUSED: {why}" if why else f"SIGNED: {name}, in {found['seconds']} s", flush=True)
    return not why


def keep(name, found):
    """Sign a certificate, or withdraw it if nothing was found."""
    certificates = {key: one for key, one in signed().items() if key != name}
    write(certificates | {name: found} if found else certificates)


def certify_all():
    """Judge all certificates, with one line for each. Return whether all are earned."""
    refused = 0
    for number, name in enumerate(CERTIFICATES, 1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            why, found = judge(name)
        keep(name, found)
        lines = printed.getvalue().splitlines()
        first = next((line for line in lines if line.startswith(("CANNOT RUN", "APART"))), "")
        print(f"{number:>3}  {name:<11}" + (f"refused: {first or why}" if why else f"signed, {found['seconds']} s"), flush=True)
        refused += bool(why)
    if refused:
        print("make certify NAME=pp shows the whole diagnosis of one")
    return not refused


def main(words):
    given = dict(word.partition("=")[::2] for word in words if "=" in word and not word.endswith("="))
    command = [word for word in words if "=" not in word]
    if unknown := [word for word in given if word not in ("NAME", "ALL")] + [word for word in command if word != "capstone"]:
        refuse(f"{unknown[0]}: not understood; write NAME=pp for one certificate, or ALL=1 for all")
    if command:
        return start()
    if not (FOLDER / "trainer.py").exists():
        refuse("exercise/capstone/trainer.py does not exist; run make capstone first")
    name = given.get("NAME")
    if name and name not in CERTIFICATES:
        refuse(f"NAME={name}: unknown certificate; choose from {', '.join(CERTIFICATES)}")
    if name and "ALL" in given:
        refuse("ALL=1: judges all certificates; leave out NAME or ALL")
    os.chdir(ROOT)
    have = signed()                                       # refuse a broken file before anything runs
    if "ALL" in given:
        earned = certify_all()
    else:
        name = name or next((name for name in CERTIFICATES if name not in have), None)
        earned = certify(name) if name else True
    print("\n".join(["", *table()]))
    return 0 if earned else NOT_EARNED


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
