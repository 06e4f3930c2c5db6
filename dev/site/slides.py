"""Make the workshop's slides: python dev/site/slides.py writes out/site/slides.html, one file that needs no server.

The words are docs/workshop's. Text for the room is large, with one idea per page: what to say, what to guess, the commands, the
exit question. Pictures and hunks are from the block's step. Notes for the speaker are folded below, and so is the answer.
"""
import html
import os
import re
import shutil
from pathlib import Path

import build
import diffs
from build import HERE, OUT, ROOT, STEPS
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter

FOLDER = ROOT / "docs/workshop"
BLOCKS = ("teacher.md",)
ROOM = ("Say", "Guess", "Type", "Whiteboard", "The task", "Exit")                # each is a page; the rest is the speaker's notes
MARKDOWN = MarkdownIt("commonmark").enable("table")


def parts(text):
    """Split a block into [(bold first words, text)]: each paragraph that begins in bold, with all that follows it."""
    found = []
    for piece in re.split(r"\n\n(?=\*\*|<!--|Then |```|\|)", text.strip()):
        name = re.match(r"\*\*([\w ]+?)[.*]", piece)
        if name or not found:
            found.append((name[1] if name else "", piece))
        else:
            found[-1] = found[-1][0], f"{found[-1][1]}\n\n{piece}"
    return found


def without_links(text):
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def shown(text):
    text = re.sub(r"^<!--.*?-->$", "", text, flags=re.MULTILINE)
    return MARKDOWN.render(without_links(text)).replace("<table>", '<table tabindex="0">')


def sentences(text):
    """Return the words to say, one sentence per line."""
    words = re.sub(r"^\*\*Say(\.\*\*|\*\*[^.]*?\.)\s*", "", " ".join(without_links(text).split()))
    return "".join(f"<p>{MARKDOWN.renderInline(one)}</p>" for one in re.split(r"(?<=[.?:]) (?=[A-Z])", words))


def guesses(text):
    """Return the rows of the sheet that a block's guess names."""
    rows = dict(re.findall(r"^\| (\d\.\d|\d) \| (.*?) \|", (FOLDER / "sheet.md").read_text(), re.MULTILINE))
    named = [one for first, last in re.findall(r"(\d\.\d)(?: to (\d\.\d))?", text) for one in rows
             if first <= one <= (last or first) and one[0] == first[0]]
    listed = "".join(f"<tr><th>{one}</th><td>{html.escape(rows[one])}</td></tr>" for one in dict.fromkeys(named))
    return f"<table>{listed}</table>" if listed else shown(text)


def exit_question(text):
    """Return the question, without the emphasis that gives the answer away; and the answer, for the speaker."""
    question = re.sub(r"(?<!\*)\*(?!\*)([^*]+)\*(?!\*)", r"\1", text)
    question = question.partition("\n(")[0]
    return shown(re.sub(r" (?=[ABC]: )", "\n\n", question)), shown(text)


def slide(heading, body, notes=""):
    folded = f'<details class="notes"><summary>speaker</summary>{notes}</details>' if notes else ""
    return f"<section tabindex='-1'><h2>{heading}</h2><div class='body'>{body}</div>{folded}</section>"


def step_of(text):
    named = re.search(r"step0\d_\w+(?=/by_hand)", text) or re.search(r"^(?:dry|train) (\d)", text, re.MULTILINE)
    return next((step for step in STEPS if named and step in (named[0], STEPS[int(named[1]) - 1] if named.lastindex else "")), None)


def pictures(step):
    for words, name in re.findall(r"!\[([^\]]*)\]\((figures/[^)]*)\)", (ROOT / step / "README.md").read_text())[:2]:
        yield f'<img src="slides/{step}-{Path(name).name}" alt="{html.escape(words)}">'
        yield words


