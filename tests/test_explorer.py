"""The layout explorer (tools/plan --html): its JavaScript computes what the planner computes, and the page shows it."""
import json
import random
import re
import shutil
import subprocess
import sys

import pytest
from browser import Browser
from steps import ROOT

PLANNER = ROOT / "tools/plan"
sys.path[:0] = [str(PLANNER)]
import costs
import explain
import models
import page
import plan
import speed
import to_js
import trainer
import trainers

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="apt install nodejs")


def in_node(script, given=None):
    """Run a script that has `given` and defines `answer`; return that."""
    end = "process.stdout.write(JSON.stringify(answer(given), (_, x) => x === undefined ? null : x));"
    script = f"const given = {json.dumps(given)};\n{script}\n{end}\n"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------- the translator
# What Python means by an operator often depends on its operands' types. Each of these is one expression of x.
EXPRESSIONS = """
7 // 2, -7 // 2, 7 // -2, -7 % 3, 7 % -3, 7 / 2, 2 ** 10, 7.5 // 2, -7.5 % 2, 10**15 // 7, -(-10 // 4), 12 & -12, 5 | 8
round(0.5), round(1.5), round(2.5), round(-0.5), round(-1.5), round(2.675, 2), round(0.125, 2), round(3.14159, 3), int(-2.7)
f"{0.5:.0f} {1.5:.0f} {2.5:.0f} {0.125:.2f} {2.675:.2f} {-1.5:.1f} {1e6:,.0f} {1234567.891:,.2f} {12345:,} {-1234:,}"
f"{0.1234:.1%} {-0.5:+.1%} {3:+.2f} {1e15:g} {50.0:g} {12.5:g} {1e-5:g} {123456789:.4g} {0.00012345:.4g} {1e9:.10g}"
f"{'ab':>5}|{'ab':<5}|{'ab':^5}|{7:>4}|{7:4}|{'x'}|{7:>{2 + 3}}|{3.14159:>9.2f}|{'it'!r}|{True}|{None}"
[3] * 2, "ab" * 3, "ab" * False, [1] * True, (1, 2) + (3,), [1, 2] + [3], "a" + "b", True + True, 3 * True
[1, 2, 3, 4, 5][1:3], "abcde"[-2:], [1, 2, 3][::-1], [1, 2, 3][-1], (4, 5, 6)[:-1], "abc"[0], [][:2]
(1, 2) == (1, 2), [1, [2]] == [1, [2]], 1 == True, "1" == 1, (1, 2) < (1, 3), None is None, [] == [], {"a": 1} == {"a": 1}
not [], not [0], not "", not {}, not (), not 0, bool([]) or "x", [] or {} or "z", 0 and 1, 1 and [], (1 if [] else 2)
2 in [1, 2], (1, 2) in [(1, 2)], "bc" in "abcd", "a" in {"a": 1}, (1, 2) in {(1, 2): 3}, 3 not in (1, 2), 1 in {1, 2}
{**{"a": 1, "b": 2}, "a": 3}, {"a": 1} | {"b": 2}, dict(a=1, **{"b": 2}), [*dict.fromkeys([3, 1, 3])], {(1, 2): "y"}[1, 2]
[i * j for i in range(4) if i % 2 for j in (1, 2)], {i: i * i for i in range(3)}, sorted({3, 1, 2}), [*range(5, 0, -2)]
sum(x for x in [0.1, 0.2, 0.3]), sum([1, 2], 5), max([3, 1], key=lambda n: -n), min([], default=7), max((1, 2), (1, 3))
sorted(["b", "aa", "c"], key=lambda s: (len(s), s)), sorted([1, 3, 2], reverse=True), [*reversed("ab")], [*enumerate("ab", start=1)]
[*zip([1, 2, 3], "ab")], [*map(sum, zip([1, 2], [3, 4]))], all([]), any(n > 1 for n in [1, 2]), next((n for n in [] if n), None)
math.gcd(12, 18), math.lcm(4, 6), math.prod([2, 3]), math.ceil(2.1), math.floor(-2.1), math.comb(8, 3), math.hypot(3, 4)
"a,b".split(","), "a=b=c".partition("="), ", ".join(str(n) for n in (1, 2)), "12".isdecimal(), "{:,.0f} to {}".format(1234.5, "x")
0 < 1 < 2, 0 < 2 < 2, 1 <= 1 != 2, shlex.quote("a b"), shlex.quote("it's"), shlex.join(["a", "b c", "--x=1"])
"""
MODULE = '''
import math
import shlex
from collections import Counter, defaultdict, deque
from functools import lru_cache
from typing import NamedTuple


class Point(NamedTuple):
    x: int
    y: int = 2
    gpus: tuple = ()

    @property
    def size(self):
        return self.x * self.y

    def moved(self, by=1):
        return self._replace(x=self.x + by)


class Odd(Exception):
    """x"""


class Box:
    def __init__(self, inside):
        self.inside = inside
        self.twice = [one * 2 for one in self.inside]


def fails(n):
    if n % 2:
        raise Odd(f"{n} is odd")
    return n


@lru_cache
def slow(point, k=3):
    calls.append(k)
    return point.x + k


calls = []


def evens(most):
    for i in range(most):
        if i % 2 == 0:
            yield i
    yield from (100, 101)


def keywords(a, b=2, **more):
    return [a, b, *more.items()]


def results():
    p, counted, made, waiting = Point(1), Counter("aab"), defaultdict(int), deque([1, 2, 3])
    made["x", 1] += 5
    made["x", 1] *= 2
    first, *middle, last = range(5)
    *front, end = "abc"
    shared = same = [1]
    same += [2]
    names = {"a"}
    names |= {"b", "a"}
    for i, (a, b) in enumerate([(1, 2), (3, 4)]):
        pass
    try:
        fails(3)
    except Odd as error:
        said = str(error)
    later = []
    for i in range(3):
        later.append(lambda: i)
    total = (lambda n, m=2: n * m)(3)
    if (squared := total**2) > 5:
        squared += 1
    return [p, p.size, p.moved(4).x, p.y, list(p), [*counted.items()], [*made.items()], waiting.popleft(), len(waiting), first,
            middle, last, front, end, shared, sorted(names), i, a, b, said, [f() for f in later], squared, slow(p), slow(Point(1)),
            slow(Point(1), k=4), calls, list(evens(5)), keywords(1, c=3), keywords(b=5, a=4), keywords(**{"a": 1, "d": 2}),
            Point(**{"y": 5, "x": 6}), {**p._asdict()}, p == Point(1), p != Point(2), {Point(1): "found"}[Point(1)],
            getattr(p, "size"), getattr(p, "z", 9), hasattr(p, "z"), isinstance("a", str), isinstance(p, Point),
            [*sorted([Point(2), Point(1, 9)])], [x for x in p if x], Box([1, 2]).twice]
'''


