"""What the published runs of nanotron say by themselves: python dev/bench/nanotron_runs.py prints two tables of step 8's lab.

dev/figures/step08.py writes them into the lab. The runs are tests/data/ultrascale_benchmarks.csv; its README says whose they are.
"""
import csv
import statistics
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "tests/data/ultrascale_benchmarks.csv"
NODES = (1, 2, 8, 32)


def load(path=DATA):
    """Load the runs, without those of another batch or another shape."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["gbs_seqs"] == "256" and "variant" not in row["note"]]


def key(row):
    return row["model"], *(int(row[name]) for name in ("nodes", "dp", "tp", "pp", "zero", "mbs", "grad_acc"))


KINDS = {                                                 # kinds of layouts: (tp, pp) -> whether a layout is one
    "dp alone": lambda tp, pp: tp == pp == 1, "tp to 8": lambda tp, pp: 1 < tp <= 8 and pp == 1, "pp": lambda tp, pp: tp == 1 < pp,
    "tp to 8, pp": lambda tp, pp: 1 < tp <= 8 and pp > 1, "tp 16, 32": lambda tp, pp: tp > 8}


def best_runs(rows):
    """Yield a Markdown table: for each model and number of nodes, the best run, and the best of each kind of layout as a share of
    it."""
    cells = {}
    for row in rows:
        if row["status"] == "ok" and row["code"] != "legacy":
            cells.setdefault((row["model"], int(row["nodes"])), []).append(row)
    yield "| model | GPUs | the best run | MFU | GiB | " + " | ".join(KINDS) + " |"
    yield "|---|---|---|---|---|" + "---|" * len(KINDS)
    for (model, nodes), runs in sorted(cells.items()):
        best = max(runs, key=tokens_per_s)
        layout = ", ".join(f"{name} {best[name]}" for name in ("dp", "tp", "pp") if best[name] != "1")
        layout += f", ZeRO-{best['zero']}, {best['mbs']} x {best['grad_acc']}"
        shares = []
        for is_one in KINDS.values():
            of_kind = [tokens_per_s(row) for row in runs if is_one(int(row["tp"]), int(row["pp"]))]
            shares.append(f"{max(of_kind) / tokens_per_s(best):.0%}" if of_kind else "-")
        yield (f"| {model} | {8 * nodes} | {layout} | {float(best['mfu_pct']):.0f}% | {float(best['mem_gb']):.0f} | "
               + " | ".join(shares) + " |")


def tokens_per_s(row):
    return float(row["tok_s_gpu"])


def paired(rows, before, after):
    """Compare the runs that `before` selects with the same runs changed as `after` says. Return the number of such pairs, and the
    median ratios of their speed and memory."""
    rows = {key(row): row for row in rows if row["status"] == "ok" and row["code"] == "new"}
    pairs = [(row, rows[key({**row, **after(row)})]) for row in rows.values()
             if before(row) and key({**row, **after(row)}) in rows]
    return len(pairs), *(statistics.median(float(b[name]) / float(a[name]) for a, b in pairs) for name in ("tok_s_gpu", "mem_gb"))


def changes(rows):
    """Yield a table of what one change does, all else being equal."""
    number = lambda row, name: int(row[name])
    single = lambda row: number(row, "tp") == number(row, "pp") == 1
    cut = lambda row: 1 < number(row, "tp") <= 8
    twice = lambda row: dict(mbs=2 * number(row, "mbs"), grad_acc=number(row, "grad_acc") // 2)
    yield "| change | where | pairs | speed | memory |"
    yield "|---|---|---|---|---|"
    for what, where, before, after in [
            *(("ZeRO-0 to ZeRO-1", f"{8 * nodes} GPUs, dp above 1",
               lambda row, nodes=nodes: number(row, "nodes") == nodes and row["zero"] == "0" and number(row, "dp") > 1,
               lambda row: dict(zero=1)) for nodes in NODES),
            ("micro-batch 1 to 2", "dp alone", lambda row: single(row) and row["mbs"] == "1", twice),
            ("micro-batch 1 to 2", "tp 2 to 8, no pp", lambda row: cut(row) and row["pp"] == "1" and row["mbs"] == "1", twice),
            ("micro-batch 4 to 8", "tp 2 to 8, no pp", lambda row: cut(row) and row["pp"] == "1" and row["mbs"] == "4", twice),
            ("micro-batch 1 to 2", "pp, no tp", lambda row: row["tp"] == "1" and row["pp"] != "1" and row["mbs"] == "1", twice),
            ("micro-batch 1 to 2", "pp and tp 2 to 8", lambda row: cut(row) and row["pp"] != "1" and row["mbs"] == "1", twice)]:
        pairs, faster, larger = paired(rows, before, after)
        yield f"| {what} | {where} | {pairs} | x {faster:.2f} | x {larger:.2f} |"


if __name__ == "__main__":
    print("\n".join([*best_runs(load()), "", *changes(load())]))
