"""The layout explorer (tools/plan --html): its JavaScript computes what the planner computes, and the page shows it."""
import json
import random
import re
import shutil
import subprocess
import sys

import pytest
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
{**{"a": 1, "b": 2}, "a": 3}, {"a": 1} | {"b": 2}, dict(a=1, **{"b": 2}), [*dict.fromkeys([3, 1, 3])], {1: "x", (1, 2): "y"}[1, 2]
[i * j for i in range(4) if i % 2 for j in (1, 2)], {i: i * i for i in range(3)}, sorted({3, 1, 2}), [*range(5, 0, -2)]
sum(x for x in [0.1, 0.2, 0.3]), sum([1, 2], 5), max([3, 1], key=lambda n: -n), min([], default=7), max("ab", "aa"), max((1, 2), (1, 3))
sorted(["b", "aa", "c"], key=lambda s: (len(s), s)), sorted([1, 3, 2], reverse=True), [*reversed([1, 2])], [*enumerate("ab", start=1)]
[*zip([1, 2, 3], "ab")], [*map(sum, zip([1, 2], [3, 4]))], all([]), any(n > 1 for n in [1, 2]), next((n for n in [1] if n > 1), None)
math.gcd(12, 18), math.lcm(4, 6), math.prod([2, 3]), math.ceil(2.1), math.floor(-2.1), math.comb(8, 3), math.log2(8), math.hypot(3, 4)
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
    return [p, p.size, p.moved(4).x, p.y, list(p), [*counted.items()], [*made.items()], waiting.popleft(), len(waiting), first, middle, last,
            front, end, shared, sorted(names), i, a, b, said, [f() for f in later], squared, slow(p), slow(Point(1)), slow(Point(1), k=4), calls,
            list(evens(5)), keywords(1, c=3), keywords(b=5, a=4), keywords(**{"a": 1, "d": 2}), Point(**{"y": 5, "x": 6}), {**p._asdict()},
            p == Point(1), p != Point(2), {Point(1): "found"}[Point(1)], getattr(p, "size"), getattr(p, "z", 9), hasattr(p, "z"),
            isinstance("a", str), isinstance(p, Point), [*sorted([Point(2), Point(1, 9)])], [x for x in p if x], Box([1, 2]).twice]
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
    show = "const show = x => x instanceof py.Dict ? [...py.items(x)].map(show) : typeof x === 'string' || x == null ? x : x[Symbol.iterator] ? [...x].map(show) : x;"
    calls = ", ".join(["tried.results()", *(f"tried.line{i}()" for i in range(len(lines)))])
    found = in_node(f"{script}\n{show}\nconst answer = () => show([{calls}]);")
    wrong = [(line, differences(ours, theirs)) for line, ours, theirs in zip(["results", *lines], wanted, found, strict=True) if differences(ours, theirs)]
    assert not wrong


def test_what_it_does_not_know_it_refuses():
    for text, why in (("def f():\n    with open('x') as g:\n        pass", "line 2: With"), ("def f(a):\n    return a @ a", "line 2: BinOp"),
                      ("def f(a):\n    return print_all(a)", "line 2: the name print_all"), ("@wraps\ndef f(a):\n    pass", "this decorator"),
                      ("def f(a, *, b):\n    return a", "line 1: a parameter after *")):
        with pytest.raises(to_js.Untranslated, match=re.escape(why)):
            to_js.translate({"m": to_js.ast.parse(text)})


# ------------------------------------------------------------------------------------------- the planner, translated
ANSWER = """
function answerOne(row) {
  try {
    const constants = trainers.constants_of(py.from_json(row.known), row.trainer, row.compiled, row.precision, row.gpu, row.balance);
    const cluster = speed.full_nodes(row.gpus, gpus.GPUS.at(row.gpu), row.network, row.node);
    const question = new plan.Question(row.model, py.call(models.Model, [], given.models[row.model]), row.gpu, cluster, row.seq_len, row.batch, constants, row.training);
    const start = py.call(costs.Layout, [], {seq_len: row.seq_len, ...py.object(constants.at("layout"))});
    const l = plan.changed_to(start, row.gpus, row.batch, py.dict(row.knobs)), c = question.c;
    const why = typeof l === "string" ? l : plan.impossible(c, l, constants);
    if (why) return why;
    const one = question.timed(l);
    return py.to_json([explain.as_json(question, one), costs.sent(c, l), [...py.range(l.pp)].map(rank => plan.memory(c, l, constants.at("slack"), rank)),
      explain.name_of(l), explain.known_by(question, l), explain.commands(question, one), explain.timeline(question, one),
      row.more ? [...explain.one_in_brief(question, one), ...explain.one_in_detail(question, one), ...explain.heading(question)] : []]);
  } catch (error) {
    if (error instanceof trainer.Refused) return error.message;
    throw error;
  }
}
function searched({model, gpu, gpus: count, seq_len, batch}) {
  const constants = trainers.constants_of(py.from_json(given.rows[0].known), "this");
  const question = new plan.Question(model, py.call(models.Model, [], given.models[model]), gpu, new speed.Cluster(count, gpus.GPUS.at(gpu)), seq_len, batch, constants);
  const all = question.search(), best = all.best();
  return py.to_json([all.ordered.length, best.map(one => one.layout), [...explain.search_in_words(question, all, best)]]);
}
const answer = ({rows, searches}) => [rows.map(answerOne), searches.map(searched)];
"""
USED = ANSWER + (PLANNER / "page.html").read_text()


