"""The shapes of models: the trainer's presets, and what a config.json says.

The trainer takes a Llama or a Mixtral and refuses the rest. To plan, less has to be known than to train: a
Mistral is a Llama by shape, and so is a dense Qwen but for a few vectors, which are counted. What the trainer
says of such a model is kept beside it.
"""
import json
import os
from typing import NamedTuple

import trainer
from trainer import LARGEST_NUMBER as MOST
from trainer import refuse


class Model(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    attention_bias: bool = False                          # of q, k and v: Qwen2 has them
    qk_norm: bool = False                                 # norms of each head's q and k: Qwen3
    tied: bool = False                                    # one matrix for both ends
    notes: tuple = ()                                     # what is different when it is trained here
    untrained: str = ""                                   # why the trainer refuses it, in its words


KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
TRAINED = ("llama", "mixtral")
PLANNED = dict(attention_bias=False, sliding_window=None)  # what the trainer wants: here others are counted
SIZES = Model._fields[:6]
PRESETS = {name: Model(*(getattr(preset, field) for field in Model._fields[:9]))
           for name, preset in trainer.PRESETS.items()}


def load(name):
    if name in PRESETS:
        return PRESETS[name]
    path = os.path.join(folder_of(name), "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            return read(json.load(file), f"--model {name}")
    except OSError as error:
        refuse(f"--model {name}: no config.json there ({error.strerror}); presets: {', '.join(PRESETS)}")
    except (ValueError, RecursionError) as error:
        refuse(f"--model {name}: config.json is not JSON ({one_line(error)})")


def folder_of(name):
    if os.path.isfile(name):
        refuse(f"--model {name} is a file; its directory is wanted: --model {os.path.dirname(name) or '.'}")
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=["config.json"])
    except Exception as error:
        refuse(f"--model {name}: no such directory, and the hub gave none ({type(error).__name__}); "
               f"the presets are {', '.join(PRESETS)}")


def one_line(error):
    return " ".join(str(error).split())[:120]


def read(raw, where):
    """A config.json's content. The first thing that is wrong is named."""
    if not isinstance(raw, dict):
        refuse(f"{where}: a config.json is an object, this is {kind_of(raw)}")
    kind = raw.get("model_type")
    if kind not in KNOWN:
        refuse(f"{where}: model_type {shown(kind)}; known are {', '.join(KNOWN)}")
    sizes = {name: whole(raw, name, where) for name in SIZES if name != "num_key_value_heads"}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    sizes["num_key_value_heads"] = whole(raw, "num_key_value_heads", where, heads)
    if heads % sizes["num_key_value_heads"]:
        refuse(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
               f"{sizes['num_key_value_heads']}")
    if raw.get("head_dim") is None and hidden % heads:
        refuse(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there "
               "is no head_dim")
    head_dim = whole(raw, "head_dim", where, hidden // heads)
    if head_dim % 2:
        refuse(f"{where}: head_dim {head_dim} is odd, and rotary embeddings turn pairs")
    if raw.get("hidden_act", "silu") != "silu":
        refuse(f"{where}: hidden_act {shown(raw['hidden_act'])}; only 'silu' is known")
    if flag(raw, "mlp_bias", where):
        refuse(f"{where}: mlp_bias true is not known")
    tied = flag(raw, "tie_word_embeddings", where)
    bias = flag(raw, "attention_bias", where, kind == "qwen2")
    of_experts = experts(raw, kind, where)
    if kind in TRAINED and (why := trainers_refusal({**raw, **PLANNED})):
        refuse(f"{where}: {why}")
    untrained = trainers_refusal(raw)
    said = tuple(notes(raw, kind, sizes, tied, bias, untrained, where))
    return Model(**sizes, head_dim=head_dim, **of_experts, attention_bias=bias, qk_norm=kind == "qwen3",
                 tied=tied, notes=said, untrained=untrained)


def trainers_refusal(raw):
    """In its own words; empty if it takes the model."""
    try:
        trainer.from_hugging_face(trainer.as_transformers_reads(raw))
    except ValueError as error:
        return one_line(error)
    except Exception as error:                            # a file may hold anything
        return f"not a config.json of a Llama ({type(error).__name__}: {one_line(error)})"
    return ""


def experts(raw, kind, where):
    if kind != "mixtral":
        return {}
    count, chosen = whole(raw, "num_local_experts", where), whole(raw, "num_experts_per_tok", where)
    if chosen > count:
        refuse(f"{where}: num_experts_per_tok {chosen} is more than num_local_experts {count}")
    return dict(num_local_experts=count, num_experts_per_tok=chosen)


def notes(raw, kind, sizes, tied, bias, untrained, where):
    if tied:
        shared = sizes["vocab_size"] * sizes["hidden_size"] / 1e9
        yield f"tied embeddings are trained untied here: {shared:.2f}B parameters more than in the checkpoint"
    if kind not in TRAINED:
        extra = " with biases of q, k and v" * bool(bias) or " with norms of q and k" * (kind == "qwen3")
        yield f"planned as a Llama{extra}; this trainer itself takes model_type llama and mixtral only"
    elif untrained:
        yield f"planned all the same, but this trainer refuses it: {untrained}"
    slides = flag(raw, "use_sliding_window", where, kind not in ("qwen2", "qwen3"))
    if slides and raw.get("sliding_window") is not None:
        window = whole(raw, "sliding_window", where)
        yield f"sliding_window {window:,}: attention is counted over the whole sequence"


def whole(raw, name, where, otherwise=None):
    """A positive whole number."""
    value = raw.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if value is None:
        refuse(f"{where}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MOST:
        refuse(f"{where}: {name} {shown(value)} is not a positive whole number below {MOST:,}")
    return value


def flag(raw, name, where, otherwise=False):
    value = raw.get(name)
    if value is None:
        return otherwise
    if not isinstance(value, bool):
        refuse(f"{where}: {name} {shown(value)} is neither true nor false")
    return value


def shown(value):
    text = json.dumps(value)
    return text if len(text) < 60 else kind_of(value)


def kind_of(value):
    return {list: "a list", str: "a text", type(None): "null", dict: "an object"}.get(type(value), "a number")
