"""The planner's page in a real browser, and its server. The tests compare what they show with the planner's own numbers, and check
what they refuse, the keys, and the looks as far as these can be measured."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

import chromium
from fit_plan import ROOT

import models
import plan
import serve
import speed
import trainer
import trainers

needs_chromium = pytest.mark.skipif(
    not chromium.FOUND, reason=f"none of {', '.join(chromium.NAMES)} is installed: the page was not looked at")
CONSTANTS = trainers.constants_of(dict(time=speed.USUAL, slack=1.0))


def question(model="llama-8b", gpus=64, seq_len=4096, sequences=1024, gpu="h100"):
    return serve.Question(model, models.PRESETS[model], gpu, speed.Cluster(gpus, speed.GPUS[gpu]), seq_len, sequences, CONSTANTS)


# ------------------------------------------------------------------------------------------- without a browser
def run(*words):
    return subprocess.run([sys.executable, ROOT / "tools/plan", *words], capture_output=True, text=True, timeout=300)


def data_of(text):
    return json.loads(re.search(r"^const data = (.*);$", text, re.M)[1])


def test_the_page_is_one_file(tmp_path):
    path = tmp_path / "plan.html"
    done = run("--html", path, "--model", "llama-1b", "--config", "tp=2,mbs=4")
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    data = data_of(text)
    answers = data["answers"]                             # for 4 to 16 GPUs, and half to twice the tokens
    assert set(answers) == {f"{gpus},{tokens}" for gpus in (4, 8, 16) for tokens in (2_000_000, 4_000_000, 8_000_000)}
    asked = answers["8,4000000"]
    assert not data["served"] and asked["layout"]["tp"] == 2 and asked["layout"]["config"] == data["config"]
    assert {one["config"] for one in asked["best"]} <= set(asked["reports"])
    turned = {stop["config"] for stops in asked["layout"]["stops"].values() for stop in stops if not stop["why"]}
    assert turned <= set(asked["reports"]) and asked["reports"][turned.pop()]["seconds"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|XMLHttp|@import|<link(?! rel=\"icon\" href=\"data:)|src=", text)
    assert text.count("</script>") == 1


def test_the_page_opens_at_the_best_layout(tmp_path):
    done = run("--html", tmp_path / "plan.html", "--gpus", "8", "--model", "llama-8b", "--global_batch_tokens", "4M")
    assert done.returncode == 0
    data = data_of((tmp_path / "plan.html").read_text())
    best = plan.Search(models.PRESETS["llama-8b"], speed.Cluster(8), 4096, 1024, CONSTANTS).best()[0]
    answer = data["answers"]["8,4194304"]
    assert answer["layout"]["config"] == answer["best"][0]["config"] == serve.config_of(best.layout)


def test_a_closed_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, ROOT / "tools/plan", "--config", "tp=2"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert done.stderr == ""


def test_a_stop_is_possible_just_when_it_is_not_crossed_out():
    """Check that --config accepts what a knob's stop leads to, and that a crossed-out stop is refused for the reason given."""
    asked = question("mixtral-8x7b", 64)
    l = plan.parse_config("tp=2,pp=2,ep=4,zero=1", asked.c, asked.cluster, 4096, 1024)
    crossed = 0
    for knob, stops in serve.stops(asked, l).items():
        for stop in stops:
            changed = serve.turned_to(asked, l, knob, stop["value"], 1024)
            if stop["why"]:
                crossed += 1
                assert isinstance(changed, str) or plan.impossible(asked.c, changed) == stop["why"]
            else:
                assert plan.parse_config(serve.config_of(changed), asked.c, asked.cluster, 4096, 1024) == changed
    assert crossed > 8


def test_the_timeline_is_the_schedules_own():
    asked = question("llama-8b", 16)
    for schedule in plan.SCHEDULES:
        layout = plan.parse_config(f"pp=4,schedule={schedule},mbs=1,acc=12", asked.c, asked.cluster, 4096, 1024)
        one = plan.evaluate(asked.c, layout, asked.cluster, CONSTANTS)
        drawn = serve.timeline(asked, one)
        seen = {(rank, micro_batch) for rank, kind, _, micro_batch, *_ in drawn["events"] if kind == "F"}
        assert seen == {(rank, i) for rank in range(4) for i in range(12)} and drawn["shown"] == 12


