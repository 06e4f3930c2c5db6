"""Build the site: python dev/site/build.py PYTHON, with Sphinx installed; PYTHON has torch, and runs the programs that are shown.

The texts are the READMEs and docs as they are. This program lays them out in out/site-src, with their links turned to pages and
each hunk of a chapter as a card (diffs.py), and beside them the pages that it makes from the code. Sphinx turns them into out/site.
"""
import hashlib
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import diffs
from diffs import ROOT, STEPS

sys.path.append(str(ROOT / "dev/figures"))
import lanes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from readme import PAGES, blocks
from sphinx.cmd.build import build_main
from steps import BORDER, LESSON, SUPPORT, pages_of

HERE, SOURCE, OUT, RAN = Path(__file__).resolve().parent, ROOT / "out/site-src", ROOT / "out/site", ROOT / "out/site-ran"
TEXTS = [*PAGES, "CONTRIBUTING.md", "exercises/kernels/README.md", "tests/data/README.md"]
EIGHT_B = "--model llama-8b --dtype bfloat16 --seq_len 4096 --micro_batch_size 1"
SIMULATED = {                                             # steps of few micro-batches, so that one can see all of it
    1: f"1 {EIGHT_B.replace('8b', '1b')} --global_batch_size 2",
    2: f"8 {EIGHT_B.replace('8b', '1b')} --global_batch_size 16",
    3: f"8 {EIGHT_B} --global_batch_size 8 --zero 3",
    4: f"8 {EIGHT_B} --global_batch_size 2 --tp 8",
    5: f"8 {EIGHT_B.replace('8b', '1b').replace('4096', '32768')} --global_batch_size 1 --cp 8 --zero 3",
    6: f"4 {EIGHT_B.replace('8b', '1b')} --global_batch_size 8 --pp 4",
    7: "4 --model tiny-moe --dtype bfloat16 --global_batch_size 8 --micro_batch_size 1 --ep 4",
    8: "8 --model tiny-moe --dtype bfloat16 --global_batch_size 8 --micro_batch_size 1 --pp 2 --tp 2 --ep 2",
}
# what the layout explorer shows first
EXPLORED = "--model llama-70b --gpus 64 --seq_len 8k --global_batch_tokens 4M --config tp=8,pp=2,zero=1,mbs=1"
EMBEDDED = """
<iframe class="explorer" src="explorer.html?embedded" title="Layout explorer" loading="lazy"></iframe>
"""


# ------------------------------------------------------------------------------------------------ code as HTML
@cache
def coloured(name):
    """Return the lines of a file of the repository, as HTML."""
    text = (ROOT / name).read_text()
    try:
        lexer = get_lexer_for_filename(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False, ensurenl=False)
    coloured = highlight(text, lexer, HtmlFormatter(nowrap=True))
    coloured = re.sub(r'(<span class="p">[^<]*[(\[{]</span>)', r"\1<wbr>", coloured)            # a long line may break here
    return coloured.split("\n")[:len(text.splitlines())]


KINDS = {" ": "same", "+": "add", "-": "del"}


def margin(marks):
    return "".join(f'<a class="mark {m.kind}" href="{m.where}" title="{html.escape(m.title)}">{m.label}</a>' for m in marks)


def line(step, name, row, extra=""):
    """Render one row. Its number is not text, so that the code can be copied and compared."""
    old = diffs.before(step)
    of, number = (f"{old}/{name}", row.old) if row.kind == "-" else (f"{step}/{name}", row.new)
    return f'<span class="l {KINDS[row.kind]}" data-n="{number}"{extra}>{coloured(of)[number - 1]}\n</span>'