def as_json(x):
    if isinstance(x, dict):
        return [[as_json(key), as_json(value)] for key, value in x.items()]
    return [as_json(one) for one in x] if isinstance(x, (list, tuple)) else x


@needs_node
def test_the_translator_says_what_python_says():
    """Compare expressions, and a module with every construct. Numbers have one type in JavaScript, so 2.0 is 2."""
    lines = [line for line in EXPRESSIONS.splitlines() if line]
    source = MODULE + "\n\n".join(f"def line{i}():\n    return [{line}]" for i, line in enumerate(lines))
    here = {}
    exec(source, here)
    wanted = as_json([here["results"](), *(here[f"line{i}"]() for i in range(len(lines)))])
    script = to_js.script({"tried": to_js.ast.parse(source)})
    show = ("const show = x => x instanceof py.Dict ? [...py.items(x)].map(show) : typeof x === 'string' || x == null ? x : "
            "x[Symbol.iterator] ? [...x].map(show) : x;")
    calls = ", ".join(["tried.results()", *(f"tried.line{i}()" for i in range(len(lines)))])
    found = in_node(f"{script}\n{show}\nconst answer = () => show([{calls}]);")
    each = zip(["results", *lines], wanted, found, strict=True)
    assert not [(line, differences(ours, theirs)) for line, ours, theirs in each if differences(ours, theirs)]