def reported(asked, config):
    return serve.report(asked, plan.evaluate(asked.c, plan.parse_config(config, asked.c, asked.cluster, asked.seq_len, 1024),
                                             asked.cluster, asked.constants))


def test_knobs_of_the_schedule():
    """Check that without a pipeline there is one schedule, and that an interleaved one lets you choose the stages of a rank."""
    alone, interleaved = (reported(question(), config)["stops"] for config in ("tp=2,zero=1", "pp=4,schedule=interleaved,v=4"))
    assert {stop["value"] for stop in alone["schedule"] if stop["why"] == "needs pp"} == {*plan.SCHEDULES} - {"1f1b"}
    assert [stop["value"] for stop in interleaved["virtual"]] == [2, 4, 8] and "virtual" not in alone


def test_of_many_ranks_some_are_drawn():
    drawn = reported(question("llama-405b", 1024), "pp=32,tp=8,zero=1")["timeline"]
    assert drawn["ranks"] == 32 and drawn["every"] == 2 and {event[0] for event in drawn["events"]} == {*range(0, 32, 2)}


def test_commands():
    """Check the commands for several nodes without Slurm, and those for a pasted config.json, whose folder nobody knows."""
    several, one = (reported(question(gpus=gpus), "tp=2,zero=1") for gpus in (16, 8))
    assert several["by_hand"].startswith("torchrun --nnodes 2 --nproc_per_node 8 ") and one["by_hand"] is None
    assert several["by_hand"].endswith(several["script"].split("step08_5d/train.py ")[1].strip())
    pasted = reported(question()._replace(model="pasted"), "tp=2,zero=1")
    for name in ("command", "script", "by_hand", "dry_run"):
        assert "--model DIR " in pasted[name] and "pasted" not in pasted[name]


# ------------------------------------------------------------------------------------------- the server
@pytest.fixture(scope="module")
def server():
    command = [sys.executable, ROOT / "tools/plan", "--serve", "--port", "0", "--gpus", "64", "--global_batch_tokens", "4M"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])
    yield port, process
    process.kill()


def send(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server[0], timeout=300)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_the_server_answers_what_the_command_line_says(server):
    status, text = send(server, "POST", "/answer", json.dumps(dict(config="tp=2,zero=1,mbs=2")))
    layout = json.loads(text)["layout"]
    said = json.loads(run("--gpus", "64", "--global_batch_tokens", "4M", "--config", "tp=2,zero=1,mbs=2", "--json").stdout)
    assert status == 200 and layout["command"] == said["command"]
    assert layout["step"] == pytest.approx(said["step_s"]) and layout["held"] == pytest.approx(said["memory_gib"], abs=0.01)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
def test_other_hosts_are_refused(server, host):
    for method, body in (("GET", None), ("POST", "{}")):
        status, text = send(server, method, "/", body, Host=host.format(port=server[0]))
        assert status == 403 and text.count("\n") == 0


@pytest.mark.parametrize("start, more, status", [
    ("PUT / HTTP/1.1", "Host: evil.example", 403), ("PUT / HTTP/1.1", "", 403), ("PUT / HTTP/1.1", "Host: {us}", 501),
    ("OPTIONS / HTTP/1.1", "Host: {us}", 501), ("nonsense", "", 400), ("GET / HTTP/9.9", "Host: {us}", 505),
    ("GET /?" + 70_000 * "x" + " HTTP/1.1", "Host: {us}", 414), ("GET / HTTP/1.1", "Host: {us}\r\nX: " + 70_000 * "x", 431),
    ("GET / HTTP/1.1", "Host: {us}\r\nHost: evil.example", 403), ("GET / HTTP/1.1", "Host: {us}\r\nOrigin: null", 403),
    ("POST /answer HTTP/1.1", "Host: {us}\r\nContent-Length: 2\r\nOrigin: http://evil.example", 403),
    ("POST /answer HTTP/1.1", "Host: {us}\r\nContent-Length: 2\r\nOrigin: http://{us}", 200)])