def code(step, name, opened, said=range(0), marked=None, ids=False, side=False):
    """Render a whole file with its changes. Fold each function to the line of its def, unless `opened` has that line."""
    rows, parts, now, at = diffs.rows(diffs.before(step), step, name), [], None, 0
    ends = {start: end for _, start, end in diffs.functions(step, name)}
    pieces = []                                           # (function that the row is in, row's index); the def's line comes first
    for index, row in enumerate(rows):
        at = row.new or at
        function = diffs.function_at(step, name, at)
        end = ends.get(function, 0)
        inside = function if row.kind != "-" or at < end else None
        pieces.append((inside, index))
    kinds = {function: [rows[i].kind for f, i in pieces if f == function] for function, _ in pieces}
    for function, index in pieces:
        row = rows[index]
        extra = (f' id="{name}-{index}"' if ids else "") + (' data-said=""' if index in said else "")
        text = (line(step, name, row, extra), row.kind, margin((marked or {}).get(index, ())))
        if function != now:
            parts.append(("", [])) if function is None or row.new != function else parts.append((function, []))
            now = function if row.new == function or function is None else now
            if function is not None and row.new != function and now != function:
                now = None                                # a removed line before a def
        if not parts:
            parts.append(("", []))
        parts[-1][1].append(text)
    return "".join(part(lines, function in opened, kinds.get(function), side) if function else body(lines, side)
                   for function, lines in parts)


def part(lines, opened, kinds, side):
    """Render a function that folds to the line of its def. That line's marks stand before it: a summary may hold no links."""
    if len(lines) == 1:
        return body(lines, side)
    changed = len(kinds) - kinds.count(" ")
    said = f"{changed} changed" if " " in kinds or "-" in kinds else f"{changed} lines"
    head = lines[0][0].replace("\n", f'<i data-folded="{said if changed else ""}"></i>\n')
    return f'{lines[0][2]}<details class="fn"{" open" * opened}><summary>{head}</summary>{body(lines[1:], side)}</details>'


def body(lines, side):
    """Render the rows. With `side`, removed lines stand beside those that replace them."""
    if not side:
        return "".join(marks + text for text, _, marks in lines)
    found, old, new = [], [], []

    def flush():
        if old and new:
            found.append(f'<span class="pair"><span>{"".join(old)}</span><span>{"".join(new)}</span></span>')
        else:
            found.extend(old + new)
        old.clear()
        new.clear()
    for text, kind, marks in lines:
        if kind == " " or kind == "-" and new:
            flush()
        {" ": found, "-": old, "+": new}[kind].append(marks + text)
    flush()
    return "".join(found)


def card(step, one):
    rows = diffs.rows(diffs.before(step), step, one.file)
    shown = range(one.first, one.last + 1)
    numbers = [row.new for row in rows[one.first:one.last + 1] if row.new]
    opened = {diffs.function_at(step, one.file, row.new) for row in rows[one.first:one.last + 1] if row.new}
    whole = "new in" if not (ROOT / diffs.before(step) / one.file).exists() else f"step {int(step[4:6]) - 1} →"
    if len(numbers) < 2:
        which = f"line {numbers[0]}" if numbers else "lines that go"
    else:
        which = f"lines {numbers[0]} to {numbers[-1]}"
    hunk = "".join(line(step, one.file, rows[i]) for i in shown)
    modes = "".join(f'<label><input type="radio" name="mode-{one.number}" value="{mode}"{" checked" * (mode == "both")}> '
                    f'{mode}</label>' for mode in ("before", "both", "after"))
    touched = sorted({m for i in shown for m in diffs.marks(step, one.file).get(i, ()) if m.kind != "said"})
    tags = "".join(f' <a class="mark {m.kind}" href="{m.where}">{html.escape(m.title)}</a>' for m in touched)
    return (f'<div class="card" id="card-{one.number}"><div class="card-head">'
            f'<a href="{one.file}.html#L{numbers[0] if numbers else 1}">'
            f'{one.file}</a> {whole} step {int(step[4:6])}, {which} '
            f'<a href="diff.html#{one.file}-{one.first}">in the whole diff</a></div>'
            f'<div class="highlight code hunk" tabindex="0" role="group" aria-label="{one.file}, changed lines">{hunk}</div>'
            f'<details class="around"><summary>{one.file} around it</summary>'
            f'<fieldset class="modes"><legend>{one.file}, {whole} step {int(step[4:6])}</legend>{modes}</fieldset>'
            f'<div class="highlight code view" tabindex="0" role="group" aria-label="{one.file}, whole">'
            f'{code(step, one.file, opened, shown)}</div></details>{f"<p class=touched>{tags}</p>" if tags else ""}</div>')


# ------------------------------------------------------------------------------------------------ pages
def raw(text):
    return f"```{{raw}} html\n{text}\n```\n"


