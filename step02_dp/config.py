"""The command line and the model's shape. Invalid settings fail here, before any work is done."""
import importlib.util
import math
import os
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from messages import RANK, fail, print0

TOO_LARGE = 10**8                                         # integers and numeric flags must be smaller
# these may differ between a checkpoint and --model
NOT_ARCHITECTURE = ("initializer_range", "max_position_embeddings")


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Show the default of a flag, unless there is none to show."""

    def _get_help_string(self, action):
        hidden = action.default is None or action.default is False
        return action.help if hidden else super()._get_help_string(action)


def parse_args(argv, techniques):
    parser = ArgumentParser(allow_abbrev=False, formatter_class=HelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", default="tiny",
        help=f"a preset ({', '.join(PRESETS)}), or a directory or hub id with a config.json")
    add("--init_from", help="directory or hub id with safetensors weights to start from")
    add("--dataset", default="builtin", help="builtin; a token file (.npy, or .bin with uint16); or, "
        "with --tokenizer, a text file (one document per line), a json or parquet file, or a hub id")
    add("--tokenizer", help="directory or hub id of a tokenizer")
    add("--seq_len", type=at_least(1), default=128, help="tokens per sequence")
    add("--global_batch_size", type=at_least(1), default=16, help="sequences per training step")
    add("--micro_batch_size", type=at_least(1), default=2, help="sequences per forward pass")
    add("--steps", type=at_least(0), default=120, help="training steps")
    add("--lr", type=at_least(0, float), default=6e-3, help="peak learning rate")
    add("--lr_schedule", choices=["constant", "cosine"], default="cosine",
        help="learning rate after the warm-up; cosine: down to a tenth of --lr")
    add("--warmup", type=at_least(0), default=5, help="steps of linear warm-up")
    add("--weight_decay", type=at_least(0, float), default=0.1, help="AdamW's; for matrices only")
    add("--grad_clip", type=at_least(0, float), default=1.0, help="maximum gradient norm; 0: no clipping")
    add("--seed", type=int, default=42, help="determines the initial weights")
    add("--dtype", choices=["float32", "bfloat16", "float64"],
        help="of weights and activations (default: bfloat16 on a GPU that has it, else float32)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if torch finds it")
    add("--attention", choices=["sdpa", "flash"], default="sdpa",
        help="attention kernel; flash requires the flash-attn package")
    add("--recompute", choices=["none", "selective", "full"], default="none",
        help="recompute in backward: nothing, all but matrix products and attention, or the whole layer")
    add("--compile", action="store_true", help="torch.compile every layer, and the loss")

    for technique in techniques:
        technique.flags(add)

    add("--ledger", action="store_true",
        help="print the bytes that rank 0 sends in one training step, beside those expected")

    add("--log_file", help="file for one JSON line per step")
    add("--save", help="directory for a Hugging Face checkpoint after the last step")
    add("--profile", help="directory for a trace of one step and, on CUDA, a memory snapshot")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name}: must not be empty")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    default_dtype = "bfloat16" if args.device == "cuda" and gpu_has_bfloat16() else "float32"
    args.dtype = getattr(torch, args.dtype or default_dtype)
    for technique in techniques:
        if hasattr(technique, "defaults"):
            technique.defaults(args)
    args.first_step = 0                                   # step08_5d, which can resume, changes it
    return args


def gpu_has_bfloat16():
    """Return whether the GPU has bfloat16. (is_bf16_supported() is true on older ones, which emulate it.)"""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def at_least(smallest, kind=int):
    """Return an argparse type: a number of the given kind that is not too small, too large or NaN."""
    def number(text):
        if not smallest <= kind(text) < TOO_LARGE:
            raise ArgumentTypeError(f"must be at least {smallest} and below {TOO_LARGE}, but is {text}")
        return kind(text)
    return number


class Family(NamedTuple):
    """How to read, build and write one Hugging Face model_type."""
    config_class: str                            # its class in transformers
    fields: dict                                 # {field of ModelConfig: its name in config.json}
    only_supported: dict = {}                    # {key of config.json: the one value that is supported}
    qk_norm: bool = False                        # an RMSNorm over each head of queries and keys


FIELDS = {name: name for name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "initializer_range")}
FAMILIES = {
    "llama": Family("LlamaConfig", FIELDS),
    "qwen3": Family("Qwen3Config", FIELDS, qk_norm=True),
}
ONLY_SUPPORTED = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, sliding_window=None,
                      attention_dropout=0.0, quantization_config=None)               # in all families


@dataclass
class ModelConfig:
    """The shape of a model; its fields are named as in a Llama's config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: dict = None                    # the four parameters of rope_type llama3
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    family: str = "llama"

    @property
    def qk_norm(self):
        return FAMILIES[self.family].qk_norm


