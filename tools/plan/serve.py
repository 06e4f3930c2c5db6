"""Give the answer as a web page, from a server (--serve) or in a file that holds its answers (--html FILE). The page
only draws. The server listens on this machine alone, and refuses requests that use another host name, so a web page
whose host name was pointed at 127.0.0.1 (DNS rebinding) gets no answer.
"""
import json
import os
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import NamedTuple

import costs
import explain
import measured
import models
import plan
from speed import GPUS, KINDS, NETWORKS, Cluster, Times
from trainers import ABOUT, TRAINERS, constants_of
from trainer import Refused, fail, make, simulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXTS = {f"/{path.relative_to(ROOT)}": path          # the page links to these
         for path in [*ROOT.glob("step*/README.md"), HERE / "README.md", *ROOT.glob("docs/names.md")]}
PASTED = "pasted"                                         # stands for the model of a pasted config.json
LONGEST = 2**16                                           # bytes of a request
PATIENCE = 10                                             # seconds that a browser may pause within a request
SHOWN = 16                                                # the most ranks that the timeline shows
DEGREES = [2**i for i in range(9)]
LARGEST = dict(gpus=2**17, gpus_per_node=2**17, seq_len=2**24, tokens=2**36)       # largest values in a question


class Question(NamedTuple):
    model: str
    c: models.Model
    gpu: str
    cluster: Cluster
    seq_len: int
    sequences: float
    constants: dict
    training: tuple = (0, 0)                              # tokens, dollars a GPU-hour

    @property
    def batch(self):
        """Return the number of sequences in a step, for every layout but --config's."""
        return plan.batch_near(self.sequences, self.cluster.gpus)

    def search(self):
        return plan.Search(self.c, self.cluster, self.seq_len, self.batch, self.constants)

    def evaluate(self, config):
        l = plan.parse_config(config, self.c, self.cluster, self.seq_len, self.batch, **self.constants["layout"])
        return plan.evaluate(self.c, l, self.cluster, self.constants)


def answer(question, config=""):
    """Return the recommendation, and a report on one layout: config's, or the best."""
    constants = json.dumps(question.constants, sort_keys=True)
    said, best = recommendation(question._replace(constants=None), constants)
    one = question.evaluate(config) if config else best
    return said | dict(layout=report(question, one) if one else None)


@lru_cache(maxsize=32)
def recommendation(question, constants):
    """Return what there is to say about all layouts, and the best one or None. constants is JSON text, so it can be hashed."""
    question = question._replace(constants=json.loads(constants))
    search = question.search()
    best = search.best()
    words = [explain.nothing_fits(question)]
    if best:
        words = [*explain.two_answers(question, search), *explain.wanted(question, best[0])]
        words += [explain.why_not("The second", *best[:2])] if len(best) > 1 else []
        words += explain.among_others(question, search, best)
    said = dict(heading=list(explain.heading(question)), timed=len(search.ordered), equal=explain.how_many_are_equal(best),
                best=[row(question, one) for one in best], words=words)
    return said, best[0] if best else None


def row(question, one):
    l = one.layout
    return dict(config=config_of(l), name=explain.name_of(l), cells=explain.row_of(l), held=one.held,
                step=one.step, tokens_per_s=one.tokens_per_s, interval=explain.interval(question, one),
                known=explain.known_by(question, l), provenance=explain.provenance(question, l))


def config_of(l):
    """Return the layout as --config takes it."""
    of_pp = ["schedule", "v"] * (l.pp > 1)
    names = ["dp", "tp", "cp", "pp", "ep", "zero", *of_pp, "mbs", "acc", "recompute"]
    return ",".join(f"{name}={getattr(l, plan.NAMES.get(name, name))}" for name in names)


def report(question, one):
    if question.model == PASTED:
        question = question._replace(model="DIR")         # the reader's own folder with the config.json
    c, cluster, l, slack = question.c, question.cluster, one.layout, question.constants["slack"]
    to_run = question.model, l, cluster
    turns = [{name: value for name, value in turn.items() if name != "layout"}
             for turn in explain.turned(c, one, cluster, question.constants)]
    sent = [(*what, size) for what, size in costs.sent(c, l).items()]
    return explain.as_json(question, one) | row(question, one) | dict(
        ranks=[plan.memory(c, l, slack, rank) for rank in range(l.pp)], whole=cluster.gpu.memory,
        gpus_per_node=cluster.gpus_per_node, mfu=explain.mfus(c, one, cluster), turns=turns, sent=sent,
        timeline=timeline(question, one), stops=stops(question, l), script=explain.script(*to_run),
        by_hand=explain.on_nodes(*to_run, job=1, host="HOST:29500") if cluster.nodes > 1 else None)


