"""Compare step 1 with the same training loop around transformers' LlamaForCausalLM: python dev/bench/bench_step01.py

Both do the same work, in one process and one thread, in float32 with SDPA. Their rounds alternate, and the number to
read is the median of the ratios of neighbouring rounds.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from steps import step_dir

SHAPE = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
             num_attention_heads=8, num_key_value_heads=4, head_dim=32, rms_norm_eps=1e-5, rope_theta=500000.0,
             max_position_embeddings=4096)
SEQ_LEN, MICRO_BATCH, ACCUMULATION, CLIP = 256, 2, 4, 1.0


def ours(step, folder, recompute):
    sys.path.insert(0, str(step_dir(step)))
    import config
    import optimizer
    import train
    args = config.parse_args(f"--model {folder} --seq_len {SEQ_LEN} --global_batch_size {MICRO_BATCH * ACCUMULATION} "
                             f"--micro_batch_size {MICRO_BATCH} --recompute {recompute} --save {folder}".split(), train.TECHNIQUES)
    shape = config.load_config(args)
    model = train.build_model(shape, args)
    train.save_model(model, shape, args)
    optimizer.add_main_grads(model.parameters())
    adamw = optimizer.Optimizer(model.parameters(), args)

    def step(rows):
        positions = torch.arange(SEQ_LEN)
        micro_batches = [(row[:, :-1], positions, row[:, 1:]) for row in rows.split(MICRO_BATCH)]
        loss = train.forward_backward(model, micro_batches, args)
        adamw.clip_grad_norm()
        adamw.step(1e-3)
        return loss.item()
    return step


def theirs(folder, recompute):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    groups = [dict(params=[p for p in model.parameters() if p.dim() == dim], weight_decay=decay)
              for dim, decay in ((2, 0.1), (1, 0.0))]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(rows):
        total = 0
        for row in rows.split(MICRO_BATCH):
            logits = model(input_ids=row[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()) / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        return total
    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", default="step01_single_gpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--write", action="store_true", help="put the ratio into docs/FAQ.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SHAPE, file)
        contestants = {"here": ours(args.step, folder, args.recompute), "transformers": theirs(folder, args.recompute)}
    generator = torch.Generator().manual_seed(0)
    seconds, losses = {name: [] for name in contestants}, {name: [] for name in contestants}
    for round in range(args.rounds + 1):
        rows = torch.randint(0, SHAPE["vocab_size"], (MICRO_BATCH * ACCUMULATION, SEQ_LEN + 1), generator=generator)
        for name in sorted(contestants, reverse=round % 2):                        # who goes first alternates
            start = time.perf_counter()
            losses[name].append(contestants[name](rows))
            seconds[name].append(time.perf_counter() - start)
    assert all(abs(a - b) < 1e-4 * b for a, b in zip(*losses.values())), f"not the same work: {losses}"
    tokens = MICRO_BATCH * ACCUMULATION * SEQ_LEN
    for name in contestants:
        print(f"{name:>14}: {tokens / statistics.median(seconds[name][1:]):8,.0f} tokens/s")
    ratios = [b / a for a, b in list(zip(seconds["here"], seconds["transformers"]))[1:]]                    # round 0 warms up
    print(f"{'ratio':>14}: {statistics.median(ratios):8.3f} (of {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds)")
    if args.write:
        import bench_parallel
        bench_parallel.write("step 1", [("here / transformers", ratios, 1)])


if __name__ == "__main__":
    main()
