"""Check the READMEs and docs/: code blocks, hunks of diffs, links, tables, reading times.

    python dev/readme.py                             # writes the tables that come from data, and reading times
    python dev/readme.py --run step02_dp/README.md   # runs one README's blocks, in order, in the current folder

A fenced block's language decides what happens to it: bash runs; python runs, in one process per README; diff must occur in
the diff from the previous step; text, or no language, is only for reading. A comment line right before a block changes that:

    <!-- run: no, needs a GPU -->        (or: needs a hub, a cluster; installs torch; is the test suite itself)
    <!-- run: add --steps 3 -->          adds these flags to every command that runs a train.py, and to make run
"""
import re
import subprocess
import sys
import tomllib
from collections import namedtuple
from itertools import chain
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tools", "exercises")]
from patched import planted_mistakes
from prove import causes
from simulate.gpus import GPUS
from steps import BORDER, LESSON, NOT_IN_DIFF, ROOT, STEPS, SUPPORT, full_name, pages_of, pairs

PLANNER, PROVE = "tools/plan/README.md", ["tools/prove/README.md", "tools/prove/DIAGNOSES.md"]
READMES = ["README.md", *chain(*map(pages_of, STEPS)), PLANNER, *PROVE]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = [*READMES, *DOCS, "exercises/hangs/README.md", "exercises/capstone/README.md"]
NOT_RUN = {"no, needs a hub", "no, needs a GPU", "no, needs a cluster", "no, installs torch", "no, is the test suite itself"}

Block = namedtuple("Block", "line language directive text")


def blocks(text):
    """Return all fenced blocks, each with the line that it starts at."""
    found, opened, directive, body = [], None, "", []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if opened and stripped == "```":
            found.append(Block(*opened, "".join(body)))
            opened, directive = None, ""
        elif opened:
            body.append(line + "\n")
        elif stripped.startswith("```"):
            opened, body = (number, stripped[3:].strip(), directive), []
        elif stripped and directive:
            raise ValueError(f"line {number}: 'run: {directive}' must stand right before a block")
        elif stripped.startswith("<!-- run:"):
            directive = stripped.removeprefix("<!-- run:").removesuffix("-->").strip()
    if opened or directive:
        raise ValueError(f"the last block has no end, or 'run: {directive}' no block")
    return found


def block_problems(text):
    """List the blocks that would be neither run nor compared."""
    known = ("bash", "python", "diff", "text", "")
    return ([f"line {block.line}: a block of {block.language!r}; known are {known}"
             for block in blocks(text) if block.language not in known]
            + [f"line {block.line}: 'run: {block.directive}' is not known" for block in blocks(text)
               if block.directive and block.directive not in NOT_RUN and not block.directive.startswith("add --")])


def with_flags(text, flags):
    """Add flags to `make run` and at the end of each command that runs a train.py, before any pipe, comment or next command."""
    text = re.sub(r"\bmake run\b", f'make run FLAGS="{flags}"', text.replace("\\\n", " "))
    return re.sub(r"(train\.py[^|&;>#\n)]*?)(?=\s*([|&;>#\n)]|$))", rf"\1 {flags}", text)


def to_run(block):
    """Return a block's text as it is to run, or None if it is not."""
    if block.language not in ("bash", "python") or block.directive in NOT_RUN:
        return None
    if block.directive.startswith("add "):
        return with_flags(block.text, block.directive.removeprefix("add "))
    return block.text


def run_blocks(readme):
    """Run the blocks that the tests run."""
    sys.argv = [readme]
    sys.path.insert(0, str(Path(readme).resolve().parent))
    namespace = {"__name__": "__main__"}
    for block in blocks(Path(readme).read_text()):
        text = to_run(block)
        if text is None:
            continue
        print(f"--- {readme}, line {block.line}", flush=True)
        if block.language == "bash":
            subprocess.run(["bash", "-e", "-c", text], check=True)
        else:
            exec(compile("\n" * block.line + text, readme, "exec"), namespace)


def real_diff(old, new):
    command = ["diff", "-ruN", *chain(*(("-x", pattern) for pattern in NOT_IN_DIFF)), old, new]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def hunks(text):
    """Return the pieces of a diff block, cut at its headers and at '...'."""
    cut = re.split(r"^(?:diff .*|--- .*|\+\+\+ .*|@@.*|\s*\.\.\.)\n", text, flags=re.MULTILINE)
    return [hunk.splitlines() for hunk in cut if hunk.strip()]


