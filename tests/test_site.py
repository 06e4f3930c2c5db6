"""The site: the tests compare its cards and diffs with the files themselves. If `make site` has built it, they also check its
links, its search, and how it looks and behaves in a browser. `make site-test` sets SITE; then nothing here is skipped."""
import html
import json
import os
import re
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import chromium
import pytest
from readme import blocks, hunks
from steps import ROOT, STEPS

sys.path.insert(0, str(ROOT / "dev/site"))
import diffs  # noqa: E402

SITE = ROOT / os.environ.get("SITE", "no")
built = pytest.mark.skipif("SITE" not in os.environ, reason="looks at the built site: make site, then make site-test")
LESSONS = STEPS[1:]


# ------------------------------------------------------------------------------------------- what needs no site
@pytest.mark.parametrize("step", LESSONS)
def test_every_hunk_has_one_card_that_shows_it(step):
    wanted = [hunk for block in blocks((ROOT / step / "README.md").read_text()) if block.language == "diff"
              for hunk in hunks(block.text)]
    cards = diffs.cards(step)
    assert wanted and len(cards) == len(wanted)
    for card, hunk in zip(cards, wanted):
        rows = diffs.rows(diffs.before(step), step, card.file)[card.first:card.last + 1]
        assert [(row.kind + row.text).rstrip() for row in rows] == [one.rstrip() for one in hunk]


@pytest.mark.parametrize("step", LESSONS)
def test_rows_are_both_files(step):
    lesson, support = diffs.changed(step)
    for name, rows in (lesson | support).items():
        assert "".join(f"{row.text}\n" for row in rows if row.kind != "-") == (ROOT / step / name).read_text()
        old = ROOT / diffs.before(step) / name
        assert "".join(f"{row.text}\n" for row in rows if row.kind != "+") == (old.read_text() if old.exists() else "")


@pytest.mark.parametrize("step", LESSONS)
def test_every_rung_is_marked(step):
    wanted = {f"rung {number}" for number, _, write in diffs.rungs(step) if any(write.values())}
    marks = [diffs.marks(step, name) for part in diffs.changed(step) for name in part]
    found = {mark.label for of_file in marks for of_row in of_file.values() for mark in of_row}
    assert wanted and wanted <= found


