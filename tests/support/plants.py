"""Planted mistakes through tools/prove: how many does it see, name, place?

    python tests/support/plants.py [NAME ...] [--json FILE]       # all, or those whose names contain NAME

A plant is a patch of exercises/mistakes, applied to a copy of step 8, or one of planted_torch.py. STEPS and planted_torch.TORCH say
for each which causes of tools/prove/causes.py would be the right name, and which place the right place. `judged` compares them with
what was said.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tools", "exercises", "tests/support")]
ADAPTERS = ROOT / "tools/prove/adapters"
sys.path.append(str(ADAPTERS))


class Plant(SimpleNamespace):
    """Name, layout (the number of ranks, flags), what both have, and what a right diagnosis says: causes, a pattern of places."""


def plant(layout, causes="", place="", both="", **options):
    world, _, flags = layout.partition(" ")
    return Plant(world=int(world), flags=flags, causes=set(filter(None, re.split(r", *", causes))), place=place, both=both,
                 options=options)


# why a mistake of steps 2 to 7 is not tried: it changes no number of a training step
NO_NUMBER = {
    "step03_weights_of_the_last_step": "in step 8 it is step06_weights_of_the_last_step",
    "step02_refused_alone": "shows only where a rank refuses its data",
    "step02_waited_for_at_once": "takes longer", "step03_reduced_one_by_one": "takes longer",
    "step06_messages_that_take_no_time": "takes longer", "step04_partial_sums_kept": "takes memory",
    "step06_deferred_gradients_kept": "takes memory", "step06_gradients_kept_apart": "takes memory",
    "step06_one_forward_too_many": "takes memory", "step04_head_not_cut": "takes memory",
    "step05_halves_of_one_token": "shows only with --seq_len 1",
    "step07_empty_experts_not_zeroed": "shows only with a kernel that zeroes none",
    "step07_nobody_comes": "hangs only where an expert has no rows of some ranks",
    "step07_experts_sliced_over_all": "ends with an infinite norm",
    "step07_softmax_over_all": "is another model, and so is one process"}
STEPS = {
    "step02_averaged_twice": plant("2 dp_mode=naive", "all gradients times a factor"),
    "step02_buckets_fill_once": plant("2 dp_mode=bucket", "not reduced, reduced in part, not zeroed"),
    "step02_clips_before_the_sum": plant("2 dp_mode=naive", "norm, norm of one rank, norm counts"),
    "step02_loss_not_summed": plant("2", "log of one rank, log times a factor"),
    "step02_not_waited_for": plant("2 dp_mode=bucket", "cannot", "not waited for", unforgiving=True),
    "step02_same_sequences_everywhere": plant("2", "other data"),
    "step02_sums_every_micro_batch": plant("2 dp_mode=overlap micro_batch_size=2", "gradients of some data"),
    "step03_norm_of_the_own_slice": plant("2 zero=1", "norm of one rank"),
    "step03_others_gradients_kept": plant("2 zero=1", "not zeroed"),
    "step03_pieces_do_not_decay": plant("2 zero=1", "decay"),
    "step03_prefetched_not_waited_for": plant("2 zero=1", "cannot, old weights, forward", "not waited for|wait", unforgiving=True),
    "step03_replicas_counted_twice": plant("4 zero=2 zero_shard=2", "norm counts"),
    "step03_replicas_not_summed": plant("4 zero=2 zero_shard=2", "not reduced"),
    "step03_weights_not_gathered": plant("2 zero=1", "not updated, other weights, old weights"),
    "step04_embedding_not_masked": plant("2 tp=2", "forward", "embed_tokens"),
    "step04_entering_not_reduced": plant("2 tp=2 sp=off", "backward, not reduced", r"layers\.3\."),
    "step04_loss_of_all_ranks": plant("2 tp=2", "log times a factor"),
    "step04_norms_counted_twice": plant("2 tp=2", "norm counts"),
    "step04_norms_not_summed": plant("2 tp=2", "not reduced"),
    "step04_own_largest_logit": plant("2 tp=2", "end of forward"),
    "step04_qk_norms_not_summed": plant("2 tp=2 sp=off", "not reduced", both="qk=1"),
    "step04_same_slice_everywhere": plant("2 tp=2", "copies"),
    "step04_shared_heads_not_summed": plant("2 tp=2", "not reduced", both="kv=1"),
    "step04_target_of_every_rank": plant("2 tp=2", "log of something else, end of forward"),
    "step05_added_to_while_sent": plant("2 cp=2", "cannot", "written to|not waited for", unforgiving=True),
    "step05_causal_off_the_diagonal": plant("2 cp=2", "", r"layers\.0\.self_attn"),
    "step05_gradients_a_hop_short": plant("2 cp=2", "", r"layers\.3\.self_attn"),
    "step05_gradients_over_dp_only": plant("2 cp=2", "not reduced"),
    "step05_loss_of_own_tokens": plant("2 cp=2", "loss times a factor"),
    "step05_merge_without_rescaling": plant("2 cp=2", "", r"layers\.0\.self_attn"),
    "step05_positions_restart": plant("2 cp=2", "", r"layers\.0\.self_attn"),
    "step05_ring_bypassed": plant("2 cp=2 cp_mode=ring", "attends alone"),
    "step05_targets_shifted_at_home": plant("2 cp=2 cp_mode=ring", "targets at home"),
    "step05_zigzag_seen_as_ring": plant("2 cp=2", "", r"layers\.0\.self_attn"),
    "step06_backward_of_the_newest": plant("2 pp=2 micro_batch_size=2", "", r"layers\.1\."),
    "step06_gradients_of_the_next": plant("2 pp=2 schedule=zerobubble micro_batch_size=1", "", r"self_attn|mlp"),
    "step06_messages_as_needed": plant("4 pp=4 schedule=dualpipe micro_batch_size=1", "", r"layers\.\d", both="layers=8"),
    "step06_only_the_last_counts": plant("2 pp=2 micro_batch_size=2", "gradients of some data"),
    "step06_only_the_log_divided": plant("2 pp=2 micro_batch_size=2", "all gradients times a factor"),
    "step06_past_the_hooks": plant("4 pp=2 schedule=zerobubble micro_batch_size=1", "not reduced"),
    "step06_stages_as_replicas": plant("2 pp=2", "norm counts"),
    "step06_weights_of_the_last_step": plant("4 pp=2 zero=3", "old weights"),
    "step07_aux_of_the_own_part": plant("2 cp=2 balance=aux", "", "gate", both="moe=2 balance=aux"),
    "step07_counts_of_the_own_tokens": plant("2", "", "mlp|gate", both="moe=2"),
    "step07_gradients_of_equal_parts": plant("2 pp=2 schedule=zerobubble micro_batch_size=1", "", "experts", both="moe=2"),
    "step07_gradients_over_all": plant("4 ep=2", "others' gradients", both="moe=2"),
    "step07_replicas_not_divided": plant("2 ep=2", "norm counts", both="moe=2"),
    "step07_results_not_put_back": plant("2 ep=2", "", r"layers\.0\.mlp", both="moe=2"),
    "step07_router_not_summed": plant("2 tp=2", "not reduced", both="moe=2"),
    "step07_rows_not_sorted": plant("2 ep=2", "", r"layers\.0\.mlp", both="moe=2"),
    "step07_same_experts_on_every_rank": plant("2 ep=2", "copies", both="moe=2"),
}

# patches whose lines step 8 has in another form: (file, lines, what takes their place)
IN_STEP_8 = {
    "step02_clips_before_the_sum": ("train.py", """\
            zero.finish_grad_reduction()
            all_reduce_partial_grads(zero.params)
            dist.all_reduce(loss)
            grad_norm = optimizer.clip_grad_norm()