def test_whatever_comes_gets_a_status_and_one_line(server, start, more, status):
    with socket.create_connection(("127.0.0.1", server[0]), timeout=300) as connection:
        connection.sendall(f"{start}\r\n{more.format(us=f'127.0.0.1:{server[0]}')}\r\n\r\n{{}}".encode())
        head, body = connection.makefile().read().split("\n\n")
    assert head.split()[1] == str(status) and body and "\n" not in body


@contextmanager
def serving(handler):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        thread = threading.Thread(target=one.serve_forever, args=[0.05])
        thread.start()
        yield one.server_port
        one.shutdown()
        thread.join()


def test_nobody_is_waited_for():
    class Impatient(serve.handler(question(), "")):
        timeout = 0.2
    assert serve.handler(question(), "").timeout == serve.PATIENCE
    with serving(Impatient) as port:
        for start, said in (("GET /\r\n", ""), ("POST /answer HTTP/1.1\r\nHost: {us}\r\nContent-Length: 9\r\n\r\n{{}}", "shorter")):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(start.format(us=f"127.0.0.1:{port}").encode())
                assert said in connection.makefile().read()


def test_nobody_else_can_reach_it(server):
    """Check that it listens on the loopback address alone."""
    with socket.socket() as other:
        other.settimeout(5)
        with pytest.raises(OSError):
            other.connect(("127.0.0.2", server[0]))


@pytest.mark.parametrize("body, message", [
    ("x", "not JSON"), ("[]", "a JSON object"), ('{"gpus": "a"}', "gpus must be"), ('{"gpus": 1e9}', "gpus must be"),
    ('{"gpus": true}', "gpus must be"), ('{"gpus": 12}', "not a multiple of 8"), ('{"model": "x"}', "model must be"),
    ('{"model": ["x"]}', "model must be"), ('{"config": 3}', "config must be a string"), ('{"config": "tp=3"}', "!= gpus(64)"),
    ('{"seq_len": 0}', "seq_len must be"), ('{"model": "pasted"}', "not JSON"),
    ('{"model": "pasted", "pasted": "{}"}', "could not read this config.json"), ('{"tokens": -1}', "tokens must be"),
    ("[" * 50_000, "not JSON"), ("x" * 70_000, "at most"), ('{"config": "\\ud800=1"}', "is not NAME=VALUE with a known name")])
def test_bad_requests_get_one_line(server, body, message):
    status, text = send(server, "POST", "/answer", body)
    assert status == 400 and message in text and "\n" not in text
    assert send(server, "GET", "/")[0] == 200


def test_a_gpu_without_products_in_8_bits_cannot_be_chosen_where_they_are_asked_for():
    in_8_bits = question()._replace(constants=trainers.constants_of(CONSTANTS["base"], float8=True))
    for name, gpu in speed.GPUS.items():
        if gpu.float8:
            assert serve.asked(in_8_bits, dict(gpu=name)).constants["time"]["product"] < 1
            continue
        with pytest.raises(trainer.Refused, match=f"--gpu {name}: cannot multiply in 8 bits"):
            serve.asked(in_8_bits, dict(gpu=name))


def test_a_browser_that_goes_away_does_not_end_it(server):
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server[0])) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server[0]}\r\n\r\n".encode())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")        # closed at once, without a word
    assert send(server, "GET", "/")[0] == 200 and server[1].poll() is None


def test_a_pasted_config(server):
    shape = dict(model_type="qwen2", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                 num_key_value_heads=8, head_dim=128, vocab_size=151936)
    status, text = send(server, "POST", "/answer", json.dumps(dict(model="pasted", pasted=json.dumps(shape))))
    found = json.loads(text)
    assert status == 200 and "8.19B parameters" in found["heading"][0]
    assert any("planned as a Llama" in line for line in found["heading"])