def timeline(question, one):
    """Return the schedule's events with this layout's F, I and W, for some of its micro-batches and ranks."""
    l = one.layout
    times = Times(question.c, l, question.cluster, question.constants["time"])
    every = -(-l.pp // SHOWN)                             # draw one rank in this many
    m = min(l.accumulation, 3 * l.pp + 2 if every == 1 else 2 * l.pp)
    share = question.c.num_hidden_layers / l.pp / l.stages_per_rank
    F, I, W = (share * seconds for seconds in (times.F, times.I, times.W))
    events = simulate(make(l.schedule, l.pp, m, l.stages_per_rank), F, I, W)
    after = {name: one.seconds.get(name, 0) for name in ("dp", "optimizer")}
    not_drawn = (l.accumulation - m) * (times.F + times.I + times.W) * share * l.stages_per_rank
    drawn = [(rank, action.kind, action.stage // l.pp, action.micro_batch, round(start, 6), round(end, 6))
             for rank, action, start, end in events if rank % every == 0]
    return dict(ranks=l.pp, every=every, shown=m, of=l.accumulation, not_drawn=not_drawn, after=after, events=drawn)


def stops(question, l):
    """Return for each knob its values, and the layout that each leads to, or why it is impossible."""
    values = dict(tp=DEGREES[:6], cp=DEGREES, pp=DEGREES[:8], ep=DEGREES[:7], zero=[0, 1, 2, 3],
                  schedule=plan.SCHEDULES, virtual=plan.stages_to_choose(l.schedule), micro_batch=DEGREES[:6],
                  recompute=plan.RECOMPUTE)
    if l.pp == 1 or not plan.SCHEDULES[l.schedule].or_more:
        del values["virtual"]

    def stop(knob, value):
        changed = turned_to(question, l, knob, value, l.batch)
        why = changed if isinstance(changed, str) else plan.impossible(question.c, changed, question.constants)
        return dict(value=value, why=why, config="" if why else config_of(changed))
    return {knob: [stop(knob, value) for value in dict.fromkeys([*of, getattr(l, knob)])]
            for knob, of in values.items()}


def turned_to(question, l, knob, value, batch):
    """Return the layout with one knob set to a value, or why there is none."""
    if knob == "schedule" and l.pp == 1 and value != costs.DEFAULT_SCHEDULE:
        return "needs pp"
    return plan.changed_to(l, question.cluster.gpus, batch, **{knob: value})


def page(question, shown, served, root="/"):
    """Return the page, in one file. If served it asks for more; if not, it holds all it shows. root: path to the READMEs."""
    names = dict(models=list(models.PRESETS), gpu_names=list(GPUS), kinds=KINDS, networks=list(NETWORKS),
                 trainers=list(TRAINERS), about=ABOUT, columns=explain.COLUMNS)
    data = dict(state=state_of(question), served=served, root=root) | names | shown
    text = (HERE / "page.html").read_text(encoding="utf-8")
    return text.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c"))


def state_of(question):
    cluster, seq_len = question.cluster, question.seq_len
    return dict(model=question.model, gpu=question.gpu, trainer=question.constants["trainer"],
                network=network_of(cluster.network), gpus=cluster.gpus, seq_len=seq_len,
                tokens=round(question.sequences * seq_len))


def network_of(network):
    return next((name for name, speed in NETWORKS.items() if speed == network), str(network))


def write(question, config, path):
    """Write a page that needs no server. It has the best layout for half and twice as many GPUs and tokens; and for the
    question itself the whole table, and the layout that each knob leads to."""
    if config:
        question.evaluate(config)                         # what is refused is refused before the long search
    with measured.refusing(f"--html {path}"):
        open(path, "a").close()
    now, answers = state_of(question), {}
    for gpus, tokens in product((1, 0.5, 2), repeat=2):
        state = dict(gpus=int(gpus * now["gpus"]), tokens=int(tokens * now["tokens"]))
        print(f"{state['gpus']:,} GPUs, {state['tokens']:,} tokens", file=sys.stderr)
        with suppress(Refused):                           # less than one GPU, or not whole nodes
            answers["{gpus},{tokens}".format(**state)] = answer(asked(question, state)) | dict(reports={})
    of_it = answers["{gpus},{tokens}".format(**now)] = answer(question, config)
    layout = of_it["layout"]
    configs = [one["config"] for one in of_it["best"]]
    if layout:
        configs += [stop["config"] for stops in layout["stops"].values() for stop in stops if stop["config"]]
    of_it["reports"] = {one: answer(question, one)["layout"] for one in configs}
    root = os.path.relpath(ROOT, Path(path).resolve().parent) + "/"
    shown = dict(answers=answers, config=layout["config"] if config else "")
    measured.write_text("--html", path, page(question, shown, False, root))


def run(question, config, port):
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler(question, config))
    except OSError as error:
        fail(f"--port {port}: {error.strerror}")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)         # a browser that goes away must not end the server
    with server, suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    print()


