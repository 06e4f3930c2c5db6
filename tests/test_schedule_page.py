"""tools/schedule.py --page: the page computes what schedules.py computes, and works from the keyboard."""
import json
import shutil
import subprocess
import sys

import pytest
import schedule as shown
from browser import Browser
from steps import ROOT, full_name

STEP = full_name(6)
CASES = [(p, m, v, *times) for p, m, v in ((1, 1, 2), (2, 4, 2), (3, 7, 3), (4, 8, 2), (5, 13, 4))
         for times in ((1, 1, 1, 0), (1, 2, 0.5, 0.25), (0.75, 0.5, 1.5, 1))]
MEASURE = """
const found = [];
for (const [name, p, m, v, F, I, W, message] of CASES) {
  const lists = schedules.make(name, p, m, v), events = schedules.simulate(lists, F, I, W, message);
  found.push({ events: events.map(one => [one.rank, one.action.toString(), one.action.stage, one.start, one.end]),
               idle: schedules.bubble(events), kept: lists.map(schedules.max_in_flight) });
}
console.log(JSON.stringify(found));
"""


@pytest.fixture
def schedules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / STEP))
    monkeypatch.delitem(sys.modules, "schedules", raising=False)
    import schedules
    return schedules


@pytest.mark.skipif(shutil.which("node") is None, reason="apt install nodejs")
def test_the_page_computes_what_schedules_py_computes(schedules):
    script = shown.page(STEP).split("<script>")[1].partition("</script>")[0]
    cases = [(name, p, m, v if row.or_more else row.stages_per_rank, *times) for name, row in schedules.SCHEDULES.items()
             for p, m, v, *times in CASES if m >= row.min_micro_batches(p)]
    assert {name for name, *_ in cases} == {*schedules.SCHEDULES}
    program = f"{script}\nconst CASES = {json.dumps(cases)};\n{MEASURE}"
    done = subprocess.run(["node", "-"], input=program, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for (name, p, m, v, *times), seen in zip(cases, json.loads(done.stdout), strict=True):
        lists = schedules.make(name, p, m, v)
        events = schedules.simulate(lists, *times)
        assert seen["events"] == [[e.rank, str(e.action), e.action.stage, e.start, e.end] for e in events], (name, p, m, times)
        assert seen["idle"] == schedules.bubble(events) and seen["kept"] == [schedules.max_in_flight(one) for one in lists]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="apt install chromium")
def test_the_page_works_from_the_keyboard(tmp_path, schedules):
    (tmp_path / "page.html").write_text(shown.page(STEP))
    said, order = "document.getElementById('said').textContent", "document.querySelector('#ranks tr:last-child .order').textContent"
    with Browser(tmp_path, width=390) as browser:
        browser.open(f"file://{tmp_path}/page.html")

        def says(text):                                   # once it has drawn what is pending
            now = browser.value(f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({said}))))")
            assert now.startswith(text), browser.noted or now
        says("1f1b: each rank works for 24 units and idles for 9. ")
        assert browser.value(order) == " ".join(map(str, schedules.make("1f1b", 4, 8)[3]))
        browser.value("document.getElementById('p').focus()")
        browser.press("ArrowLeft", 2)                     # two ranks
        browser.press("Tab")
        browser.press("ArrowLeft", 3)                     # five micro-batches
        says("1f1b: each rank works for 15 units and idles for 3. The fullest rank keeps the activations of 2 micro-batches.")
        browser.value("document.querySelector('#schedules input:checked').focus()")
        browser.press("ArrowRight", 2)
        says("zerobubble: each rank works for 15 units and idles for 1. ")
        assert browser.value(order) == " ".join(map(str, schedules.make("zerobubble", 2, 5)[1]))
        browser.press("ArrowRight")
        browser.value("document.getElementById('m').focus()")
        browser.press("ArrowLeft", 2)
        says("dualpipe on 2 ranks needs at least 4 micro-batches.")
        assert browser.value("document.documentElement.scrollWidth") == 390, "nothing is wider than the screen"
        assert not browser.noted and browser.requested == [f"file://{tmp_path}/page.html"], "it needs nothing else"