def write(name, text):
    (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
    (SOURCE / name).write_text(text)


def page_of(path):
    """Return the Sphinx source of the page that a file or folder of the repository has in the site. Make it if necessary."""
    name = str(path.relative_to(ROOT))
    if path.is_dir() and not (path / "README.md").exists():
        entries = sorted(one for one in path.iterdir() if one.is_file() and one.suffix in (".py", ".patch", ".csv", ".md"))
        listed = "".join(f"- [`{one.name}`]({os.path.relpath(page_of(one), name)})\n" for one in entries)
        write(f"{name}/index.md", f"---\norphan: true\n---\n# {name}\n\n{listed}")
        return f"{name}/index.md"
    if path.is_dir() or path.name == "README.md":
        return f"{path.relative_to(ROOT) if path.is_dir() else path.parent.relative_to(ROOT)}/index.md".removeprefix("./")
    if name in TEXTS:
        return name
    if not (SOURCE / f"{name}.md").exists():
        lines = "".join(f'<span class="l same" id="L{n}" data-n="{n}">{text}\n</span>' for n, text in enumerate(coloured(name), 1))
        write(f"{name}.md", f"---\norphan: true\n---\n# {name}\n\n"
              + raw(f'<div class="highlight code whole" tabindex="0" role="group" aria-label="{name}">{lines}</div>'))
    return f"{name}.md"


def with_links(text, name):
    """Return the text with its links leading to pages of the site. Links to an <a id>, unknown to Sphinx, become HTML."""
    folder, here = (ROOT / name).parent, page_of(ROOT / name)

    def turned(match):
        words, target = match[1], match[2]
        file, _, place = target.partition("#")
        path = (folder / file).resolve() if file else ROOT / name
        if re.match(r"\w+:", target) or not path.exists() or path.suffix in (".png", ".gif"):
            return match[0]
        page = os.path.relpath(page_of(path), Path(here).parent)
        source = path / "README.md" if path.is_dir() else path
        if place and f'<a id="{place}">' in source.read_text():
            return f'<a href="{page.removesuffix(".md")}.html#{place}">{words}</a>'
        return f"[{words}]({page if file else ''}{'#' if place else ''}{place})"
    fences = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    fences[::2] = [re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", turned, piece) for piece in fences[::2]]
    return "".join(fences)


def with_cards(text, name):
    """Return a step's page with its hunks as cards."""
    step = Path(name).parent.name
    lines, found = text.split("\n"), [one for one in diffs.cards(step) if one.page == name]
    for block in reversed([block for block in blocks(text) if block.language == "diff"]):
        own = [card(step, one) for one in found if one.line == block.line]
        lines[block.line - 1:block.line + block.text.count("\n") + 1] = [raw("\n".join(own))]
    return "\n".join(lines)


def toctree(*names, caption=""):
    return "\n\n```{toctree}\n:hidden:\n" + (f":caption: {caption}\n" if caption else "") + "\n" + "\n".join(names) + "\n```\n"


def with_pages_of_the_site(text, name):
    """Return the text with links where it names a page that only the site has, such as `out/site/step08_5d/scale.html`."""
    here = Path(page_of(ROOT / name)).parent
    return re.sub(r"`out/site/([\w/]+\.html)`", lambda found: f'<a href="{os.path.relpath(found[1], here)}">{found[1]}</a>', text)


def texts():
    for name in TEXTS:
        text = re.sub("<!-- badges -->.*<!-- end of badges -->", "", (ROOT / name).read_text(), flags=re.DOTALL)   # only on GitHub
        step = Path(name).parts[0]
        links = with_links(with_cards(text, name) if step in STEPS else text, name)
        links = with_pages_of_the_site(links, name)
        if name == f"{step}/README.md":
            own = ["scale"] if step == STEPS[-1] else []
            links += toctree(*(Path(page).stem for page in pages_of(step)[1:]), *own, "diff", "by_hand", "timeline")
        if name == "README.md":
            title, first, rest = re.split(r"\n\n+", links.strip(), maxsplit=2)
            links = "\n\n".join([title, first, raw(EMBEDDED), rest])
            links += toctree(*(f"{step}/index" for step in STEPS), "matrix", caption="Steps")
            rest = [page_of(ROOT / one).removesuffix(".md") for one in TEXTS if one != name and Path(one).parts[0] not in STEPS]
            links += toctree(*[one for one in rest if "workshop" not in one], caption="More")
            links += toctree(*[one for one in rest if "workshop" in one], caption="Workshop")
        write(page_of(ROOT / name), links)
    for path in [*ROOT.glob("step0*/figures/*"), *ROOT.glob("docs/figures/*"), *ROOT.glob("tools/plan/figures/*")]:
        (SOURCE / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, SOURCE / path.relative_to(ROOT))


def sizes(rows):
    return f"+{sum(r.kind == '+' for r in rows)} −{sum(r.kind == '-' for r in rows)}"


def diff_page(step):
    """Write the page with everything that a step changes, in the order of `make diff`."""
    lesson, support = diffs.changed(step)
    number = int(step[4:6])
    said = {name: sum(c.last - c.first + 1 for c in diffs.cards(step) if c.file == name) for name in lesson | support}
    text = [f"# The whole diff of step {number}\n",
            "[The lesson](index.md), which shows some of it, one piece at a time. Removed lines "
            "stand beside what replaces them; functions without a change are folded. In the margin: "]
    text += [raw('<p class="legend"><span class="mark said">§</span> the lesson shows it <span class="mark rung">rung</span> the '
                 'ladder wants the function <span class="mark mistake">mistake</span> a planted mistake touches the line</p>')]
    if number == 1:
        text[1] = "Step 1 has nothing before it: all of it is new. In the margin: "
    for name, rows in (lesson | support).items():
        new = {row.new for row in rows if row.kind == "+"} | {row.new for row in rows if row.new}
        changed = {diffs.function_at(step, name, row.new or 0) for row in rows if row.kind == "+" and row.new in new}
        at = 0
        for row in rows:
            at = row.new or at
            changed |= {diffs.function_at(step, name, at)} if row.kind == "-" else set()
        shown = (f'<div class="highlight code wide" tabindex="0" role="group" aria-label="{name}">'
                 f'{code(step, name, changed, marked=diffs.marks(step, name), ids=True, side=True)}</div>')
        page_of(ROOT / step / name)
        head = f'<p class="size">{sizes(rows)}, {said[name]} lines shown in the lesson, <a href="{name}.html">the file</a></p>'
        if name == next(iter(support), None):
            text.append(f"## {BORDER.capitalize()}\n")
        if name in lesson:
            text += [f"## {name}\n", raw(head + shown)]
        else:
            name_id = name.replace(".", "-")
            text += [raw(f'<details class="support" id="{name_id}"><summary>{name} {sizes(rows)}</summary>{head}{shown}</details>')]
    write(f"{step}/diff.md", "\n".join(text))


def matrix():
    """Write the page of files by steps: their lines, their changes, and links to both."""
    names = list(dict.fromkeys(name for step in STEPS for name in [*LESSON[step], *SUPPORT[step]]))
    rows = []
    for name in names:
        cells, last = [], None
        for step in STEPS:
            changes = next((part[name] for part in diffs.changed(step) if name in part), None)
            last = step if changes else last
            if not (ROOT / step / name).exists():
                cells.append("<td></td>")
                continue
            lines, place = len(coloured(f"{step}/{name}")), f"{step}/diff.html#{name.replace('.', '-').replace('_', '-')}"
            place = place if name in LESSON[step] else f"{step}/diff.html#{name.replace('.', '-')}"
            new = changes and all(row.kind == "+" for row in changes)
            what = "new" if new else sizes(changes) if changes else "as before"
            kind = "lesson" if changes and name in LESSON[step] else "support" if changes else "same"
            link = place if changes else f"{last}/{name}.html"
            cells.append(f'<td class="{kind}"><a href="{link}">{lines}<br><small>{what}</small></a></td>')
        rows.append(f"<tr><th scope=row>{name}</th>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col"><a href="{step}/index.html">{step.replace("_", " ", 1)}</a></th>' for step in STEPS)
    table = (f'<div class="scroll" tabindex="0" role="group" aria-label="files by steps"><table class="matrix">'
             f'<thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>')
    write("matrix.md", "# Files by steps\n\nLines of each file in each step, and what the step changes in it. Blue is the lesson, "
          "grey only supports it.\n\n" + raw(table))


def by_hand(step, output):
    shown = "".join(f'<span class="l same" id="L{n}" data-n="{n}">{text}\n</span>'
                    for n, text in enumerate(coloured(f"{step}/by_hand.py"), 1))
    played = raw(f'<p><a href="play.html">Play it rank by rank</a>: every line, tensor and message of its run '
                 f'(<code>make play STEP={int(step[4:6])}</code>).</p>') if step != STEPS[0] else ""
    write(f"{step}/by_hand.md", f"# Step {int(step[4:6])} by hand\n\n"
          f"`python {step}/by_hand.py` printed, when this page was built:\n\n"
          f"```text\n{output.rstrip()}\n```\n\n{played}\n\nThe [lesson](index.md) says why. The whole program:\n\n"
          + raw(f'<div class="highlight code whole" tabindex="0" role="group" aria-label="by_hand.py">{shown}</div>'))


def timeline(step, output, events):
    number = int(step[4:6])
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = [(e["pid"], threads[e["tid"]], e["name"], e["args"]["at"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    write(f"{step}/timeline.md", f"# Step {number} as simulated\n\nOne training step on GPUs that nobody has here: "
          f"the step's own trainer, played by the simulator. {KEYS}\n\n```bash\npython tools/simulate "
          f"{number} {SIMULATED[number]}\n```\n\n" + picture(rows, ranks, [*dict.fromkeys(threads.values())])
          + f"\n```text\n{output.rstrip()}\n```\n")


KEYS = ("Drag over a stretch to zoom, point at a bar to read it; with the keyboard ← and → move, + and − zoom, 0 shows all.")


def picture(rows, ranks, streams, memory=None):
    """Return the timeline of rows (rank, stream, name, place, start, microseconds), and memory under them, for site.js to draw."""
    names, places = ([*dict.fromkeys(row[i] for row in rows)] for i in (2, 3))
    number = {name: i for i, name in enumerate(names)}, {place: i for i, place in enumerate(places)}
    events = [[rank, streams.index(stream), number[0][name], number[1][place], round(start * 10), round(length * 10)]
              for rank, stream, name, place, start, length in rows]
    data = dict(names=names, places=places, streams=streams, ranks=ranks, events=events) | (dict(memory=memory) if memory else {})
    text = json.dumps(data, separators=(",", ":")).replace("</", "<" + chr(92) + "/")
    return raw(f'<div class="timeline"><noscript>The picture needs JavaScript.</noscript>'
               f'<script type="application/json">{text}</script></div>')


def scale(traces):
    """Write the page with the lanes that dev/figures/step08.py draws as a picture, {name: trace}, all on one axis of time."""
    rows = [(i, *row) for i, (name, trace) in enumerate(traces.items()) for row in lanes.rows(trace, lanes.LANES[name].rank)]
    held = {i: thinned(lanes.memory(trace, lanes.LANES[name].rank)) for i, (name, trace) in enumerate(traces.items())}
    titles = {i: lanes.LANES[name].title for i, name in enumerate(traces)}
    commands = "".join(f"python tools/simulate {one.command}{' ' * 3}# {one.title}\n" for one in lanes.LANES.values())
    write(f"{STEPS[-1]}/scale.md", "# One training step, drawn to scale\n\n"
          f"A training step of {lanes.GPUS} H100s under each layout, as the simulator plays it, all on one axis of time. A lane "
          "shows what one rank does: its passes, its kernels (red: it waits), what NVLink and the network carry, and the memory "
          f"that it holds. {KEYS} [The chapter](LAYOUTS.md#one-step-drawn-to-scale) says what to look for, and in what the "
          "layouts differ.\n\n"
          + picture(rows, titles, ["actions", "compute", "NVLink", "network"], held) + f"\n```bash\n{commands}```\n")


def thinned(points):
    """Return the points, in tenths of microseconds and GiB, without those that differ little from the one kept before them."""
    kept = []
    for when, size in points:
        if not kept or abs(size - kept[-1][1]) > 0.05:
            kept.append([round(when * 10), round(size, 2)])
    return kept


# ------------------------------------------------------------------------------------------------ what runs
def played_page(step):
    return RAN / f"{step}-play.html"


def ran(python, kind, name):
    """Return what a program printed, and its trace. Run it again only if its code has changed. The name is a step's or a lane's."""
    step = STEPS[lanes.STEP - 1] if kind == "lane" else name
    number = int(step[4:6])
    words = lanes.LANES[name].command if kind == "lane" else f"{number} {SIMULATED[number]}"
    digest = hashlib.sha256(words.encode())
    files = [*(ROOT / step).glob("*.py"), *(ROOT / "tools/simulate").glob("*.py"), *(ROOT / "tools/plan").glob("*.py")]
    files = sorted([ROOT / step / "by_hand.py", *(ROOT / "tools/play").rglob("*.*")] if kind == "by_hand" else files)
    for path in files:
        digest.update(path.read_bytes())
    kept = RAN / f"{name}-{kind}-{digest.hexdigest()[:16]}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    trace = RAN / f"{name}.trace"
    command = f"tools/simulate {words} --trace {trace}"
    if kind == "by_hand":
        command = f"{step}/by_hand.py" if number == 1 else f"tools/play --out {played_page(step)} {step}/by_hand.py"
    done = subprocess.run([python, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=600,
                          env=os.environ | dict(OMP_NUM_THREADS="1"))
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")
    output = done.stdout if "tools/play" not in command else done.stdout[:done.stdout.rindex(f"{played_page(step)}: ")]
    events = [] if kind == "by_hand" else json.loads(trace.read_text())["traceEvents"]
    found = [output, [event for event in events if kind != "lane" or event["pid"] == lanes.LANES[name].rank]]
    for old in RAN.glob(f"{name}-{kind}-*"):
        old.unlink()
    kept.write_text(json.dumps(found))
    return found


def explorer(python):
    """Return the layout explorer, its links leading to pages of the site."""
    kept = RAN / "explorer.html"
    subprocess.run([python, "tools/plan", *shlex.split(EXPLORED), "--html", kept], cwd=ROOT, check=True)
    page = re.sub(r'"([\w/]+)/README\.md"', r'"\1/index.html"', kept.read_text())
    return page.replace("docs/names.md", "docs/names.html").replace('"root": "../../"', '"root": ""')


MENDED = {                                                # what Sphinx and Furo leave out for readers without a mouse or sight
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="all pages">',
    '<aside class="toc-drawer': '<aside aria-label="on this page" class="toc-drawer',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    "<pre>": '<pre tabindex="0">',
    '<th class="head"><p></p></th>': "<td></td>",
    '<div id="search-results">': '<h1>Search</h1><div id="search-results">',
}


def mend():
    for path in OUT.rglob("*.html"):
        text = path.read_text()
        for old, new in MENDED.items():
            text = text.replace(old, new)
        path.write_text(text)


def main(python):
    shutil.rmtree(SOURCE, ignore_errors=True)
    RAN.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {(kind, step): pool.submit(ran, python, kind, step) for step in STEPS for kind in ("timeline", "by_hand")}
        played = {name: pool.submit(ran, python, "lane", name) for name in lanes.LANES}
        page = pool.submit(explorer, python)
        texts()
        with open(SOURCE / "tools/plan/index.md", "a") as file:
            written = '<p><a href="../../explorer.html">The layout explorer</a> is what <code>--html</code> writes.</p>'
            file.write("\n\n" + raw(written))
        matrix()
        for step in STEPS:
            diff_page(step)
            by_hand(step, jobs["by_hand", step].result()[0])
            timeline(step, *jobs["timeline", step].result())
        scale({name: job.result()[1] for name, job in played.items()})
    shutil.rmtree(OUT, ignore_errors=True)
    kept = str(ROOT / "out/site-doctrees")
    wrong = build_main(["-q", "-W", "--keep-going", "-j", "2", "-c", str(HERE), "-d", kept, str(SOURCE), str(OUT)])
    mend()
    (OUT / "explorer.html").write_text(page.result())
    bubble = [python, "tools/schedule.py", "--step", STEPS[5], "--page", OUT / STEPS[5] / "bubble.html"]
    subprocess.run(bubble, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for step in STEPS[1:]:
        shutil.copy(played_page(step), OUT / step / "play.html")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