def diff_problems(text, diffs):
    """List the hunks that are in none of the diffs, line for line."""
    joined = ["\n" + "\n".join(map(str.rstrip, lines)) + "\n" for lines in diffs]
    return [f"line {block.line}: not in the diff: {hunk[0]} ..."
            for block in blocks(text) if block.language == "diff" for hunk in hunks(block.text)
            if not any("\n" + "\n".join(map(str.rstrip, hunk)) + "\n" in lines for lines in joined)]


def diffs_of(readme):
    """Return the diff of the page's own step to the step before it; for the top README and for docs/, all such diffs."""
    return [real_diff(old, new) for old, new in pairs() if Path(readme).parts[0] in ("README.md", "docs", new.name)]


def prose(text):
    return re.sub(r"^\s*```.*?^\s*```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text):
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|<img[^>]*\bsrc=\"([^\"]+)\"", prose(text))
    return [link for link in map("".join, targets) if not re.match(r"\w+:|\.\./\.\./actions/", link)]     # GitHub's own pages


def broken_links(text, folder):
    names = (link.split("#")[0] for link in links(text))
    return [name for name in names if name and not (folder / name).exists()]


def anchors(text):
    """Return what may follow the # in a link to this page: its headings, as GitHub names them, and its <a id>s."""
    without_code = re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*?)\s*$", without_code, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-") for heading in headings]
    return {*slugs, *re.findall(r"<a id=\"([^\"]+)\"", text)}


def broken_anchors(text, path):
    """Return the links whose page exists but has no such anchor."""
    broken = []
    for link in links(text):
        name, _, place = link.partition("#")
        page = path.parent / name if name else path
        page = page / "README.md" if page.is_dir() else page
        if place and page.suffix == ".md" and page.exists() and place not in anchors(page.read_text()):
            broken.append(link)
    return broken


TABLE = re.compile(r"^\| file \|.*\n\|[-|: ]*\n((?:\|.*\n)*)", re.MULTILINE)


def with_files(text, lesson, support):
    """Return the text with the rows of its table of files in reading order, with BORDER before those that only support the lesson.
    A file without a row gets one that says '?'. The row of a file that the step does not change is dropped."""
    found = TABLE.search(text)
    if not found:
        return text
    rows = {name[1]: name.string for name in map(re.compile(r"\|\s*[\[`]*([\w./-]+\.\w+)").match, found[1].splitlines()) if name}
    def of(names):
        return [rows.get(name, f"| {name} | ? |") for name in names]
    border = [f"| *{BORDER}* | |"] if support else []
    return "".join([text[:found.start(1)], *(f"{row}\n" for row in [*of(lesson), *border, *of(support)]), text[found.end(1):]])


def mistake_table(which):
    """Return a table of planted mistakes: 'step 2, featured', 'step 2, others' or 'reported elsewhere'."""
    mistakes = planted_mistakes()
    if which == "reported elsewhere":
        head = "mistake", "threads"
        rows = [(name, mistake["wild"]) for name, mistake in sorted(mistakes.items()) if "wild" in mistake]
    else:
        head = "mistake", "what it does", "what the loss curve shows"
        step, kind = re.fullmatch(r"step (\d), (featured|others)", which).groups()
        rows = [(name, mistake["what"], mistake["loss"]) for name, mistake in mistakes.items()
                if name.startswith(f"step0{step}_") and kind == ("featured" if "featured" in mistake else "others")]
    return table(head, *((f"`{name}`", *cells) for name, *cells in rows))


def gpu_table(which):
    """Return a table of docs/gpus.toml: what has run where, or how fast it was."""
    rows = tomllib.loads((ROOT / "docs/gpus.toml").read_text())[which]
    heads = {"status": dict(what="what", how="how", where="where", when="when", result="result"),
             "speed": dict(run="run", tokens_per_s="tokens/s", simulated="simulated", mfu="MFU", peak="peak GiB",
                           simulated_peak="simulated")}[which]
    return table(heads.values(), *([row.get(key, "") for key in heads] for row in rows))


