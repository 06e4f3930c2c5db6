"""The command line and the shape of the model. All that can be refused is refused here, before any work."""
import json
import os
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from dataclasses import asdict, dataclass, fields

import torch

MOST = 10**8                                              # of anything that is counted
NO_MATTER = ("initializer_range", "max_position_embeddings")                       # once there are weights


def refuse(message, status=2):
    """Bad input: rank 0 says what is wrong in one line, every rank exits with status 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    end = SystemExit(status)
    end.message = message                                 # if rank 0 does not see what is wrong, it is told
    raise end


def parse_args(argv=None):
    parser = ArgumentParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = refuse
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}; or a directory or hub id with a config.json")
    add("--init_from", help="directory or hub id with safetensors weights to start from")
    add("--dataset", default="builtin", help="builtin; a .npy or .bin (uint16) file of tokens; a text (each "
        "line a document), json or parquet file or a hub id (with --tokenizer)")
    add("--tokenizer", help="directory or hub id of a tokenizer")
    add("--seq_len", type=int, default=128)
    add("--global_batch_size", type=int, default=16, help="sequences per training step")
    add("--micro_batch_size", type=int, default=2, help="sequences per forward pass")
    add("--steps", type=int, default=120)
    add("--lr", type=float, default=6e-3)
    add("--lr_schedule", choices=["constant", "cosine"], default="cosine")
    add("--warmup", type=int, default=5, help="steps of linear warm-up")
    add("--weight_decay", type=float, default=0.1)
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--seed", type=int, default=42)
    add("--dtype", choices=["float32", "bfloat16", "float64"], help="bfloat16 on CUDA, float32 on the CPU")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--attention", choices=["sdpa", "flash"], default="sdpa", help="flash: the flash-attn package")
    add("--recompute", choices=["none", "selective", "full"], default="none", help="activation recomputation")
    add("--compile", action="store_true", help="torch.compile every block")
    add("--dp", type=int, help="data-parallel ranks; what is left of the world if not given")
    add("--dp_mode", choices=["naive", "overlap", "bucket"], default="bucket", help="how dp sums gradients")
    add("--bucket_mb", type=float, default=25, help="size of a gradient bucket")
    add("--ledger", action="store_true", help="print what one training step sends, beside the formula")
    add("--log_file", help="write one JSON line per step")
    add("--save", help="directory for a Hugging Face checkpoint after the last step")
    add("--profile", help="directory for a trace and a picture of the memory over the first steps")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value == "":
            refuse(f"--{name} is empty")
        if isinstance(value, (int, float)) and not abs(value) < MOST and name != "seed":      # nor is nan
            refuse(f"--{name} {value}: must be a number below {MOST:,}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: this torch sees no CUDA device; use --device cpu")
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    return args


@dataclass
class ModelConfig:
    """The names are those of a Hugging Face config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: dict = None                    # of type llama3: its four numbers
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02


def llama3(factor):
    return dict(factor=factor, low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=8192)


#                          vocab   hidden  mlp  layers heads kv head_dim
PRESETS = {
    "tiny":       ModelConfig(256,    64,    192,   8,   8, 4,   8, max_position_embeddings=4096,
                              initializer_range=0.1),
    "llama-1b":   ModelConfig(128256, 2048,  8192,  16, 32, 8,  64, rope_scaling=llama3(32.0)),
    "llama-3b":   ModelConfig(128256, 3072,  8192,  28, 24, 8, 128, rope_scaling=llama3(32.0)),
    "llama-8b":   ModelConfig(128256, 4096,  14336, 32, 32, 8, 128, rope_scaling=llama3(8.0)),
    "llama-70b":  ModelConfig(128256, 8192,  28672, 80, 64, 8, 128, rope_scaling=llama3(8.0)),
    "llama-405b": ModelConfig(128256, 16384, 53248, 126, 128, 8, 128, rope_scaling=llama3(8.0)),
}


def local_folder(flag, name):
    """A directory as it is; a hub id downloaded to the Hugging Face cache."""
    if os.path.isdir(name):
        beside = os.path.join(name, ".new_model")         # whole, if its saver was killed (checkpoint.py)
        return beside if os.path.isdir(beside) else name
    wanted = ["config.json"] if flag == "--model" else ["*.safetensors", "*.json"]
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=wanted)
    except Exception as error:
        presets = f"; the presets are {', '.join(PRESETS)}" if flag == "--model" else ""
        refuse(f"{flag} {name}: no such directory, and the hub gave none ({type(error).__name__}){presets}")


def load_config(args):
    config = PRESETS.get(args.model) or read_config(args.model, local_folder("--model", args.model))
    folder = args.init_from and local_folder("--init_from", args.init_from)
    if folder and os.path.isfile(os.path.join(folder, "config.json")):
        for name, theirs in asdict(read_config(args.init_from, folder)).items():
            if theirs != asdict(config)[name] and name not in NO_MATTER:
                refuse(f"--init_from {args.init_from}: {name} is {theirs} in its config.json, --model "
                       f"{args.model} has {asdict(config)[name]}; --model {args.init_from} takes its own")
    return config