def test_what_it_does_not_know_it_refuses():
    for text, why in (("def f():\n    with open('x') as g:\n        pass", "line 2: With"),
                      ("def f(a):\n    return a @ a", "line 2: MatMult"),
                      ("def f(a):\n    return print_all(a)", "line 2: the name print_all"),
                      ("@wraps\ndef f(a):\n    pass", "this decorator"),
                      ("def f(a, *, b):\n    return a", "line 1: a parameter after *")):
        with pytest.raises(to_js.Untranslated, match=re.escape(why)):
            to_js.translate({"m": to_js.ast.parse(text)})


# ------------------------------------------------------------------------------------------- the planner, translated
ANSWER = """
function questionOf(row, constants) {
  const cluster = speed.full_nodes(row.gpus, gpus.GPUS.at(row.gpu), row.network, row.node);
  const c = py.call(models.Model, [], given.models[row.model]);
  return new plan.Question(row.model, c, row.gpu, cluster, row.seq_len, row.batch, constants, row.training);
}
function constantsOf(row) {
  return trainers.constants_of(py.from_json(row.known), row.trainer, row.compiled, row.precision, row.gpu, row.balance);
}
function answerOne(row) {
  try {
    const constants = constantsOf(row), question = questionOf(row, constants), c = question.c;
    const start = py.call(costs.Layout, [], {seq_len: row.seq_len, ...py.object(constants.at("layout"))});
    const l = plan.changed_to(start, row.gpus, row.batch, py.dict(row.knobs));
    const why = typeof l === "string" ? l : plan.impossible(c, l, constants);
    if (why) return why;
    const one = question.timed(l), ranks = [...py.range(l.pp)].map(rank => plan.memory(c, l, constants.at("slack"), rank));
    const more = [explain.one_in_brief(question, one), explain.one_in_detail(question, one), explain.heading(question)];
    return py.to_json([explain.as_json(question, one), costs.sent(c, l), ranks, explain.name_of(l), explain.known_by(question, l),
      explain.commands(question, one), explain.timeline(question, one), row.more ? more.flatMap(lines => [...lines]) : []]);
  } catch (error) {
    if (error instanceof trainer.Refused) return error.message;
    throw error;
  }
}
function searched(row) {
  const question = questionOf(row, constantsOf(row)), all = question.search(), best = all.best();
  return py.to_json([all.ordered.length, best.map(one => one.layout), [...explain.search_in_words(question, all, best)]]);
}
const answer = ({rows, searches}) => [rows.map(answerOne), searches.map(searched)];
"""
USED = ANSWER + (PLANNER / "page.html").read_text()


def drawn(count, draw):
    """Draw questions and layouts. Some of each are impossible."""
    for i in range(count):
        gpus = draw.choice([1, 2, 8, 16, 64, 64, 128, 512, 1024, 24, 96])
        few = [n for n in plan.divisors(gpus) if n <= 16]
        knobs = dict(tp=draw.choice([1, *few]), cp=draw.choice([1, 1, 1, 2, 4]), pp=draw.choice([1, 1, *few, 3]),
                     ep=draw.choice([1, 1, 1, 2, 8]), zero=draw.randrange(4), schedule=draw.choice([*trainer.SCHEDULES]),
                     virtual=draw.choice([2, 2, 3, 4]), micro_batch=draw.choice([1, 1, 2, 4]),
                     recompute=draw.choice(plan.RECOMPUTE))
        theirs = dict(trainer=draw.choice([*trainers.TRAINERS]), compiled=draw.random() < 0.5, balance=draw.choice([1.0, 1.3]),
                      precision=draw.choice(["bfloat16"] * 4 + ["float8", "nvfp4"]))
        yield asked(draw.choice([*models.PRESETS]), draw.choice([*speed.GPUS]), gpus,
                    draw.choice([2048, 4096, 8192, 8192, 131072, 5000]), draw.choice([64, 512, 512, 1024, 96, 500]), **theirs,
                    network=draw.choice([50e9, 50e9, 12.5e9]), node=draw.choice([4, 8, 8, 64]), knobs=knobs, more=i % 10 == 0)


