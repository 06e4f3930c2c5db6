"""The shapes of models: the trainer's presets, and those that transformers reads from a config.json. Planning needs
to know less than training, so more models are known here: a Mistral or a Qwen2 is a Llama but for a few vectors, and
experts may be shared and attention latent.
"""
import os
from typing import NamedTuple

import trainer
from trainer import TOO_LARGE as MOST, fail


class Model(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int                                # of each expert, if there are any
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    attention_bias: bool = False                          # q, k and v have biases: Qwen2
    qk_norm: bool = False                                 # each head's q and k have norms: Qwen3
    tied: bool = False                                    # one matrix for both ends
    shared_experts: int = 0                               # per layer: every token also goes through these
    dense_layers: int = 0                                 # layers that have an MLP instead of experts,
    dense_size: int = 0                                   # and its intermediate_size
    # ranks of q, and of k and v; head_dim of q and k without positions, and with; head_dim of v
    latent: tuple = ()
    notes: tuple = ()                                     # how training it here differs
    untrained: str = ""                                   # why the trainer refuses it, in its own words


TRAINED = tuple(trainer.FAMILIES)
KNOWN = (*TRAINED, "mistral", "qwen2", "deepseek_v3")
SIZES = Model._fields[:7]
PRESETS = {name: Model(**{field: getattr(preset, field) for field in Model._fields if hasattr(preset, field)})
           for name, preset in trainer.PRESETS.items()}


def load(name):
    if name in PRESETS:
        return PRESETS[name]
    if os.path.isfile(name):
        fail(f"--model {name}: is a file; give its directory: --model {os.path.dirname(name) or '.'}")
    if not os.path.isdir(name) and "/" not in name:       # hub ids have a slash
        fail(f"--model {name}: no such directory, and not a hub id; the presets are {', '.join(PRESETS)}")
    try:
        from transformers import PretrainedConfig         # it imports torch, which nothing else here needs
        raw, _ = PretrainedConfig.get_config_dict(name)
    except Exception as error:
        fail(f"--model {name}: its config.json could not be read ({one_line(error)}); the presets are "
             f"{', '.join(PRESETS)}")
    return read(raw, f"--model {name}")


def one_line(error):
    return " ".join(str(error).split())[:160]


def read(raw, where):
    try:
        from transformers import AutoConfig
        theirs = AutoConfig.for_model(**raw)
    except Exception as error:                            # a file may hold anything
        fail(f"{where}: transformers could not read this config.json ({one_line(error)})")
    kind, refused = theirs.model_type, ""
    try:
        trainer.from_hugging_face(theirs)
    except Exception as error:
        refused = one_line(error)
    if kind not in KNOWN:
        fail(f"{where}: model_type {kind!r} is not supported; choose from {', '.join(KNOWN)}")
    if theirs.hidden_act != "silu" or getattr(theirs, "mlp_bias", False):
        fail(f"{where}: hidden_act {theirs.hidden_act!r}, mlp_bias {theirs.mlp_bias}: only 'silu' and False are supported")
    sizes = {name: getattr(theirs, name, None) for name in SIZES}
    heads, kv_heads = theirs.num_attention_heads, theirs.num_key_value_heads
    sizes["head_dim"] = sizes["head_dim"] or theirs.hidden_size // max(1, heads)
    check_range(where, 1, **sizes)
    if heads % kv_heads:
        fail(f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    model = Model(**sizes, attention_bias=kind == "qwen2" or getattr(theirs, "attention_bias", False),
                  tied=theirs.tie_word_embeddings, untrained=refused,
                  qk_norm=kind in TRAINED and trainer.FAMILIES[kind].qk_norm)
    model = model._replace(**experts(theirs, kind, where))
    if kind == "deepseek_v3":                             # head_dim is the mean width of q and v
        rope, plain, v = theirs.qk_rope_head_dim, theirs.qk_nope_head_dim, theirs.v_head_dim
        latent = theirs.q_lora_rank or 0, theirs.kv_lora_rank, plain, rope, v
        check_range(where, 0, q_lora_rank=latent[0], qk_nope_head_dim=plain, qk_rope_head_dim=rope)
        check_range(where, 1, kv_lora_rank=latent[1], v_head_dim=v)
        model = model._replace(latent=latent, head_dim=(plain + rope + v) // 2)
    return model._replace(notes=tuple(notes(model, theirs)))


def check_range(where, least, **sizes):
    for name, value in sizes.items():
        if type(value) is not int or not least <= value < MOST:
            fail(f"{where}: {name} {value} must be a whole number of at least {least} and below {MOST:,}")


def experts(theirs, kind, where):
    fields = trainer.FAMILIES[kind].fields if kind in TRAINED else {}
    if "num_local_experts" not in fields and kind != "deepseek_v3":
        return {}
    count = getattr(theirs, "n_routed_experts", 0) or theirs.num_local_experts
    chosen = theirs.num_experts_per_tok
    if not 1 <= chosen <= count < MOST:
        fail(f"{where}: num_experts_per_tok {chosen} must be from 1 to num_local_experts {count}")
    if kind == "deepseek_v3":
        dense = theirs.first_k_dense_replace
        if type(dense) is not int or not 0 <= dense <= theirs.num_hidden_layers:
            fail(f"{where}: first_k_dense_replace {dense} must be from 0 to num_hidden_layers {theirs.num_hidden_layers}")
    else:
        without, every = getattr(theirs, "mlp_only_layers", []), getattr(theirs, "decoder_sparse_step", 1)
        check_range(where, 1, decoder_sparse_step=every)
        dense = sum(i in without or (i + 1) % every > 0 for i in range(theirs.num_hidden_layers))
    name, shared = fields.get("intermediate_size", "moe_intermediate_size"), getattr(theirs, "n_shared_experts", 0)
    check_range(where, 1, **{name: getattr(theirs, name)})
    check_range(where, 0, n_shared_experts=shared)
    return dict(num_local_experts=count, num_experts_per_tok=chosen, dense_layers=dense, shared_experts=shared,
                intermediate_size=getattr(theirs, name), dense_size=theirs.intermediate_size * bool(dense))


def notes(c, theirs):
    kind = theirs.model_type
    if c.tied:
        shared = c.vocab_size * c.hidden_size / 1e9
        yield f"tied embeddings are trained untied here: {shared:.2f}B parameters more than in the checkpoint"
    if kind not in TRAINED:
        extra = " with biases of q, k and v" * c.attention_bias + " with norms of q and k" * c.qk_norm
        extra += f" with {c.num_local_experts} experts of {c.intermediate_size:,}" * bool(c.num_local_experts)
        extra += f", {c.shared_experts} shared" * bool(c.shared_experts)
        extra += " and latent attention" * bool(c.latent)
        yield (f"NOT TRAINABLE HERE: planned as a Llama{extra}; "
               f"this trainer itself takes model_type {', '.join(TRAINED)} only")
    elif c.untrained:
        yield f"this is a plan only, because this trainer refuses it: {c.untrained}"
    window = getattr(theirs, "sliding_window", None)
    if window and getattr(theirs, "use_sliding_window", True):
        yield f"sliding_window {window:,}: attention is counted over the whole sequence"
