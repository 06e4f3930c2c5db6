"""How long the planner takes: python tools/bench/bench_plan.py. The middle of some rounds, in CPU seconds; not a test."""
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "planner"))
import costs
import models
import plan
import serve
import speed
import trainers

CONSTANTS = trainers.constants_of(dict(time=speed.USUAL, slack=1.0))


def seconds(what, rounds):
    taken = []
    for _ in range(rounds):
        costs.stages_of.cache_clear()
        costs.dense_layer.cache_clear()
        start = time.process_time()
        what()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


for model, gpus in (("llama-8b", 64), ("llama-70b", 256), ("llama-8b", 1024), ("llama-405b", 1024), ("mixtral-8x7b", 256)):
    c, cluster = models.PRESETS[model], speed.Cluster(gpus)
    question = serve.Question(model, c, "h100", cluster, 4096, 1024, CONSTANTS)
    best = plan.Search(c, cluster, 4096, 1024, CONSTANTS).best(1)[0]
    search = seconds(lambda: plan.Search(c, cluster, 4096, 1024, CONSTANTS).best(), 3)
    evaluate = seconds(lambda: plan.evaluate(c, best.layout, cluster, CONSTANTS), 20)
    report = seconds(lambda: serve.report(question, best), 20)
    print(f"{model:>14} on {gpus:>5,}: search {search:.2f} s, one layout {1000 * evaluate:.2f} ms, "
          f"its whole report {1000 * report:.1f} ms")