def asked(model, gpu, gpus, seq_len, batch, **more):
    usual = dict(known=trainers.load_constants(None), trainer="this", compiled=False, precision="bfloat16", network=50e9, node=8,
                 balance=1.0, training=[0, 0])
    return usual | dict(model=model, gpu=gpu, gpus=gpus, seq_len=seq_len, batch=batch) | more


def question_of(row):
    constants = trainers.constants_of(*(row[name] for name in ("known", "trainer", "compiled", "precision", "gpu", "balance")))
    cluster = speed.full_nodes(row["gpus"], speed.GPUS[row["gpu"]], row["network"], row["node"])
    c = models.PRESETS[row["model"]]
    return plan.Question(row["model"], c, row["gpu"], cluster, row["seq_len"], row["batch"], constants, row["training"])


def answered(row):
    try:
        question = question_of(row)
        c, constants = question.c, question.constants
        start = costs.Layout(seq_len=row["seq_len"], **constants["layout"])
        l = plan.changed_to(start, row["gpus"], row["batch"], **row["knobs"])
        why = l if isinstance(l, str) else plan.impossible(c, l, constants)
    except trainer.Refused as refused:
        why = str(refused)
    if why:
        return why
    one = question.timed(l)
    more = [*explain.one_in_brief(question, one), *explain.one_in_detail(question, one), *explain.heading(question)]
    return [explain.as_json(question, one), {",".join(key): size for key, size in costs.sent(c, l).items()},
            [plan.memory(c, l, constants["slack"], rank) for rank in range(l.pp)], explain.name_of(l),
            explain.known_by(question, l), explain.commands(question, one), explain.timeline(question, one),
            more if row["more"] else []]


def differences(a, b, where=""):
    if type(a) in (int, float) and type(b) in (int, float):
        return [] if abs(a - b) <= 1e-12 * max(abs(a), abs(b)) else [f"{where}: {a!r} != {b!r}"]
    if isinstance(a, dict) and isinstance(b, dict) and [*a] == [*b]:
        return [line for key in a for line in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [line for i, (x, y) in enumerate(zip(a, b)) for line in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} != {b!r}"]


@pytest.mark.slow
@needs_node
def test_the_pages_planner_is_the_planner():
    """Compare a thousand questions about layouts: every number to 1e-12, every sentence word for word; and two searches."""
    rows = [*drawn(1000, random.Random(8))]
    searches = [asked("llama-1b", "h100", 16, 8192, 256), asked("mixtral-8x7b", "a100", 4, 4096, 64)]
    shapes = {name: one._asdict() for name, one in models.PRESETS.items()}
    theirs, found = in_node(page.formulas(USED) + ANSWER, dict(rows=rows, searches=searches, models=shapes))
    ours = [answered(row) for row in rows]
    refused = {re.sub(r"\d+", "", one)[:60] for one in ours if isinstance(one, str)}
    assert sum(isinstance(one, list) for one in ours) > 200 and len(refused) > 20
    for row, one, other in zip(rows, ours, theirs, strict=True):
        assert not differences(one, other), (row, differences(one, other)[:5])
    for row, (timed, best, words) in zip(searches, found, strict=True):
        question = question_of(row)
        search = question.search()
        layouts = [one.layout for one in search.best()]
        assert [len(search.ordered), layouts] == [timed, [costs.Layout(*one) for one in best]]
        assert words == [*explain.search_in_words(question, search, search.best())]


# ------------------------------------------------------------------------------------------- the page
def planner(*flags):
    done = subprocess.run([sys.executable, PLANNER, *map(str, flags)], capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout) if "--json" in flags else done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="apt install chromium")