def names_table(which):
    """Return a table of docs/names.toml: the flags of other trainers for one technique, or the cheat sheet's row of each."""
    names = tomllib.loads((ROOT / "docs/names.toml").read_text())
    heads = {**names["trainers"], "technique": "technique", "what": "the mistake that nobody sees"}
    if which == "cheat sheet":
        keys, rows = ("technique", "here", "torchtitan", "megatron", "what"), [row for row in names["flag"] if "technique" in row]
        rows = [{**row, "what": planted_mistakes()[row["mistake"]]["what"]} for row in rows]
    else:
        rows = [row for row in names["flag"] if row["table"] == which]
        keys = [key for key in names["trainers"] if any(key in row for row in rows)]
    return table([heads[key] for key in keys], *([row.get(key, "") for key in keys] for row in rows))


def hardware_table(_):
    """Return what each GPU of the planner and the simulator can do: a table of tools/simulate/gpus.py."""
    heads = ("GPU", "bfloat16, TFLOP/s", "float8", "memory, GB", "its TB/s", "NVLink, GB/s", "GPUs on it", "FLOPs per byte sent")
    rows = [(f"`{name}`", f"{gpu.bfloat16 / 1e12:,.0f}", f"{gpu.float8 / 1e12:,.0f}" if gpu.float8 else "", f"{gpu.memory:g}",
             f"{gpu.hbm / 1e12:.2f}", f"{gpu.nvlink / 1e9:g}", str(gpu.node), f"{gpu.bfloat16 / gpu.nvlink:,.0f}")
            for name, gpu in GPUS.items()]
    return table(heads, *rows)


def certificate_table(_):
    """Return the table of the capstone's certificates."""
    rows = tomllib.loads((ROOT / "exercises/capstone/certificates.toml").read_text())
    return table(("certificate", "what your trainer does", "layout", "taught in"), *(
        (f"`{name}`", row["asks"], f"`{row['layout'].partition(' ')[2]}` on {row['layout'].partition(' ')[0]} ranks",
         f"[step {row['step']}](../../{full_name(row['step'])})") for name, row in rows.items()))


def table(head, *rows):
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


SOURCES = {"exercises/mistakes.toml": mistake_table, "tools/prove/causes.py": lambda _: causes.table(), "docs/gpus.toml": gpu_table,
           "docs/names.toml": names_table, "tools/simulate/gpus.py": hardware_table,
           "exercises/capstone/certificates.toml": certificate_table}
FROM = re.compile(r"(<!-- from (%s)(?:: (.+?))? -->\n).*?(<!-- end -->)" % "|".join(map(re.escape, SOURCES)), re.DOTALL)


def reading_time(text, folder):
    """Say how long a chapter takes at 150 words and 10 lines of code a minute: what is not folded, and the by_hand programs."""
    open_text = re.sub(r"<details>.*?</details>|<!--.*?-->", "", text, flags=re.DOTALL)
    words = len(re.sub(r"\]\([^)]*\)|^[|:\s-]+$", "", re.sub(r"```.*?```", "", open_text, flags=re.DOTALL), flags=re.M).split())
    programs = {name for name in re.findall(r"by_hand\w*\.py", open_text) if (folder / name).exists()}
    lines = sum(block.text.count("\n") for block in blocks(open_text) if block.language in ("diff", "python", "bash"))
    lines += sum(len((folder / name).read_text().splitlines()) for name in programs)
    return f"{5 * -(-(words / 150 + lines / 10) // 5):.0f} minutes of reading: {words:,} words and {lines} lines of code"


TIME = re.compile(r"[\d,]+ minutes of reading: [\d,]+ words and [\d,]+ lines of code")


def with_tables(text, name):
    """Return a page with what comes from data: its tables, the rows of a step's table of files in order, its reading time."""
    step, text = Path(name).parts[0], FROM.sub(lambda found: found[1] + SOURCES[found[2]](found[3]) + found[4], text)
    text = with_files(text, LESSON[step], SUPPORT[step]) if name == f"{step}/README.md" and step in LESSON else text
    return TIME.sub(lambda _: reading_time(text, (ROOT / name).parent), text)


def write_tables():
    for name in PAGES:
        old = (ROOT / name).read_text()
        new = with_tables(old, name)
        if new != old:
            (ROOT / name).write_text(new)
            print(f"{name}: tables written")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_blocks(sys.argv[2])
    elif sys.argv[1:]:
        sys.exit("error: readme.py takes --run PAGE, or nothing")
    else:
        write_tables()