def llama3_rope(factor):
    return dict(factor=factor, low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=8192)


QWEN3 = dict(rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960)
#                          vocab   hidden  mlp  layers heads kv head_dim
PRESETS = {
    "tiny":       ModelConfig(256,    64,    192,   8,   8, 4,   8, max_position_embeddings=4096,
                              initializer_range=0.1),
    "llama-1b":   ModelConfig(128256, 2048,  8192,  16, 32, 8,  64, rope_scaling=llama3_rope(32.0)),
    "llama-3b":   ModelConfig(128256, 3072,  8192,  28, 24, 8, 128, rope_scaling=llama3_rope(32.0)),
    "llama-8b":   ModelConfig(128256, 4096,  14336, 32, 32, 8, 128, rope_scaling=llama3_rope(8.0)),
    "llama-70b":  ModelConfig(128256, 8192,  28672, 80, 64, 8, 128, rope_scaling=llama3_rope(8.0)),
    "llama-405b": ModelConfig(128256, 16384, 53248, 126, 128, 8, 128, rope_scaling=llama3_rope(8.0)),
    "qwen3-0.6b": ModelConfig(151936, 1024,  3072,  28, 16, 8, 128, family="qwen3", **QWEN3),
    "qwen3-8b":   ModelConfig(151936, 4096,  12288, 36, 32, 8, 128, family="qwen3", **QWEN3),
}


def load_config(args):
    config = PRESETS.get(args.model) or read_config("--model", args.model)
    path = os.path.join(args.init_from or "", "config.json")
    # a directory may hold weights alone; a hub id names a model that has a config.json
    if args.init_from and (os.path.isfile(path) or not os.path.isdir(args.init_from)):
        for name, saved in asdict(read_config("--init_from", args.init_from)).items():
            if saved != asdict(config)[name] and name not in NOT_ARCHITECTURE:
                fail(f"--init_from {args.init_from}: its {name} is {saved}, but --model {args.model} has "
                     f"{asdict(config)[name]}; use --model {args.init_from}")
    return config


def read_config(flag, name):
    """Read a config.json through transformers, which also understands older formats."""
    from transformers import AutoConfig
    try:
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = from_hugging_face(hf_config)
    except Exception as error:                            # the file may contain anything
        reason = " ".join(str(error).split())
        presets = f"; the presets are {', '.join(PRESETS)}" if flag == "--model" else ""
        fail(f"{flag} {name}: not found or unsupported ({reason}){presets}")
    if flag == "--model" and hf_config.tie_word_embeddings:
        print0(f"--model {name}: ties the head to the embedding; this trainer trains them separately")
    return config


