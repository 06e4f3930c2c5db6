"""The planner as a web page: python step08_5d/planner --html plan.html

One file that needs no network. What it shows is what `report` and `recommend` return, below; plan_page.html
only draws it. These two, and whatever they call of the planner and of the trainer's config.py, are translated
to JavaScript (javascript.py) when the page is made. So each formula is written once, in Python, and the page
cannot fall behind it.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import costs
import explain
import plan
from costs import BF16, FLOAT32, GIB, Layout
from javascript import translate
from speed import GPUS, NETWORKS, Cluster
from trainer import PRESETS, load_config, refuse
from trainer import check_context_parallel, check_experts, check_pipeline, check_tensor_parallel

HERE = Path(__file__).resolve().parent
OF_A_LAYOUT = ("zero", "tp", "cp", "pp", "ep", "micro_batch", "schedule", "recompute")


# ---------------------------------------------------------------------- what the page shows
def cluster_of(setup, s):
    return Cluster(s.gpus, setup.gpus[s.gpu], setup.networks[s.network], setup.gpus_per_node)


def layout_of(c, cluster, s):
    """The layout that the controls say; refused as the trainer would refuse it."""
    cut, node = s.tp * s.cp * s.pp, cluster.gpus_per_node
    if cluster.gpus % cut:
        refuse(f"{cluster.gpus} GPUs are not a multiple of tp({s.tp}) x cp({s.cp}) x pp({s.pp}) = {cut}")
    if cluster.gpus > node and cluster.gpus % node:
        refuse(f"{cluster.gpus} GPUs are not a multiple of {node}, those of a node")
    dp = cluster.gpus // cut
    accumulation = max(1, round(s.tokens / s.seq_len / dp / s.micro_batch))
    l = Layout(dp=dp, tp=s.tp, cp=s.cp, pp=s.pp, ep=s.ep, zero=s.zero,
               schedule=s.schedule if s.pp > 1 else "1f1b", recompute=s.recompute,
               micro_batch=s.micro_batch, accumulation=accumulation, seq_len=s.seq_len)
    args = SimpleNamespace(
        **l.__dict__, model=s.model, global_batch_size=dp * s.micro_batch * accumulation,
        micro_batch_size=s.micro_batch, stages_per_rank=None, sp="on", cp_mode="zigzag",
        device="cuda", dtype=s.dtype, balance=None, init_from=None, save=None)
    check_tensor_parallel(args, c)
    check_context_parallel(args, c)
    check_pipeline(args, c, accumulation)
    check_experts(args, c)
    return l


def report(setup, s):
    """Everything about one layout. Times are of bfloat16, to which the constants were fitted."""
    c, cluster = setup.models[s.model], cluster_of(setup, s)
    l, sequences = layout_of(c, cluster, s), max(1, s.tokens / s.seq_len)
    number = FLOAT32 if s.dtype == "float32" else BF16
    stages = costs.our_stages(c, l)
    kinds = [costs.our_memory(c, l, rank, stages[rank], number) for rank in range(l.pp)]
    slack = setup.constants["slack"]
    ranks = [{kind: slack * size / GIB for kind, size in one.items()} for one in kinds]
    held, room = max(sum(one.values()) for one in ranks), plan.limit(cluster)
    best = plan.evaluate(c, l, cluster, setup.constants)
    said = dict(
        layout=l, ranks=ranks, held=held, room=room, whole=cluster.gpu.memory, fits=held <= room,
        parameters=costs.model_parameters(c), batch=l.dp * l.micro_batch * l.accumulation,
        sequences=sequences, command=explain.command(s.model, l, cluster), seconds={}, text=[], flow=[])
    if number == FLOAT32:
        said["command"] += " --dtype float32"
        return said
    said["seconds"] = best.seconds
    said["step"] = sum(best.seconds.values())
    said["tokens_per_s"] = best.tokens_per_s
    said["mfu"] = best.tokens_per_s * costs.flops_per_token(c, l.seq_len) / cluster.gpu.flops
    said["text"] = list(explain.reasons(c, best, cluster, sequences, slack))
    said["flow"] = list(decisions(c, best, cluster, held, sequences, slack))
    return said


def recommend(setup, s):
    """What the planner prints as a table: the fastest layouts that fit, one of each mesh."""
    c, cluster, slack = setup.models[s.model], cluster_of(setup, s), setup.constants["slack"]
    candidates, looked_at = plan.search(c, cluster, s.seq_len, max(1, s.tokens / s.seq_len), setup.constants)
    best = plan.best_per_mesh(c, candidates, cluster, slack, 5)
    fewest = plan.fewest_gpus(c, cluster, s.seq_len, slack)
    return dict(fit=len(candidates), looked_at=looked_at, fewest=fewest, rows=[row(one) for one in best])


def row(one):
    held, step = sum(one.memory.values()), sum(one.seconds.values())
    return dict(layout=one.layout, held=held, step=step, tokens_per_s=one.tokens_per_s)


def decisions(c, best, cluster, held, sequences, slack):
    """The playbook's questions: (step, question, [(answer, whether this layout goes there)])."""
    l, gpus, room, node = best.layout, cluster.gpus, plan.limit(cluster), cluster.gpus_per_node
    alone = sum(plan.memory(c, Layout(seq_len=l.seq_len), slack).values())
    billions, met = costs.model_parameters(c) / 1e9, l.dp * l.micro_batch * l.accumulation / sequences
    step, causes = sum(best.seconds.values()), ("tp", "cp", "ep", "pp", "dp", "bubble", "launch")
    lost = {name: s / step for name, s in best.seconds.items() if name in causes}
    most, whole = max(lost.values()), max(l.tp, l.pp, l.cp, l.ep) == 1 and l.zero == 0
    yield 1, "Does one GPU hold it whole?", [("yes", alone <= room), ("no: cut it", alone > room)]
    yield 1, "How large is the model?", [
        ("under 10B: tp or ZeRO alone", billions < 10),
        ("10B to 100B: tp in a node, with pp or ZeRO", 10 <= billions < 100),
        ("above: tp, pp and ZeRO", billions >= 100)]
    yield 1, "What cuts it?", [
        ("nothing", whole), (f"ZeRO-{max(1, l.zero)}", l.zero > 0), ("tp", l.tp > 1), ("pp", l.pp > 1),
        ("cp: the sequence", l.cp > 1), ("ep: the experts", l.ep > 1)]
    yield 1, "GPUs to spare?", [
        ("rich: keep activations", l.recompute == "none"), ("poor: recompute them", l.recompute != "none")]
    yield 1, "Does it fit now?", [
        ("yes", held <= room), ("no: more GPUs or cuts, or a smaller micro-batch", held > room)]
    yield 2, "Is the sequence long?", [
        ("no: dp takes whole ones", l.cp == 1), ("yes: cp shares each", l.cp > 1)]
    yield 2, "Does one pass make the batch?", [
        ("yes", l.accumulation == 1), (f"no: accumulate {max(2, l.accumulation)}", l.accumulation > 1)]
    yield 2, "Is the batch met?", [
        ("yes, to a tenth", 0.9 <= met <= 1.1), ("too large: less dp, more tp, pp or cp", met > 1.1),
        ("too small", met < 0.9)]
    yield 3, "How many GPUs?", [
        ("one node: the least that fits", gpus <= node),
        ("to 127: tp in a node or ZeRO across", node < gpus < 128),
        ("128 to 1,023: dp with tp or pp", node < gpus and 128 <= gpus < 1024),
        ("1,024 and more: tp, pp and dp", node < gpus and gpus >= 1024)]
    named = [(name, share == most and most >= 0.1) for name, share in lost.items()]
    yield 3, "What takes most beside compute?", [("nothing takes a tenth", most < 0.1), *named]


