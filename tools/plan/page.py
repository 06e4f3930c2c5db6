"""Write the layout explorer as one HTML file, opened at a question (--html FILE). The page computes with the planner's own
functions, translated to JavaScript (to_js.py).
"""
import ast
import json
import os
import re
from pathlib import Path

import costs
import explain
import models
import plan
import to_js
import trainer

HERE = Path(__file__).resolve().parent
# in the order of their imports; simulate/gpus.py and trainer come before them
MODULES = ("costs", "speed", "trust", "trainers", "models", "plan", "explain")


def formulas(used):
    """Return the planner as JavaScript: what the text of a page uses of it, and what that needs."""
    own = [node for node in to_js.parse(HERE / "trainer.py").body if getattr(node, "name", "") in ("Refused", "fail")]
    checks = ", ".join(f"check_{name}" for name in trainer.TECHNIQUES)
    first, last = ast.parse("import math\nimport trainer as schedules").body, ast.parse(f"CHECKS = [{checks}]").body
    whole = ast.Module([*first, *own, *(node for part in trainer.PARTS.values() for node in part.body), *last], [])
    trees = dict(trainer=whole, gpus=to_js.parse(HERE.parent / "simulate/gpus.py"))
    trees |= {name: to_js.parse(HERE / f"{name}.py") for name in MODULES}
    return to_js.script(trees, sorted(set(re.findall(rf"(?<!\w)(?<!\w\.)(?:{'|'.join(trees)})\.\w+", used))))


def state_of(question, l, batch):
    """Return a question and a layout as the page's address has them."""
    knobs = {name: getattr(l, plan.NAMES.get(name, name)) for name in explain.KNOBS}
    return dict(model=question.model, gpu=question.gpu, gpus=question.cluster.gpus, seq=question.seq_len, batch=batch) | knobs


def write(question, settings, config, path):
    """Write the page, opened at the layout `config` or at the best one. Links lead to the READMEs, from wherever the page lies."""
    best, words = [], []
    if config:
        shown = question.evaluate(config).layout
        batch = shown.batch
    else:
        batch = question.batch
        search = question.search()
        best = search.best()
        words = list(explain.search_in_words(question, search, best))
        shown = best[0].layout if best else costs.Layout()
    known = {**models.PRESETS, question.model: question.c}
    asked = dict(
        state=state_of(question, shown, batch), best=[state_of(question, one.layout, batch) for one in best], words=words,
        settings=settings, training=question.training, models={name: one._asdict() for name, one in known.items()},
        gpu=question.gpu, hardware=question.cluster.gpu._asdict(),
        network=question.cluster.network, gpus_per_node=question.cluster.gpus_per_node,
        root=os.path.relpath(HERE.parents[1], Path(path).resolve().parent) + "/")
    text = (HERE / "page.html").read_text(encoding="utf-8")
    text = text.replace("/*FORMULAS*/", formulas(text)).replace("/*ASKED*/null", json.dumps(asked).replace("<", "\\u003c"))
    Path(path).write_text(text, encoding="utf-8")