def drawn(count, draw):
    """Draw questions and layouts. Some of each are impossible."""
    known = trainers.load_constants(None)
    for i in range(count):
        gpu, name = draw.choice([*speed.GPUS]), draw.choice([*trainers.TRAINERS])
        gpus = draw.choice([1, 2, 8, 16, 64, 64, 128, 512, 1024, 24, 96])
        few = [n for n in plan.divisors(gpus) if n <= 16]
        knobs = dict(tp=draw.choice([1, *few]), cp=draw.choice([1, 1, 1, 2, 4]), pp=draw.choice([1, 1, *few, 3]), ep=draw.choice([1, 1, 1, 2, 8]),
                     zero=draw.randrange(4), schedule=draw.choice([*trainer.SCHEDULES]), virtual=draw.choice([2, 2, 3, 4]),
                     micro_batch=draw.choice([1, 1, 2, 4]), recompute=draw.choice(plan.RECOMPUTE))
        yield dict(known=known, trainer=name, compiled=draw.random() < 0.5, precision=draw.choice(["bfloat16"] * 4 + ["float8", "nvfp4"]),
                   gpu=gpu, gpus=gpus, network=draw.choice([50e9, 50e9, 12.5e9]), node=draw.choice([4, 8, 8, 64]), balance=draw.choice([1.0, 1.3]),
                   model=draw.choice([*models.PRESETS]), seq_len=draw.choice([2048, 4096, 8192, 8192, 131072, 5000]),
                   batch=draw.choice([64, 512, 512, 1024, 96, 500]), training=[0, 0], knobs=knobs, more=i % 10 == 0)


def answered(row):
    try:
        constants = trainers.constants_of(row["known"], row["trainer"], row["compiled"], row["precision"], row["gpu"], row["balance"])
        cluster = speed.full_nodes(row["gpus"], speed.GPUS[row["gpu"]], row["network"], row["node"])
        c = models.PRESETS[row["model"]]
        question = plan.Question(row["model"], c, row["gpu"], cluster, row["seq_len"], row["batch"], constants, row["training"])
        l = plan.changed_to(costs.Layout(seq_len=row["seq_len"], **constants["layout"]), row["gpus"], row["batch"], **row["knobs"])
        why = l if isinstance(l, str) else plan.impossible(c, l, constants)
    except trainer.Refused as refused:
        why = str(refused)
    if why:
        return why
    one = question.timed(l)
    more = [*explain.one_in_brief(question, one), *explain.one_in_detail(question, one), *explain.heading(question)] if row["more"] else []
    return [explain.as_json(question, one), {",".join(key): size for key, size in costs.sent(c, l).items()},
            [plan.memory(c, l, constants["slack"], rank) for rank in range(l.pp)], explain.name_of(l), explain.known_by(question, l),
            explain.commands(question, one), explain.timeline(question, one), more]


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
    searches = [dict(model="llama-1b", gpu="h100", gpus=16, seq_len=8192, batch=256), dict(model="mixtral-8x7b", gpu="a100", gpus=4, seq_len=4096, batch=64)]
    shapes = {name: one._asdict() for name, one in models.PRESETS.items()}
    theirs, found = in_node(page.formulas(USED) + ANSWER, dict(rows=rows, searches=searches, models=shapes))
    ours = [answered(row) for row in rows]
    refused = {re.sub(r"\d+", "", one)[:60] for one in ours if isinstance(one, str)}
    assert sum(isinstance(one, list) for one in ours) > 200 and len(refused) > 20
    for row, one, other in zip(rows, ours, theirs, strict=True):
        assert not differences(one, other), (row, differences(one, other)[:5])
    for asked, (timed, best, words) in zip(searches, found, strict=True):
        cluster = speed.Cluster(asked["gpus"], speed.GPUS[asked["gpu"]])
        constants = trainers.constants_of(trainers.load_constants(None))
        question = plan.Question(asked["model"], models.PRESETS[asked["model"]], asked["gpu"], cluster, asked["seq_len"], asked["batch"], constants)
        search = question.search()
        layouts = [one.layout for one in search.best()]
        assert [len(search.ordered), layouts] == [timed, [costs.Layout(*one) for one in best]]
        assert words == [*explain.search_in_words(question, search, search.best())]