def from_hugging_face(hf_config):
    if hf_config.model_type not in FAMILIES:
        raise ValueError(f"model_type is {hf_config.model_type!r}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[hf_config.model_type]
    for key, value in (ONLY_SUPPORTED | family.only_supported).items():
        if getattr(hf_config, key, value) != value:
            raise ValueError(f"{key} is {getattr(hf_config, key)!r}; only {value!r} is supported")
    rope = hf_config.rope_parameters
    if rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"rope_type is {rope['rope_type']!r}; only 'default' and 'llama3' are supported")
    scaling = {key: rope[key] for key in llama3_rope(0)} if rope["rope_type"] == "llama3" else None
    values = {ours: getattr(hf_config, name, None) for ours, name in family.fields.items()}
    if values["head_dim"] is None:                        # optional in config.json
        values["head_dim"] = hf_config.hidden_size // hf_config.num_attention_heads
    values["rope_theta"] = rope["rope_theta"]
    for ours, value in {**values, **(scaling or {})}.items():
        kind = ModelConfig.__annotations__.get(ours, float)
        limit = TOO_LARGE if kind is int else float("inf")
        if not (isinstance(value, (int, kind)) and 0 < value < limit):
            raise ValueError(f"{family.fields.get(ours, ours)} is {value!r}, not a positive {kind.__name__}"
                             + f" below {limit}" * (kind is int))
    return ModelConfig(**values, rope_scaling=scaling, family=hf_config.model_type)


def to_hugging_face(config, dtype):
    import transformers
    family = FAMILIES[config.family]
    rope = {"rope_type": "llama3" if config.rope_scaling else "default", **(config.rope_scaling or {})}
    values = {name: getattr(config, ours) for ours, name in family.fields.items()}
    return getattr(transformers, family.config_class)(
        **values, **family.only_supported, rope_parameters={"rope_theta": config.rope_theta, **rope},
        dtype=dtype, tie_word_embeddings=False,
        architectures=[family.config_class.replace("Config", "ForCausalLM")])


def check(args, config, techniques):
    """Reject invalid settings; show the arithmetic and suggest valid values."""
    for technique in techniques:
        technique.check(args, config)
    must_divide("micro_batch_size", args.micro_batch_size, "global_batch_size", args.global_batch_size)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        fail(f"--model {args.model}: num_attention_heads {heads} must be a multiple of num_key_value_heads "
             f"{kv_heads}")
    check_device(args)
    check_outputs(args)


def check_device(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; use --device cpu")
    if args.device == "cuda" and args.dtype == torch.bfloat16 and not gpu_has_bfloat16():
        fail("--dtype bfloat16: requires a GPU of compute capability 8.0 or more, such as an A100; "
             "use --dtype float32")
    if args.attention == "flash" and (args.device == "cpu" or args.dtype != torch.bfloat16):
        fail("--attention flash: requires --device cuda and --dtype bfloat16; use --attention sdpa")
    if args.attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        fail("--attention flash: the package flash-attn is not installed; use --attention sdpa")


def set_num_threads(args, config):
    """Use one thread for a small model on the CPU, unless OMP_NUM_THREADS is set.

    More threads barely speed up a small model, and on a busy machine they slow it down.
    """
    if args.device == "cpu" and config.hidden_size < 512 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def check_outputs(args):
    """Fail before training rather than after it if the results cannot be written."""
    if args.profile and args.steps == 0:
        fail("--profile: requires --steps of at least 1")
    save = args.save if RANK == 0 else None               # rank 0 alone writes there
    for flag, folder in (("save", save), ("profile", args.profile)):
        if folder:
            check_writable(flag, folder)
    if save and os.listdir(save):
        fail(f"--save {save}: must be empty; choose a new or an empty directory")


def check_writable(flag, folder):
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"--{flag} {folder}: cannot be written to ({error})")


def must_divide(flag, n, what, whole, also=0):
    """Fail unless n divides whole: "--tp 3: must divide num_attention_heads 8; choose from 1, 2, 4, 8".

    The suggested values divide `also`, too.
    """
    if whole % n:
        fail(f"--{flag} {n}: must divide {what} {whole}; choose from {divisors(math.gcd(whole, also))}")


def divisors(n):
    return ", ".join(str(d) for d in range(1, min(n, 10000) + 1) if n % d == 0)


def must_be_multiple(flag, n, divisor, what, otherwise=""):
    """Fail unless divisor divides n: "--seq_len 10: must be a multiple of tp 4; choose 8 or 12"."""
    if n % divisor:
        below = n // divisor * divisor
        near = " or ".join(str(m) for m in (below, below + divisor) if m)
        fail(f"--{flag} {n}: must be a multiple of {what}; choose {near}{otherwise}")
