"""The small model and the short run with which every layout is compared with one process."""
import json

import numpy as np

# three and six ranks divide no ZeRO unit of this model evenly: 2,440, 11,600 and 2,480 parameters
MODEL = dict(model_type="llama", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512)
# up to eight ranks can split these sizes; the layouts of layouts.py have this shape
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 40, 8, 4, 6, 56, 64
SHAPE = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB)
# the grouped kernel requires sizes that are multiples of 8
EXPERTS = dict(model_type="mixtral", hidden_size=40, num_local_experts=8, num_experts_per_tok=2)
# {the last word of a shape's name: what a dense model changes in MODEL, and one with experts in EXPERTS; None: there is no such}
FAMILIES = {"llama": ({}, {}),
            "qk": (dict(model_type="qwen3"), dict(model_type="qwen3_moe", moe_intermediate_size=MODEL["intermediate_size"],
                                                  norm_topk_prob=True))}


def shape(name):
    """Return the config of a shape: dense-3 has three layers; top2-3 has a mixture of experts, two per token; dense-3-kv1 has one
    key-value head; dense-3-qk is a Qwen3, and top2-3-qk a Qwen3-MoE."""
    kind, layers, *more = name.split("-")
    dense, with_experts = FAMILIES[more.pop() if more and more[-1] in FAMILIES else "llama"]
    changes = SHAPE | dict(num_hidden_layers=int(layers))
    changes |= dense if kind == "dense" else EXPERTS | with_experts | dict(num_experts_per_tok=int(kind.removeprefix("top")))
    for option in more:
        key = {"kv": "num_key_value_heads", "heads": "num_attention_heads"}[option.rstrip("0123456789")]
        changes[key] = int(option.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return MODEL | changes


FLAGS = "--seq_len 16 --global_batch_size 24 --steps 4 --lr 1e-2 --lr_schedule cosine --warmup 2 --grad_clip 0.5"


def make(folder, tokens=16 * 200, **changes):
    """Write a small model's config and random tokens to the folder. Return the flags of a run on them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 61, tokens + 1).astype(np.uint16))
    return f"--model {folder} --dataset {folder}/tokens.npy {FLAGS}"