def test_the_page_in_a_browser(tmp_path):
    """Move sliders and search with keys alone. The numbers are those of --json; nothing is requested; a narrow page does not scroll
    sideways."""
    question = ["--model", "llama-1b", "--gpus", 16, "--seq_len", "4k", "--global_batch_tokens", "1M"]
    assert planner(*question, "--config", "pp=2,mbs=2", "--html", tmp_path / "page.html") == ""

    def compare(browser, config):
        one = planner(*question, "--config", config, "--json")
        text = lambda query: browser.value(f"document.querySelector({json.dumps(query)}).textContent")
        low, high = one["interval"]
        said = f"{one['tokens_per_s_per_gpu']:,.0f}four of five: {low:,.0f} to {high:,.0f}"
        assert text("[data-name='tokens/s/GPU']") == said
        assert text("[data-name=step]").startswith(f"{one['step_s']:.2f} s")
        assert text("[data-name=MFU]").startswith(f"{one['mfu']:.1%}")
        assert text("#verdict").split(":")[0] == ("Fits" if one["fits"] else "Does not fit")
        assert f": {one['memory_gib']:.1f} GiB of {one['limit_gib']:.1f} " in text("#verdict")
        for where, parts, form in (("memory", one["memory"], "{:.1f} GiB"), ("time", one["seconds"], "{:.3f} s")):
            for name, size in parts.items():
                if size > 0.001 * sum(parts.values()):
                    assert form.format(size) in text(f"#{where} [data-name='{name}'] b"), name
        commands = browser.value("[...document.querySelectorAll('pre')].map(one => one.textContent)")
        assert commands == [one["command"], one["dry_run"]]
        rows = "[...document.querySelectorAll('#sent tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
        sent = browser.value(rows)
        links = dict(nvlink="NVLink", network="network")
        assert [[row[0], *row[2:6]] for row in sent] == [
            [name, links[t["link"]], f"{t['bytes'] / 1e9:,.2f}", f"{t['alone']:.3f}", f"{t['waits']:.3f}"]
            for name, t in one["transfers"].items()]

    with Browser(tmp_path, width=1280) as browser:
        browser.open(f"file://{tmp_path}/page.html")
        compare(browser, "pp=2,mbs=2,acc=16")
        browser.value("document.getElementById('tp').focus()")
        browser.press("ArrowRight", 2)
        compare(browser, "tp=4,pp=2,mbs=2,acc=64")
        assert "&tp=4&" in browser.value("location.hash") and browser.value("document.activeElement.id") == "tp"
        assert browser.value("document.querySelectorAll('#ranks .first').length") == 2, "the first group of pp"
        browser.press("ArrowRight", 2)                    # 16 x 2 GPUs
        assert browser.value("document.querySelector('#verdict').textContent") == "16 GPUs are not a multiple of tp x cp x pp = 32"
        browser.press("ArrowLeft")
        browser.press("Tab", 4)                           # past the words of cp and pp, to pp's slider
        assert browser.value("document.activeElement.id") == "pp"
        browser.press("Home")
        compare(browser, "tp=8,mbs=2,acc=64")
        browser.press("End")
        browser.value("document.getElementById('tp').focus()")
        browser.press("Home")
        error = planner(*question, "--config", "pp=16,mbs=1,schedule=dualpipe,zero=0,acc=8")
        browser.value("location.hash = '#pp=16&tp=1&mbs=1&schedule=dualpipe&batch=8'")
        said = browser.wait_for("document.body.classList.contains('refused') && document.querySelector('#verdict').textContent")
        assert error.removeprefix("error: --config pp=16,mbs=1,schedule=dualpipe,zero=0,acc=8: ").strip() == said
        browser.value("location.hash = ''; document.getElementById('find').focus()")
        browser.press("Enter")
        browser.wait_for("!document.getElementById('find').disabled && document.getElementById('found').open")
        best = planner(*question, "--json")
        compare(browser, ",".join(f"{name}={best[0][key]}" for name, key in (
            ("tp", "tp"), ("cp", "cp"), ("pp", "pp"), ("ep", "ep"), ("zero", "zero"), ("mbs", "micro_batch"),
            ("acc", "accumulation"), ("recompute", "recompute"))))
        assert browser.value("document.querySelectorAll('#found tbody tr').length") == len(best)
        light = browser.value("getComputedStyle(document.body).backgroundColor")
        assert not browser.noted and {address.partition(":")[0] for address in browser.requested} <= {"file", "blob"}
        assert sum(address.startswith("file") for address in browser.requested) == 1
        browser.resize(390, 844)
        browser.scheme("dark")
        assert browser.value("getComputedStyle(document.body).backgroundColor") != light
        browser.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert browser.wait_for("document.querySelector('#notches tr') && document.documentElement.scrollWidth") == 390
        assert not browser.noted