# ---------------------------------------------------------------------- the page
def write(path, args, cluster, constants):
    """The page opens at the given configuration, or at the best one."""
    c, gpu, network = load_config(args), args.gpu, args.network
    setup = SimpleNamespace(
        models={**PRESETS, args.model: c}, gpus=dict(GPUS), networks=dict(NETWORKS),
        gpus_per_node=cluster.gpus_per_node, constants=constants)
    if GPUS[gpu] != cluster.gpu:
        gpu = f"{gpu}, yours"
    if NETWORKS.get(network) != cluster.network:
        network = "yours"
    setup.gpus[gpu], setup.networks[network] = cluster.gpu, cluster.network
    state = dict(
        model=args.model, gpu=gpu, network=network, gpus=cluster.gpus, seq_len=args.seq_len,
        tokens=max(1, round(args.global_batch_tokens)), dtype="bfloat16")
    l = first_layout(c, args, cluster, constants)
    state |= {name: getattr(l, name) for name in OF_A_LAYOUT}
    try:
        Path(path).write_text(page(setup, state), encoding="utf-8")
    except OSError as error:
        refuse(f"--html {path}: {error.strerror}")


def first_layout(c, args, cluster, constants):
    """--config's, or else the best; of none that fits, the one that needs least."""
    sequences = max(1, args.global_batch_tokens / args.seq_len)
    if args.config:
        return plan.parse_config(args.config, c, cluster, args.seq_len, sequences)
    candidates, _ = plan.search(c, cluster, args.seq_len, sequences, constants)
    best = plan.best_per_mesh(c, candidates, cluster, constants["slack"], 1)
    return best[0].layout if best else Layout(zero=3, recompute="full")


def page(setup, state):
    data = dict(
        models={name: vars(c) for name, c in setup.models.items()},
        gpus={name: gpu._asdict() for name, gpu in setup.gpus.items()},
        networks=setup.networks, gpus_per_node=setup.gpus_per_node, constants=setup.constants,
        schedules=plan.SCHEDULES, recompute=plan.RECOMPUTE)
    text = (HERE / "plan_page.html").read_text(encoding="utf-8")
    text = text.replace("/*PLANNER*/", translate("plan_page", "report", "recommend"))
    return text.replace("/*SETUP*/", literal(data)).replace("/*STATE*/", literal(state))


def literal(data):
    """As JavaScript, inside of HTML."""
    return json.dumps(data).replace("<", "\\u003c")