""", """\
            dist.all_reduce(loss)
            grad_norm = optimizer.clip_grad_norm()
            zero.finish_grad_reduction()
            all_reduce_partial_grads(zero.params)
"""),
    "step04_loss_of_all_ranks": ("pipeline_parallel.py", "return self.loss / self.args.tp", "return self.loss"),
    "step05_gradients_over_dp_only": ("mesh.py", "expert_mesh or data_mesh(mesh)", 'expert_mesh or mesh["dp"]'),
    "step05_loss_of_own_tokens": ("pipeline_parallel.py", "targets) / (self.args.global_batch_size * self.args.seq_len)",
                                  "targets) / (self.args.global_batch_size * self.args.seq_len // self.args.cp)"),
    "step03_replicas_not_summed": ("zero.py", "dist.all_reduce(unit.grad_shard, group=unit.replicate_group)", "pass"),
}


def planted_copy(name, folder):
    """Copy step 8 to the folder and apply a patch to it that was made for any step."""
    from patched import MISTAKES, copy_step
    text = re.sub(r"step0\d_\w+(?=/)", "step08_5d", (MISTAKES / f"{name}.patch").read_text())
    copy = copy_step("step08_5d", folder)
    if name in IN_STEP_8:
        file, old, new = IN_STEP_8[name]
        before = (copy / file).read_text()
        assert old in before, f"{name}: its lines are not in step 8's {file}"
        (copy / file).write_text(before.replace(old, new))
        return copy
    alone = os.environ | dict(GIT_CEILING_DIRECTORIES=str(Path(folder).resolve().parent))
    done = subprocess.run(["git", "apply", "-C1", "-"], input=text, cwd=folder, env=alone, capture_output=True, text=True)
    if done.returncode:                                   # the lines around it are others in step 8
        command = ["patch", "-p1", "-F3", "--no-backup-if-mismatch"]
        done = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} does not apply to step 8: {done.stdout}"
    return copy


def prove(adapter, one, seconds=120):
    """Return what tools/prove says of a plant."""
    from prove.__main__ import Baseline, Trial, flags_of
    from prove.ranks import CannotRun
    args = SimpleNamespace(both=flags_of(one.both), dtype="float64", mask=False, unforgiving=False, seconds=seconds)
    args.__dict__.update(one.options)
    try:
        return Trial(Baseline(adapter, args), one.world, flags_of(one.flags)).prove()
    except CannotRun as error:
        return dict(status=2, cannot=str(error))


def judged(one, said):
    """Return "named", "placed", "seen" or "never"."""
    if said["status"] == 0:
        return ("named" if one.causes == {"copies"} else "seen") if said.get("copies") else "never"
    if said["status"] == 2:
        return "named" if "cannot" in one.causes and re.search(one.place, said["cannot"]) else "seen"
    text = f"{said['place']} {said['seen']}"
    in_place = not one.place or bool(re.search(one.place, text))
    if said["cause"] in one.causes and in_place:
        return "named"
    return "placed" if one.place and in_place and said["place"] else "seen"


def run(names):
    """Yield (name, verdict, what was said)."""
    from planted_torch import TORCH
    from prove.__main__ import load_adapter
    os.environ["OMP_NUM_THREADS"] = "1"
    adapters = {}

    def adapter(path):
        return adapters.setdefault(path, None) or adapters.update({path: load_adapter(path)}) or adapters[path]
    for name, one in [*STEPS.items(), *TORCH.items()]:
        if names and not any(part in name for part in names):
            continue
        if name in STEPS:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["STEP"] = str(planted_copy(name, folder))
                said = prove(adapter(ADAPTERS / "step08.py"), one)
        else:
            said = prove(adapter(ROOT / "tests/support/planted_torch.py"), one)
        yield name, judged(one, said), said


def table_of(found):
    """Return the rows of the table on the tool's page."""
    rows = []
    for label, begins in [(f"step {k}", f"step0{k}_") for k in range(2, 8)] + [("torch's own", "torch_")]:
        of = [one["verdict"] for name, one in sorted(found.items()) if name.startswith(begins)]
        counts = [of.count(verdict) for verdict in ("named", "placed", "seen", "never")]
        rows.append("| " + " | ".join(map(str, [label, len(of), *counts])) + " |")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json")
    args, found = parser.parse_args(), {}
    for name, verdict, said in run(args.names):
        found[name] = dict(verdict=verdict, said=said)
        text = said.get("seen") or said.get("cannot") or said.get("note") or ""
        print(f"{name:40} {verdict:7} {said.get('cause', '')}: {text[:230]}", flush=True)
    if not args.names:
        print(*table_of(found), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    import torch
    torch.set_num_threads(1)
    main()