# ------------------------------------------------------------------------------------------- what needs the built site
class Code(HTMLParser):
    """Read from a page the rows of each piece of code of one class, as [class, text, open tags]. Marks do not count as text."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.pieces, self.depth, self.row, self.mark = kind, [], 0, None, False

    def handle_starttag(self, tag, attributes):
        classes = dict(attributes).get("class", "").split()
        if tag == "div" and "code" in classes and self.kind in classes:
            self.pieces.append([])
            self.depth = 1
        elif self.depth and tag == "span" and "l" in classes:
            self.row = [classes[1], "", 1]
            self.pieces[-1].append(self.row)
        elif self.row and tag == "span":
            self.row[2] += 1
        self.mark = self.mark or tag == "a" and "mark" in classes

    def handle_endtag(self, tag):
        self.mark = self.mark and tag != "a"
        if tag == "div":
            self.depth = 0
        elif self.row and tag == "span":
            self.row[2] -= 1
            self.row = self.row if self.row[2] else None

    def handle_data(self, data):
        if self.row and not self.mark:
            self.row[1] += data


def shown(page, kind):
    reader = Code(kind)
    reader.feed((SITE / page).read_text())
    return [["".join(text for what, text, _ in rows if what != left_out) for left_out in ("del", "add")] for rows in reader.pieces]


@built
@pytest.mark.parametrize("step", LESSONS)
def test_cards_and_diffs_show_the_files_byte_for_byte(step):
    def files(name):
        old = ROOT / diffs.before(step) / name
        return [(ROOT / step / name).read_text(), old.read_text() if old.exists() else ""]
    assert shown(f"{step}/index.html", "view") == [files(card.file) for card in diffs.cards(step)]
    lesson, support = diffs.changed(step)
    assert shown(f"{step}/diff.html", "wide") == [files(name) for name in lesson | support]


@built
def test_links_lead_somewhere_and_nothing_is_fetched_from_elsewhere():
    pages = {path: path.read_text() for path in SITE.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 80
    ids = {path: {*re.findall(r'\bid="([^"]+)"', text)} for path, text in pages.items()}
    broken, fetched = [], []
    for path, text in pages.items():
        text = re.sub(r"<script type=\"application/json\">.*?</script>", "", text, flags=re.DOTALL)
        fetched += re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', text)
        for link in map(html.unescape, re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            name, _, place = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.exists() or place and target in ids and place not in ids[target]:
                broken.append((str(path.relative_to(SITE)), link))
    assert not broken, broken[:20]
    assert not fetched, fetched[:5]
    assert not [path for path in SITE.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text())]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert chromium.FOUND, "the pages are looked at in a Chromium; none is installed"
    one = chromium.Chromium(tmp_path_factory.mktemp("chromium"))
    yield one
    one.stop()


PAGES = ["index.html", "step04_tp_sp/index.html", "step03_zero/diff.html", "step06_pp/timeline.html", "step02_dp/by_hand.html",
         "matrix.html", "step04_tp_sp/train.py.html", "docs/FAQ.html", "search.html", "slides.html"]
RULES = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'], resultTypes: ['violations']}"


@built
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_complains_of_nothing_and_is_accessible(browser, address, page, width):
    assert (SITE / page).exists()
    for dark in (False, True):
        browser.events.clear()
        browser.screen(width, 900, dark)
        browser.visit(f"{address}/{page}")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert not browser.complaints(address)
        browser.run((ROOT / "out/axe/package/axe.min.js").read_text() + ";0")
        wrong = "violations.map((one) => [one.id, one.nodes.length, one.nodes[0].html])"
        assert browser.run(f"axe.run({RULES}).then((found) => found.{wrong})") == []


@built
def test_no_slide_is_larger_than_a_projector(browser, address):
    browser.screen(1280, 720)
    browser.visit(f"{address}/slides.html")
    browser.wait("[...document.images].every((one) => one.complete)")
    sizes = browser.run("[...document.querySelectorAll('section')].map((one) => [one.offsetHeight, one.scrollWidth])")
    assert len(sizes) > 60 and not [one for one in sizes if one[0] > 720 or one[1] > 1280]


SEEN = """document.addEventListener("focusin", (event) => { event.target.seen = true; });
const open = (one) => one.checkVisibility({visibilityProperty: true}) && !one.closest("[inert]");
window.missed = () => [...document.querySelectorAll("a[href], button, input:not([type=radio]), :checked, summary, [tabindex='0']")]
  .filter((one) => open(one) && !one.seen && !one.matches(".back-to-top")).map((one) => one.outerHTML.slice(0, 120)); 0"""


@built
@pytest.mark.parametrize("page, width", [("step04_tp_sp/index.html", 1280), ("step04_tp_sp/index.html", 390), ("matrix.html", 390),
                                         ("step06_pp/timeline.html", 1280), ("step06_pp/diff.html", 1280), ("slides.html", 1280)])
def test_tab_reaches_everything(browser, address, page, width):
    browser.screen(width, 900)
    browser.visit(f"{address}/{page}")
    browser.run(SEEN)
    count = len(browser.run("missed()"))
    assert count > 20
    for _ in range(count + 200):                          # some extra, because the panel changes on the way
        browser.press("Tab")
        if not browser.run("missed().length"):
            break
    assert browser.run("missed()") == []


@built
def test_keys_do_what_a_mouse_does(browser, address):
    def tab_to(selector):
        for _ in range(400):
            if browser.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            browser.press("Tab")
        raise AssertionError(selector)

    browser.screen(1280, 900)
    browser.visit(f"{address}/step04_tp_sp/index.html")
    tab_to("#card-2 .hunk")
    browser.press("Enter")
    hidden = "[...document.querySelectorAll('#panel .{}')].every((row) => !row.offsetHeight)"
    for key, gone, there in (("ArrowLeft", "add", "del"), ("ArrowRight", "", "add"), ("ArrowRight", "del", "add")):
        browser.press(key)
        assert not gone or browser.run(hidden.format(gone)), (key, gone)
        assert not browser.run(hidden.format(there)), (key, there)
    browser.press("Escape")
    assert browser.run("document.activeElement.matches('#card-2 .hunk')")
    tab_to("article details:not(.around, .fn) > summary")
    browser.press("Enter")
    assert browser.run("document.activeElement.parentElement.open")

    browser.visit(f"{address}/step06_pp/timeline.html")
    tab_to("canvas")
    whole = browser.run("document.activeElement.toDataURL()")
    browser.press("+")
    assert browser.run("document.activeElement.toDataURL()") != whole
    browser.press("0")
    assert browser.run("document.activeElement.toDataURL()") == whole
    browser.press(".")
    assert browser.run("document.querySelector('output').textContent").startswith("rank 0")

    tab_to("input[type=search], input[name=q]")
    browser.call("Input.insertText", text="zigzag")
    browser.press("Enter")
    browser.wait("location.pathname.endsWith('search.html') && document.querySelectorAll('#search-results li a').length > 0")
    tab_to("#search-results li a")


@built
def test_the_panel_follows(browser, address):
    browser.screen(1280, 900)
    browser.visit(f"{address}/step04_tp_sp/index.html")
    for number in (2, 5):
        browser.run(f"document.querySelector('#card-{number}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
        browser.wait(f"document.querySelector('#card-{number}').classList.contains('now')")
        said = "[...document.querySelectorAll('#panel [data-said]')]"
        assert browser.run(f"{said}.map((row) => row.textContent).join('')") == browser.run(
            f"[...document.querySelectorAll('#card-{number} .hunk .l')].map((row) => row.textContent).join('')")
        box = f"{said}[0].getBoundingClientRect()"
        assert browser.run(f"{box}.top >= 0 && {box}.bottom <= innerHeight && {box}.height > 0")
        browser.run("document.querySelector('#panel [value=before]').click()")
        assert browser.run("[...document.querySelectorAll('#panel .add')].every((row) => !row.offsetHeight)")
        browser.run("document.querySelector('#panel [value=both]').click()")


@built
def test_search_finds(browser, address):
    wanted = (("reduce-scatter", "names"), ("VocabParallelHead", "tensor_parallel"), ("flight", "docs"), ("zigzag", "step05"))
    for word, page in wanted:
        browser.visit(f"{address}/search.html?q={word}")
        browser.wait("document.querySelector('#search-results > p').textContent.startsWith('Search finished')")
        assert page in browser.run("[...document.querySelectorAll('#search-results li a')].map((a) => a.href).join(' ')"), word


@built
def test_without_javascript_all_is_there(browser, address):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.screen(390, 900)
        browser.visit(f"{address}/step04_tp_sp/index.html")
        count = len(diffs.cards("step04_tp_sp"))
        assert browser.run("[...document.querySelectorAll('.card .hunk')].filter((one) => one.offsetHeight).length") == count
        assert browser.run("[...document.querySelectorAll('.card .around')].filter((one) => one.offsetHeight).length") == count
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_run_for_the_site_has_a_site():
    assert "SITE" not in os.environ or (Path(SITE) / "index.html").exists(), "make site builds it first"