def asked(question, state):
    """Return the question that the page asks with its state. What the state leaves out is as on the command line."""
    def number(name, otherwise):
        value = state.get(name, otherwise)
        if type(value) is not int or not 1 <= value <= LARGEST[name]:
            fail(f"{name} must be a whole number from 1 to {LARGEST[name]:,}")
        return value

    def choice(name, otherwise, known):
        value = state.get(name, otherwise)
        if not isinstance(value, str) or value not in {*known, otherwise}:
            fail(f"{name} must be one of {', '.join(known)}")
        return value
    if not isinstance(state, dict):
        fail("a request must be a JSON object")
    model = choice("model", question.model, [*models.PRESETS, PASTED])
    c = question.c if model == question.model else models.PRESETS.get(model)
    if model == PASTED:
        try:
            c = models.read(json.loads(str(state.get("pasted"))), "the pasted config.json")
        except (ValueError, RecursionError):
            fail("the pasted config.json is not JSON")
    now = question.cluster
    gpus = number("gpus", now.gpus)
    gpu = choice("gpu", question.gpu, GPUS)
    network = choice("network", network_of(now.network), NETWORKS)
    cluster = now._replace(gpus=gpus, network=NETWORKS.get(network, now.network))
    if gpu != question.gpu:
        cluster = cluster._replace(gpu=GPUS[gpu], gpus_per_node=GPUS[gpu].node)
    if cluster.gpus > cluster.gpus_per_node and cluster.gpus % cluster.gpus_per_node:
        fail(f"{gpus:,} GPUs are not a multiple of {cluster.gpus_per_node}, the number in a node")
    seq_len = number("seq_len", question.seq_len)
    tokens = number("tokens", round(question.sequences * question.seq_len))
    trainer = choice("trainer", question.constants["trainer"], TRAINERS)
    said = question.constants
    constants = constants_of(said["base"], trainer, said["compiled"], said["float8"], gpu)
    return question._replace(model=model, c=c, gpu=gpu, cluster=cluster, seq_len=seq_len,
                             sequences=tokens / seq_len, constants=constants)


def handler(question, config):
    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE
        default_request_version = "HTTP/1.0"              # so that an unreadable request gets a status too

        def handle(self):
            with suppress(ConnectionError):               # the browser went away
                super().handle()

        def parse_request(self):
            """Parse a request, and refuse it if it is not for this host, or comes from another page."""
            if not super().parse_request():
                return False
            port = self.server.server_port
            ours = {f"127.0.0.1:{port}", f"localhost:{port}"}
            hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
            pages = [origin.removeprefix("http://") for origin in origins]       # of the page that asks, if one does
            if len(hosts) == 1 and ours.issuperset(hosts + pages):
                return True
            self.reply(403, "only requests to 127.0.0.1 or localhost are answered, and only from pages served there")

        def do_GET(self):
            path = self.path.split("?")[0]
            if path == "/progress":
                return self.reply(200, f"{plan.progress['share']:.2f}")
            if path in TEXTS:
                return self.reply(200, TEXTS[path].read_text(encoding="utf-8"))
            if path != "/":
                return self.reply(404, "no such page; see /")
            self.reply(200, page(question, dict(config=config or ""), True), "text/html; charset=utf-8")

        def do_POST(self):
            try:
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or int(length) > LONGEST:
                    fail(f"a request must have at most {LONGEST:,} bytes and a Content-Length that says how many")
                state = json.loads(self.rfile.read(int(length)))
                of = asked(question, state)
                chosen = state.get("config") or ""
                if self.path != "/answer" or not isinstance(chosen, str):
                    fail("POST takes only /answer, and config must be a string")
                self.reply(200, json.dumps(answer(of, chosen)), "application/json")
            except Refused as refused:
                self.reply(400, " ".join(str(refused).split()))
            except (ValueError, RecursionError):
                self.reply(400, "the request is not JSON")
            except TimeoutError:
                self.reply(408, "the request is shorter than it says")

        def send_error(self, status, message=None, explain=None):
            """Answer in one line, even when the base class refuses a request."""
            self.reply(status, message or self.responses[status][0])

        def reply(self, status, text, kind="text/plain; charset=utf-8"):
            body = text.encode(errors="backslashreplace")
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": len(body), "Connection": "close",
                                "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass
    return Handler
