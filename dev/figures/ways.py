"""Draw the README's ways.png: six ways to divide one training run between two ranks.    python dev/figures/ways.py

Nothing in it is made up: each rank of each layout is simulated, with step 8, and asked which tokens, weights and states it has.
"""
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common import PICTURES, paths_of

paths_of(8)
import data
from shards import local_slices, global_shape
from plot import plt
from simulate.record import record

LAYERS, EXPERTS, SEQUENCES, TOKENS, RANKS = 4, 4, 4, 8, 2
DENSE = dict(model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
             num_attention_heads=4, num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=TOKENS,
             rope_theta=1e4, tie_word_embeddings=False)
MODELS = {1: DENSE, EXPERTS: {**DENSE, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2}}
#       what is divided, its name and step, its flags, what is sent, MLPs in a layer
WAYS = [("the batch", "data parallelism, step 2", "--dp 2", "gradients, once a step", 1),
        ("the optimizer states", "ZeRO, step 3", "--zero 1", "gradients and new weights, once a step", 1),
        ("the matrices", "tensor parallelism, step 4", "--tp 2", "activations, in every layer", 1),
        ("the sequence", "context parallelism, step 5", "--cp 2 --cp_mode ring", "keys and values; gradients", 1),
        ("the stack of layers", "pipeline parallelism, step 6", "--pp 2", "activations, between two stages", 1),
        ("the experts", "expert parallelism, step 7", "--ep 2", "tokens, to their experts and back; gradients", EXPERTS)]
COLORS = {(True, False): "#0072b2", (False, True): "#f0b040", (True, True): "#e4e4e4"}
FINE = 64                                                 # number of a layer's columns that are told apart


