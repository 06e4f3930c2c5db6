"""The small model and the short run on which every layout is compared with one process."""
import json

import numpy as np

# sizes that two, three or six ranks do not divide
MODEL = dict(model_type="llama", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512)
FLAGS = "--seq_len 16 --global_batch_size 24 --steps 4 --lr 1e-2 --lr_schedule cosine --warmup 2 --grad_clip 0.5"


def make(folder, tokens=16 * 200, **changes):
    """Flags of a run on a small model and random tokens, both written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 61, tokens + 1).astype(np.uint16))
    return f"--model {folder} --dataset {folder}/tokens.npy {FLAGS}"