def test_ctrl_c_ends_it():
    command = [sys.executable, ROOT / "tools/plan", "--serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0 and error == ""


def test_a_port_that_is_taken(server):
    said = run("--serve", "--port", str(server[0]))
    assert said.returncode == 2 and said.stderr.startswith("error: --port ") and said.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    serve.write(question(), "", path)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.stop()


@pytest.fixture
def opened(browser, server):
    browser.screen(1400, 900)
    browser.events.clear()
    show(browser, server)
    yield browser
    assert browser.complaints(f"http://127.0.0.1:{server[0]}/") == []


def show(browser, server, state=""):
    browser.visit(f"http://127.0.0.1:{server[0]}/#{state}")
    settle(browser)


def settle(browser):
    browser.wait("document.readyState === 'complete' && !document.getElementById('cards').classList.contains('dim') "
                 "|| !document.getElementById('refused').hidden")


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def shown(browser, selector):
    """Return {name: text of the value} for a list on the page."""
    pair = "[one.getAttribute('data-name'), (one.querySelector('b') ?? one).firstChild.textContent]"
    return dict(browser.run(f"Array.from(document.querySelectorAll({json.dumps(selector)}), one => {pair})"))


def titles(browser, selector):
    return browser.run(f"Array.from(document.querySelectorAll({json.dumps(selector)}), one => one.title)")


def visible(browser, *selectors):
    return [one for one in selectors if browser.run(f"document.querySelector({json.dumps(one)})?.checkVisibility()")]


@needs_chromium
@pytest.mark.parametrize("config", [
    "", "tp=2,zero=1,mbs=2", "tp=4,pp=4,zero=1,schedule=interleaved,v=2", "cp=2,zero=3,recompute=full",
    "tp=8,pp=8,schedule=zerobubble"])
def test_what_is_shown_are_the_planners_own_numbers(opened, server, config):
    opened.run(f"change({{config: {json.dumps(config)}}})")
    opened.wait("asked > 0")
    show(opened, server, f"config={config}")
    asked = question()
    found = serve.answer(asked, config)
    layout = found["layout"]
    assert text(opened, "#name") == layout["name"]
    assert f"{layout['held']:.1f} GiB of {layout['limit_gib']:.1f}" in text(opened, "#verdict")
    worst = max(layout["ranks"], key=lambda one: sum(one.values()))
    memory = {kind: f"{size:.1f} GiB" for kind, size in worst.items() if size > 0.0005 * sum(worst.values())}
    assert shown(opened, "#memory .key li") == memory
    seconds = {name: f"{s:.3f} s" for name, s in layout["seconds"].items() if s > 0.0005 * layout["step"]}
    assert shown(opened, "#time .key li") == seconds
    assert "MFU " + "; ".join(f"{mfu:.1%} ({name})" for name, mfu in layout["mfu"].items()) in text(opened, "#time")
    assert all(re.fullmatch(r"[\w ]+ \d+\.\d GiB", title) for title in titles(opened, "#memory .row i"))
    assert text(opened, "#knobs p").startswith(f"dp follows: {layout['dp']};")
    drawn, step, *left = map(float, re.findall(r"(\d+\.\d\d) s", text(opened, "#timeline p")))
    assert f"{step:.2f}" == f"{layout['step']:.2f}" and drawn + sum(left) == pytest.approx(step, abs=0.021)
    assert shown(opened, "#numbers dd")["tokens/s/GPU"] == f"{layout['tokens_per_s']:,.0f}"
    assert text(opened, "#commands pre") == layout["command"]
    assert len(opened.run("Array.from(document.querySelectorAll('#best tbody tr'), one => 1)")) == len(found["best"])
    assert len(opened.run("Array.from(document.querySelectorAll('#turns tbody tr'), one => 1)")) == len(layout["turns"])
    widths = opened.run("Array.from(document.querySelectorAll('#memory .row'), "
                        "row => Array.from(row.children, one => parseFloat(one.style.width)).reduce((a, b) => a + b))")
    held = [sum(one.values()) for one in layout["ranks"]]
    assert widths == pytest.approx([100 * one / (1.03 * max(80, *held)) for one in held], rel=1e-3)


@needs_chromium
@pytest.mark.parametrize("width, height", [(1400, 900), (390, 844)])
def test_the_answer_is_above_the_fold(opened, server, width, height):
    opened.screen(width, height)
    show(opened, server)
    assert opened.run("document.getElementById('actions').getBoundingClientRect().bottom") < height


@needs_chromium
def test_what_is_not_possible_says_why_and_the_last_answer_stays(opened, server):
    before = text(opened, "#name")
    opened.run("change({config: 'tp=3'})")
    opened.wait("!document.getElementById('refused').hidden")
    assert "!= gpus(64)" in text(opened, "#refused") and text(opened, "#name") == before
    assert opened.run("getComputedStyle(document.getElementById('cards')).opacity") == "0.4"
    show(opened, server, "config=tp%3D2,pp%3D2,zero%3D1")
    opened.run("document.getElementById('ep_2').click()")
    assert "the model has none" in text(opened, "#hint") and opened.run("document.getElementById('ep_1').checked")
    assert opened.run("document.querySelector('label:has(#ep_2)').title.includes('the model has none')")


OF_A_LAYOUT = ("#name", "#actions", "#knobs", "#best", "#memory", "#timeline", "#turns", "#mesh", "#commands")


@needs_chromium
def test_when_nothing_fits_no_layout_is_shown(opened, server):
    assert visible(opened, *OF_A_LAYOUT) == [*OF_A_LAYOUT]
    opened.run("change({gpus: 1})")
    opened.wait("!document.getElementById('refused').hidden")
    assert "No layout fits" in text(opened, "#refused") and visible(opened, *OF_A_LAYOUT) == []
    opened.run("change({gpus: 64})")
    opened.wait("document.getElementById('refused').hidden")
    assert visible(opened, *OF_A_LAYOUT) == [*OF_A_LAYOUT]
    show(opened, server, "gpus=1")
    assert visible(opened, *OF_A_LAYOUT) == []


@needs_chromium
def test_a_page_to_keep_where_nothing_fits(browser, tmp_path):
    serve.write(question(gpus=1), "", tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html")
    settle(browser)
    assert visible(browser, "#refused", *OF_A_LAYOUT) == ["#refused"]


@needs_chromium
def test_what_is_drawn_says_what_is_so(opened, server):
    """Check schedules without a pipeline, the stages of a rank, ranks that are not drawn, and a ring that crosses nodes."""
    show(opened, server, "config=tp%3D2,zero%3D1")
    opened.run("document.getElementById('schedule_zerobubble').click()")
    assert text(opened, "#hint") == "schedule zerobubble: needs pp"
    show(opened, server, "config=pp%3D4,zero%3D1,schedule%3Dinterleaved,v%3D2")
    opened.run("document.getElementById('virtual_4').click()")
    opened.wait("document.getElementById('name').textContent.includes('interleaved 4')")
    assert "v=4" in opened.run("state.config")
    show(opened, server, "config=pp%3D32,zero%3D1")
    assert ", for one pipeline rank in 2." in text(opened, "#timeline p")
    show(opened, server, "gpus=24&seq_len=6144&config=cp%3D3,zero%3D1")
    assert "cp crosses nodes" in text(opened, "#mesh p")


@needs_chromium
def test_the_best_table_fits_a_wide_screen(opened, server):
    for state in ("", "model=mixtral-8x7b&gpus=512"):
        show(opened, server, state)
        assert opened.run("document.getElementById('best').scrollWidth <= document.getElementById('best').clientWidth"), state


@needs_chromium
def test_the_best_can_be_taken_in_place_of_the_command_lines(browser):
    with serving(serve.handler(question(), "tp=8,zero=1")) as port:
        show(browser, [port])
        assert "tp 8" in text(browser, "#name")
        browser.run("change({config: ''})")
        show(browser, [port], browser.run("location.hash.slice(1)"))
        assert text(browser, "#verdict").startswith("The planner's answer.")


@needs_chromium
def test_the_address_holds_the_state(opened, server):
    opened.run("change({config: 'tp=2,zero=1', model: 'llama-8b'})")
    settle(opened)
    address = opened.run("location.hash")
    before = opened.run("new Promise(done => setTimeout(() => done(document.getElementById('name').textContent), 3000))")
    show(opened, server, address[1:])
    assert text(opened, "#name") == before and "tp 2" in before


@needs_chromium
def test_a_pinned_layout_is_compared(opened, server):
    show(opened, server, "config=tp%3D2,zero%3D1,mbs%3D2&pin=tp%3D8,zero%3D1,mbs%3D2")
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(64)
    found = [plan.evaluate(c, plan.parse_config(config, c, cluster, 4096, 1024), cluster, CONSTANTS)
             for config in ("tp=8,zero=1,mbs=2", "tp=2,zero=1,mbs=2")]
    row = opened.run("Array.from(document.querySelector('#compared tbody tr').children, one => one.textContent)")
    assert row[:3] == ["tokens/s/GPU", *(f"{one.tokens_per_s:,.0f}" for one in found)]


@needs_chromium
def test_a_pin_follows_the_question(opened, server):
    show(opened, server, "config=tp%3D8,zero%3D1,mbs%3D2")
    opened.run("Array.from(document.querySelectorAll('#actions button')).at(-1).click()")
    for changed, batch in (("gpus: 128", 1024), ("tokens: 2 ** 24", 4096)):
        opened.run(f"change({{{changed}}})")
        settle(opened)
        row = opened.run("Array.from(document.querySelectorAll('#compared tbody tr')[1].children, one => one.textContent)")
        assert row == ["batch, sequences", f"{batch:,}", f"{batch:,}", "+0"]
        assert "Pinned: dp 16, tp 8" in text(opened, "#compared p")
        assert visible(opened, "#refused", "#compared") == ["#compared"]


@needs_chromium
def test_a_pin_that_cannot_be_says_so_beside_the_answer(opened, server):
    show(opened, server, "pin=tp%3D3")
    assert "The pinned layout is impossible here: --config: dp(21)" in text(opened, "#compared p")
    assert visible(opened, "#refused", "#name", "#compared") == ["#name", "#compared"]
    opened.run("document.querySelector('#compared button').click()")
    opened.wait("document.getElementById('compared').hidden")
    assert opened.run("state.pin") == ""


@needs_chromium
def test_by_keyboard(opened, server):
    show(opened, server, "config=tp%3D2,zero%3D1")
    opened.run("document.getElementById('tp_2').focus()")
    opened.press("ArrowRight")
    opened.wait("state.config.includes('tp=4')")
    settle(opened)
    assert opened.run("document.activeElement.id") == "tp_4"
    opened.run("document.getElementById('gpus').focus()")
    opened.press("ArrowRight")
    opened.wait("state.gpus === 128")
    reached = []
    for _ in range(40):
        opened.press("Tab")
        reached.append(opened.run("document.activeElement.name || document.activeElement.id"))
    assert {"seq_len", "tokens", "tp", "cp", "pp", "zero", "micro_batch", "recompute"} <= set(reached)


@needs_chromium
def test_everything_has_a_name(opened):
    assert opened.run("Array.from(document.querySelectorAll('input, select'))"
                      ".every(one => one.labels.length === 1 && one.labels[0].textContent)")
    assert opened.run("Array.from(document.querySelectorAll('[role=img], [role=region], button, form, textarea'))"
                      ".every(one => one.getAttribute('aria-label'))")


@needs_chromium
@pytest.mark.slow
def test_the_page_without_a_server(browser, page):
    browser.screen(1400, 900)
    browser.events.clear()
    browser.open(page)
    settle(browser)
    assert text(browser, "#verdict").startswith("The planner's answer. Fits")
    second = browser.run("data.answers['64,4194304'].best[1].name")
    browser.run("document.querySelectorAll('#best tbody button')[1].click()")
    browser.wait(f"document.getElementById('name').textContent === {json.dumps(second)}")
    browser.run("change({config: ''})")
    settle(browser)
    browser.run("document.getElementById('zero_2').click()")                       # the best has ZeRO-3
    browser.wait("document.getElementById('name').textContent.includes('ZeRO-2')")
    assert browser.run("beforehand[state.config].zero") == 2
    assert "was not computed beforehand" in " ".join(titles(browser, "#knobs label.no"))
    browser.run("document.getElementById('gpus').stepUp(); document.getElementById('gpus').dispatchEvent(new Event('input'))")
    browser.wait("document.getElementById('title').textContent.includes('128 x h100')")
    settle(browser)
    at_128 = browser.run("data.answers['128,4194304'].layout.name")
    assert text(browser, "#name") == at_128 and not browser.run("document.getElementById('seq_len').max > 0")
    assert browser.complaints() == []


@needs_chromium
def test_words_are_explained_on_click(opened, server):
    """Check that each explanation has a link to a README, and that the server has it."""
    assert visible(opened, "#about") == []
    for name in ("tp", "zero", "schedule"):
        opened.run(f"document.querySelector('fieldset:has([name={name}]) .word').click()")
        assert visible(opened, "#about") == ["#about"] and text(opened, "#about p") == opened.run(f"WORDS.{name}[0]")
    link = opened.run("document.querySelector('#about a').pathname")
    status, page = send(server, "GET", link)
    assert status == 200 and page == (ROOT / link[1:]).read_text() and link == "/step06_pp/README.md"
    assert all((ROOT / path).exists() for path in opened.run("Object.values(MORE)"))
    unknown = opened.run("data.columns.concat(Object.keys(data.kinds), Object.keys(shown.ranks[0])).filter(one => !WORDS[one])")
    assert unknown == []


@needs_chromium
def test_a_slow_question_shows_how_far_it_is(browser, monkeypatch):
    seen, answer = threading.Event(), serve.answer
    monkeypatch.setattr(serve, "answer", lambda *asked: seen.wait(60) and answer(*asked))
    monkeypatch.setitem(plan.progress, "share", 0.4)
    with serving(serve.handler(question(gpus=8), "")) as port:
        browser.visit(f"http://127.0.0.1:{port}/")
        browser.wait("document.getElementById('progress').checkVisibility()")
        assert text(browser, "#progress span") == "Looking at all layouts: 40%"
        seen.set()
        browser.wait("!document.getElementById('progress').checkVisibility()")
        settle(browser)
        assert text(browser, "#verdict").startswith("The planner's answer.")


def test_progress_grows_to_the_end(monkeypatch):
    shares = []
    monkeypatch.setattr(plan, "progress", type("Noted", (dict,), {"__setitem__": lambda self, name, share: shares.append(share)})())
    plan.Search(models.PRESETS["llama-1b"], speed.Cluster(8), 4096, 64, CONSTANTS)
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] < 1


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@pytest.mark.parametrize("state", [
    "", "model=mixtral-8x7b&config=ep%3D8,tp%3D1,zero%3D1,recompute%3Dfull", "gpus=1024&config=pp%3D32,tp%3D4",
    "config=tp%3D2&pin=tp%3D4"])
def test_nothing_is_wider_than_the_screen(opened, server, width, state):
    opened.screen(width, 844)
    show(opened, server, state)
    assert opened.run("document.documentElement.scrollWidth") <= width
    inside = ("Array.from(document.querySelectorAll('.card')).filter(one => one.scrollWidth > one.clientWidth)"
              ".map(one => one.id + one.textContent.slice(0, 20))")
    assert opened.run(inside) == []


def luminance(colour):
    parts = [int(colour.strip().lstrip("#")[i:i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))


@needs_chromium
def test_light_and_dark_can_be_read(opened):
    """Check the contrast as WCAG counts it: 4.5 for text. Bars may have less, because their numbers stand next to them."""
    pages = []
    for dark in (False, True):
        opened.screen(1280, 900, dark)
        def contrast(*names):
            found = [opened.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')") for name in names]
            a, b = sorted(map(luminance, found), reverse=True)
            return (a + 0.05) / (b + 0.05)
        for pair in ("ink card", "ink page", "soft card", "soft page", "on-accent accent", "accent card", "good card", "bad card",
                     "ink track"):
            assert contrast(*pair.split()) >= 4.5, (dark, pair)
        for name in "blue sky navy orange purple green red grey teal brown pink olive sand".split():
            assert contrast(name, "card") >= (2.9 if dark else 2.2), (dark, name)
        pages.append(opened.run("getComputedStyle(document.body).backgroundColor"))
    assert pages[0] != pages[1]