# ------------------------------------------------------------------------------------------------ what a rank has
def ask(model, flags, mlps, rank):
    """Return a rank's tokens [sequence, token], weights and optimizer states [layer, column], as arrays of booleans."""
    has = SimpleNamespace(tokens=np.zeros((SEQUENCES, TOKENS), bool), weights=np.zeros((LAYERS, FINE), bool),
                          states=np.zeros((LAYERS, FINE), bool))

    def note(seen, llama, optimizer, mesh):
        shape = SimpleNamespace(vocab_size=SEQUENCES * TOKENS + 1)
        args = SimpleNamespace(**{**vars(seen.args), "device": "cpu"})             # a simulated rank's tokens are meta tensors
        for inputs, _, _ in data.micro_batches(np.arange(shape.vocab_size), shape, mesh, args, step=0):
            has.tokens.flat[inputs.flatten()] = True
        for index, layer in llama.model.layers.items():
            q, mlp = layer.self_attn.q_proj.weight, (layer.mlp.experts.gate_proj if mlps > 1 else layer.mlp.gate_proj).weight
            own = np.concatenate([columns(q, FINE // 4).any(0), columns(mlp, 3 * FINE // 4).any(0) if mlps == 1
                                  else columns(mlp, 3 * FINE // 4)])
            has.weights[int(index)] = has.states[int(index)] = own
            if seen.args.zero:
                unit, at = q.unit, np.arange(FINE) / FINE
                assert unit is mlp.unit                   # a block is one unit, and a shard is a slice of its weights laid in a row
                first, last = (place / len(unit.flat_param) for place in (unit.shard_slice.start, unit.shard_slice.stop))
                has.states[int(index)] = (at >= first) & (at < last)
    flags = f"--device cpu --model {model} --seq_len {TOKENS} --global_batch_size {SEQUENCES} --micro_batch_size 1 {flags}"
    record(flags.split(), RANKS, rank, note)
    return has


def columns(param, width):
    """Return which outputs of the whole parameter a rank has, as `width` booleans; experts come one after another."""
    mine = np.zeros(global_shape(param), bool)
    mine[local_slices(param)] = True
    outputs = mine[..., 0]                                                         # [out] or [experts, out]
    per_matrix = width // (len(outputs) if outputs.ndim == 2 else 1)
    picked = outputs[..., np.arange(per_matrix) * outputs.shape[-1] // per_matrix]
    return picked.flatten() if outputs.ndim == 2 else picked[None]


# ------------------------------------------------------------------------------------------------ the picture
def fill(axis, ranks, x, y, width, height, line=0.0):
    """Draw a row of cells, coloured by who has them. Without lines, neighbours of one colour become one box."""
    have = list(zip(*ranks))
    start = 0
    for end in range(1, len(have) + 1):
        if line or end == len(have) or have[end] != have[start]:
            left, right = x + start * width / len(have), x + end * width / len(have)
            axis.add_patch(plt.Rectangle((left, y), right - left, height, facecolor=COLORS[have[start]],
                                         edgecolor="white", linewidth=line))
            start = end


def frame(axis, x, y, width, height, line=0.8):
    axis.add_patch(plt.Rectangle((x, y), width, height, facecolor="none", edgecolor="#333333", linewidth=line))


def panel(axis, ranks, what, name, flags, sent, mlps):
    for row in range(SEQUENCES):
        fill(axis, [rank.tokens[row] for rank in ranks], 0, 3.15 - row, 1.95, 0.62, line=0.8)
        frame(axis, 0, 3.15 - row, 1.95, 0.62)
    for layer in range(LAYERS):
        y = layer * 1.02 - 0.05
        fill(axis, [rank.weights[layer] for rank in ranks], 3.3, y + 0.4, 5.6, 0.5)
        fill(axis, [rank.states[layer] for rank in ranks], 3.3, y, 5.6, 0.4)
        frame(axis, 3.3, y + 0.4, 1.4, 0.5)
        for expert in range(mlps):
            frame(axis, 4.7 + 4.2 / mlps * expert, y + 0.4, 4.2 / mlps, 0.5)
        frame(axis, 3.3, y, 5.6, 0.4)
        for height, label in ((0.65, "weights"), (0.2, "AdamW")):
            axis.text(3.25, y + height, label, ha="right", va="center", fontsize=6.5, color="#333333")
    axis.annotate("", (9.12, 3.95), (9.12, -0.05), arrowprops=dict(arrowstyle="-|>", color="#888888", linewidth=1.2))
    axis.text(9.2, 1.95, "forward", rotation=90, va="center", fontsize=7.5, color="#555555")
    axis.text(0, 5.62, what, fontsize=11, weight="bold")
    axis.text(0, 5.05, f"{name}, {flags}", fontsize=8.6)
    axis.text(0, -0.72, f"sent: {sent}", fontsize=8.6)
    for x, label in ((0.97, "4 sequences"), (4.0, "attention"), (6.8, f"{mlps} experts" if mlps > 1 else "MLP")):
        axis.text(x, 4.22, label, ha="center", fontsize=8, color="#333333")
    axis.set(xlim=(-0.1, 9.6), ylim=(-0.95, 6.1))
    axis.axis("off")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for mlps, model in MODELS.items():
            Path(folder, str(mlps)).mkdir()
            Path(folder, str(mlps), "config.json").write_text(json.dumps(model))
        has = {what: [ask(f"{folder}/{mlps}", flags, mlps, rank) for rank in range(RANKS)] for what, _, flags, _, mlps in WAYS}
    figure, axes = plt.subplots(3, 2, figsize=(8, 8.3))
    for axis, way in zip(axes.flat, WAYS):
        panel(axis, has[way[0]], *way)
    boxes = [plt.Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="#333333", linewidth=0.8) for color in COLORS.values()]
    names = ["rank 0 has it", "rank 1 has it", "both have it"]
    figure.legend(boxes, names, loc="upper center", ncols=3, frameon=False, fontsize=10)
    explained = ("Left: the tokens of a batch. Right: the weights of four layers, the first at the bottom, "
                 "and the states that AdamW keeps of them.")
    figure.text(0.5, 0.014, explained, ha="center", fontsize=8.6)
    figure.subplots_adjust(left=0.02, right=0.99, top=0.955, bottom=0.045, wspace=0.06, hspace=0.1)
    figure.savefig(PICTURES / "ways.png", dpi=150)


if __name__ == "__main__":
    main()