def hunk(step, card):
    """Render a hunk below the def that contains it."""
    every = diffs.rows(diffs.before(step), step, card.file)
    rows = every[card.first:card.last + 1]
    inside = diffs.function_at(step, card.file, next((row.new for row in rows if row.new), 0))
    above = [row for row in every[:card.first] if inside and row.new == inside]
    gap = '<span class="l">    ⋯\n</span>' if above and above[0] != every[card.first - 1] else ""
    lines = [build.line(step, card.file, row) for row in [*above, *rows]]
    lines.insert(len(above), gap)
    return f'<div class="highlight code">{"".join(lines)}</div>'


def pages(text):
    """Yield the pages for the room: one for each table and each command, with the words before it."""
    page = []
    for piece in re.split(r"\n\n(?!\n)", text.strip()):
        page.append(piece)
        if piece.startswith("|") or piece.endswith("```"):
            yield "\n\n".join(page)
            page = []
    if page:
        yield "\n\n".join(page)


def block_slides(heading, text):
    found = parts(text)
    notes = "".join(shown(piece) for name, piece in found if name not in ROOM)
    step, first = step_of(text), True
    for name, piece in found:
        if name == "Say":
            said, *typed = re.split(r"\n\n(?=[^\n]*\n\n(?:<!--[^\n]*\n)?```)", piece)
            yield slide(heading, sentences(said))
            drawn = list(pictures(step)) if step and not typed else []
            for picture, words in zip(drawn[::2], drawn[1::2]):
                yield slide(heading, picture, f"<p>{html.escape(words)}</p>")
            for card in diffs.cards(step)[:2] if f"{step}/by_hand" in text and STEPS.index(step) else []:
                yield slide(f"{heading}: {card.file}", hunk(step, card))
            for one in typed:
                yield slide(f"{heading}: type", shown(one))
        elif name == "Guess":
            yield slide(f"{heading}: guess", guesses(piece), shown(piece))
            command = "".join(re.findall(r"```bash\n.*?```", piece, re.DOTALL))
            if command:
                yield slide(f"{heading}: type", MARKDOWN.render(command.replace("``````", "```\n```")), notes if first else "")
                first = False
        elif name == "Exit":
            question, answer = exit_question(piece)
            yield slide(f"{heading}: exit", question, answer)
        elif name in ROOM:
            own = notes if first and name != "Whiteboard" else ""
            for page in pages(piece):
                yield slide(f"{heading}: {name.lower().removeprefix('the ')}", shown(page), own)
                own = ""
            first = first and name == "Whiteboard"
    if first and notes and not any(name in ROOM for name, _ in found):
        yield slide(heading, notes)


def slides():
    for name in BLOCKS:
        text = (FOLDER / name).read_text()
        title = re.match(r"# (.*)", text)[1]
        pieces = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
        if len(parts(pieces[0].partition("\n")[2])) > 1:
            yield from block_slides(html.escape(title), pieces[0].partition("\n")[2])
        for heading, body in zip(pieces[1::2], pieces[2::2]):
            yield from block_slides(html.escape(heading), body)


SCRIPT = """
const all = [...document.querySelectorAll("section")];
const at = () => all.findIndex((one) => one.getBoundingClientRect().bottom > innerHeight / 2);
addEventListener("keydown", (press) => {
  const by = {ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1}[press.key];
  if (!by || press.target.closest("summary")) return;
  press.preventDefault();
  all[Math.min(Math.max(at() + by, 0), all.length - 1)].scrollIntoView();
});
"""


def main():
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("xcode", "github-dark"))
    style = (HERE / "slides.css").read_text()
    pages = "".join(slides())
    (OUT / "slides").mkdir(parents=True, exist_ok=True)
    for name in set(re.findall(r'src="slides/([^"]*)"', pages)):
        step, _, figure = name.partition("-")
        shutil.copy(ROOT / step / "figures" / figure, OUT / "slides" / name)
    (OUT / "slides.html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Workshop</title><link rel=icon href=_static/icon.svg>"
        f"<style>{light}@media (prefers-color-scheme: dark) {{{dark}}}{style}</style>"
        f"<main><h1>A workshop: LLM training across many GPUs</h1>{pages}</main><script>{SCRIPT}</script></html>")
    print(os.path.relpath(OUT / "slides.html", ROOT))


if __name__ == "__main__":
    main()