def read_config(name, folder):
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        refuse(f"--model {name}: no config.json there; the presets are {', '.join(PRESETS)}")
    try:
        with open(path) as file:
            config = from_hugging_face(json.load(file), name)
    except Exception as error:                            # a file may hold anything
        refuse(f"--model {name}: not a config.json of a Llama ({type(error).__name__}: {error})")
    return check_config(config, name)


def from_hugging_face(raw, name):
    """The older configs have rope_theta and rope_scaling, the newer ones rope_parameters with both."""
    if raw.get("model_type") != "llama":
        refuse(f"--model {name}: model_type {raw.get('model_type')!r}; only 'llama' is known here")
    for key, value in dict(hidden_act="silu", attention_bias=False, mlp_bias=False,
                           quantization_config=None).items():
        if raw.get(key, value) != value:
            refuse(f"--model {name}: {key}={raw[key]!r}; only {value!r} is known here")
    older = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    rope = raw.get("rope_parameters") or older
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        refuse(f"--model {name}: rope scaling of type {kind!r}; only 'llama3' is known here")
    heads = raw["num_attention_heads"]
    return ModelConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"], num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads, num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, rope_theta=rope["rope_theta"],
        rope_scaling={key: rope[key] for key in llama3(0)} if kind == "llama3" else None,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6), initializer_range=raw.get("initializer_range", 0.02))


def check_config(config, name):
    """Sizes are whole numbers, all else numbers, above 0; or it is what it is if the file does not say."""
    kinds, usual = ({f.name: getattr(f, what) for f in fields(config)} for what in ("type", "default"))
    for key, value in {**asdict(config), **(config.rope_scaling or {})}.items():
        types, most = ([int], MOST) if kinds.get(key) is int else ([int, float], float("inf"))
        fits = type(value) in types and 0 < value < most and (key != "head_dim" or value % 2 == 0)
        if key != "rope_scaling" and value != usual.get(key, key) and not fits:
            refuse(f"--model {name}: {key} is {value!r}; sizes are whole, < {MOST:,}, head_dim even; all > 0")
    return config


def to_hugging_face(config, dtype):
    """With rope_parameters for transformers from 5 on, rope_theta and rope_scaling for the older ones."""
    scaling = config.rope_scaling and {"rope_type": "llama3", **config.rope_scaling}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            **asdict(config), "rope_scaling": scaling, "tie_word_embeddings": False,
            "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
            "attention_bias": False, "mlp_bias": False, "torch_dtype": str(dtype).removeprefix("torch.")}


def check(args, config):
    """Refuses what cannot run, with the arithmetic and with values that would do."""
    for name in ("seq_len", "global_batch_size", "micro_batch_size"):
        if getattr(args, name) < 1:
            refuse(f"--{name} {getattr(args, name)}: must be at least 1")
    for name in ("steps", "warmup", "lr", "weight_decay", "grad_clip"):
        if getattr(args, name) < 0:
            refuse(f"--{name} {getattr(args, name)}: must not be negative")
    world = int(os.environ.get("WORLD_SIZE", 1))
    args.dp = world if args.dp is None else args.dp
    if args.dp != world:
        refuse(f"dp({args.dp}) != world size ({world}); --dp could be {world}, or left out")
    if args.bucket_mb <= 0:
        refuse(f"--bucket_mb {args.bucket_mb}: must be positive")
    batch, micro = args.global_batch_size, args.micro_batch_size
    if batch % args.dp:
        refuse(f"global_batch_size {batch} is not a multiple of dp({args.dp}); "
               f"it could be {multiples(args.dp, batch)}")
    if batch // args.dp % micro:
        refuse(f"global_batch_size {batch} / dp({args.dp}) = {batch // args.dp} is not a multiple of "
               f"micro_batch_size {micro}; micro_batch_size could be {divisors(batch // args.dp)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        refuse(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    check_outputs(args)
    if args.attention == "flash":
        if args.device == "cpu" or args.dtype != torch.bfloat16:
            refuse("--attention flash needs --device cuda and --dtype bfloat16; --attention sdpa takes any")
        try:
            import flash_attn  # noqa: F401
        except ImportError:
            refuse("--attention flash: the package flash-attn is not installed; --attention sdpa needs none")


def check_outputs(args):
    """Better now than after the last step."""
    try:
        for folder in filter(None, (args.save, args.profile)):
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()    # whether it can be written to
        if args.log_file:
            check_log(args.log_file)
            open(args.log_file, "a").close()
    except OSError as error:
        refuse(f"--save, --profile or --log_file: cannot write there ({error})")


def check_log(name):
    """A log is begun anew, nothing else is overwritten."""
    for line in open(name, errors="replace") if os.path.isfile(name) else ():
        if not line.startswith('{"step": '):
            refuse(f"--log_file {name}: is there and is no log of a run; take another name")


def divisors(n):
    return ", ".join(str(d) for d in range(1, min(n, 10000) + 1) if n % d == 0)


def multiples(n, near):
    return " or ".join(str(m) for m in (near // n * n, near // n * n + n) if m)
