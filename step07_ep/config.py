"""The command line and the shape of the model. All that can be refused is refused here, before any work."""
import json
import math
import os
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from dataclasses import asdict, dataclass, fields

import torch

from schedules import SCHEDULES, least

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
    add("--zero", type=int, choices=[0, 1, 2, 3], default=0,
        help="ZeRO: cut 1 optimizer states, 2 gradients, 3 weights")
    add("--zero_shard", type=int, help="cut into so many slices, replicas across (hybrid); all if not given")
    add("--tp", type=int, default=1, help="tensor-parallel ranks: each has a part of every matrix")
    add("--sp", choices=["on", "off"], default="on",
        help="sequence parallel: outside the matrices a rank of tp has a part of the sequence")
    add("--cp", type=int, default=1, help="context-parallel ranks: each has a part of every sequence")
    add("--cp_mode", choices=["zigzag", "ring", "allgather", "ulysses"], default="zigzag",
        help="how attention sees the other parts")
    add("--pp", type=int, default=1, help="pipeline-parallel ranks: each has a part of the layers")
    add("--schedule", choices=list(SCHEDULES), default="1f1b", help="what a rank of pp does when")
    add("--stages_per_rank", type=int,
        help="interleaved: two or more, two if not given; dualpipe has two, the others one")
    add("--ep", type=int, default=1, help="expert-parallel ranks, of dp x cp: each has some of the experts")
    add("--balance", choices=["none", "bias", "aux"],
        help="how the experts' load is evened out; bias if not given, none with --init_from")
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
    num_local_experts: int = 0                   # of a Mixtral; 0: a Llama
    num_experts_per_tok: int = 0


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
    "tiny-moe":   ModelConfig(256,    64,    96,    8,   8, 4,   8, max_position_embeddings=4096,
                              initializer_range=0.1, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-8x7b": ModelConfig(32000, 4096, 14336, 32, 32, 8, 128, rope_theta=1e6,
                                max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2),
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
    if raw.get("model_type") not in ("llama", "mixtral"):
        refuse(f"--model {name}: model_type {raw.get('model_type')!r}; known here: 'llama' and 'mixtral'")
    for key, value in dict(hidden_act="silu", attention_bias=False, mlp_bias=False,
                           quantization_config=None, sliding_window=None, router_jitter_noise=0.0).items():
        if raw.get(key, value) != value:
            refuse(f"--model {name}: {key}={raw[key]!r}; only {value!r} is known here")
    older = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    rope = raw.get("rope_parameters") or older
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        refuse(f"--model {name}: rope scaling of type {kind!r}; only 'llama3' is known here")
    heads = raw["num_attention_heads"]
    experts = ("num_local_experts", "num_experts_per_tok") if raw["model_type"] == "mixtral" else ()
    for key in experts:
        if not raw.get(key):
            refuse(f"--model {name}: {key} is {raw.get(key)!r}, but a Mixtral has experts")
    return ModelConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"], num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads, num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, rope_theta=rope["rope_theta"],
        rope_scaling={key: rope[key] for key in llama3(0)} if kind == "llama3" else None,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6), initializer_range=raw.get("initializer_range", 0.02),
        **{key: raw[key] for key in experts})


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
    kind = "Mixtral" if config.num_local_experts else "Llama"
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu",
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
    check_tensor_parallel(args, config)
    check_context_parallel(args, config)
    if args.pp < 1:
        refuse(f"--pp {args.pp}: must be at least 1")
    args.dp = world // (args.tp * args.cp * args.pp) if args.dp is None else args.dp
    if args.pp * args.dp * args.cp * args.tp != world:
        refuse(f"pp({args.pp}) x dp({args.dp}) x cp({args.cp}) x tp({args.tp}) != world size ({world}); "
               f"pp x cp x tp could be {divisors(world)}, with --dp left out")
    if args.bucket_mb <= 0:
        refuse(f"--bucket_mb {args.bucket_mb}: must be positive")
    if args.zero == 0 and args.zero_shard is not None:
        refuse("--zero_shard needs --zero 1, 2 or 3")
    ranks = args.dp * args.cp
    args.zero_shard = ranks if args.zero_shard is None else args.zero_shard
    if args.zero_shard < 1 or ranks % args.zero_shard:
        refuse(f"{ranks} ranks with other data are not a multiple of zero_shard({args.zero_shard}); "
               f"zero_shard could be {divisors(ranks)}")
    batch, micro = args.global_batch_size, args.micro_batch_size
    if batch % args.dp:
        refuse(f"global_batch_size {batch} is not a multiple of dp({args.dp}); "
               f"it could be {multiples(args.dp, batch)}")
    if batch // args.dp % micro:
        refuse(f"global_batch_size {batch} / dp({args.dp}) = {batch // args.dp} is not a multiple of "
               f"micro_batch_size {micro}; micro_batch_size could be {divisors(batch // args.dp)}")
    check_pipeline(args, config, batch // args.dp // micro)
    check_experts(args, config)
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


def check_tensor_parallel(args, config):
    tp, kv_heads = args.tp, config.num_key_value_heads
    if tp < 1:
        refuse(f"--tp {tp}: must be at least 1")
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % tp:
            refuse(f"{name} {getattr(config, name)} is not a multiple of tp({tp}); "
                   f"tp could be {tp_that_would_do(config)}")
    if kv_heads % tp and tp % kv_heads:
        refuse(f"num_key_value_heads {kv_heads} is neither a multiple of tp({tp}) nor a divisor; "
               f"tp could be {tp_that_would_do(config)}")
    if args.sp == "on" and args.seq_len % tp:
        refuse(f"seq_len {args.seq_len} is not a multiple of tp({tp}); "
               f"it could be {multiples(tp, args.seq_len)}; or --sp off")


def tp_that_would_do(c):
    common = math.gcd(c.num_attention_heads, c.intermediate_size, c.vocab_size)
    fits = [n for n in range(1, min(common, 10000) + 1)
            if common % n == 0 and (c.num_key_value_heads % n == 0 or n % c.num_key_value_heads == 0)]
    return ", ".join(map(str, fits))


def check_context_parallel(args, config):
    cp, heads = args.cp, config.num_attention_heads // args.tp
    if cp < 1:
        refuse(f"--cp {cp}: must be at least 1")
    if cp == 1:
        args.cp_mode = "ring"                             # one part, in order; one token has no halves
        return
    chunks = cp * (2 if args.cp_mode in ("zigzag", "allgather") else 1)            # an early and a late one
    unit = math.lcm(chunks, cp * args.tp if args.sp == "on" else 1)
    if args.seq_len % unit:
        refuse(f"seq_len {args.seq_len} is not a multiple of {unit}, which cp({cp}) with --cp_mode "
               f"{args.cp_mode} and tp({args.tp}) with --sp {args.sp} take; "
               f"it could be {multiples(unit, args.seq_len)}")
    if args.cp_mode == "ulysses" and heads % cp:
        refuse(f"num_attention_heads {config.num_attention_heads} / tp({args.tp}) = {heads} is not a "
               f"multiple of cp({cp}); with --cp_mode ulysses cp could be {divisors(heads)}")
    if args.device == "cuda" and args.dtype != torch.bfloat16 and args.cp_mode != "ulysses":
        refuse(f"--cp_mode {args.cp_mode} on CUDA needs --dtype bfloat16, as its flash kernels do; "
               "--cp_mode ulysses takes any")
    if args.device == "cuda" and config.head_dim % 8 and args.cp_mode != "ulysses":
        refuse(f"head_dim {config.head_dim} is not a multiple of 8, as the flash kernels of --cp_mode "
               f"{args.cp_mode} want; --cp_mode ulysses takes any")


def check_pipeline(args, config, micro_batches):
    if args.pp == 1:
        args.schedule, args.stages_per_rank = "1f1b", 1   # one micro-batch after another, as with no pipeline
    usual = 2 if args.schedule in ("interleaved", "dualpipe") else 1
    args.stages_per_rank = usual if args.stages_per_rank is None else args.stages_per_rank
    interleaved = args.schedule == "interleaved"
    if args.stages_per_rank < 2 if interleaved else args.stages_per_rank != usual:
        refuse(f"--stages_per_rank {args.stages_per_rank}: --schedule {args.schedule} takes "
               f"{'2 or more' if interleaved else usual}")
    stages, layers = args.pp * args.stages_per_rank, config.num_hidden_layers
    if layers < stages:
        refuse(f"num_hidden_layers {layers} are fewer than pp({args.pp}) x "
               f"stages_per_rank({args.stages_per_rank}) = {stages} stages; "
               f"pp could be up to {layers // args.stages_per_rank}")
    wanted = least(args.schedule, args.pp)
    if micro_batches < wanted:
        refuse(f"global_batch_size {args.global_batch_size} / dp({args.dp}) / micro_batch_size "
               f"{args.micro_batch_size} = {micro_batches} micro-batches; "
               f"--schedule {args.schedule} with pp({args.pp}) takes {wanted} or more: "
               f"global_batch_size could be {wanted * args.dp * args.micro_batch_size}")


def check_experts(args, config):
    args.balance = args.balance or ("none" if args.init_from else "bias")
    ranks, experts, top_k = args.dp * args.cp, config.num_local_experts, config.num_experts_per_tok
    if args.ep < 1 or ranks % args.ep:
        refuse(f"dp({args.dp}) x cp({args.cp}) = {ranks} is not a multiple of ep({args.ep}); "
               f"ep could be {divisors(ranks)}")
    if args.ep > 1 and not experts:
        refuse(f"--ep {args.ep}: --model {args.model} has no experts; --model tiny-moe has 8")
    if experts % args.ep:
        refuse(f"num_local_experts {experts} is not a multiple of ep({args.ep}); "
               f"ep could be {divisors(math.gcd(ranks, experts))}")
    if experts and not 1 <= top_k <= experts:
        refuse(f"num_experts_per_tok {top_k} of {experts} experts; it could be 1 to {experts}")
    if experts and args.save and args.balance == "bias" and os.environ.get("RANK", "0") == "0":
        print("--balance bias with --save: a Mixtral's checkpoint has no place for the biases; without them "
              "some tokens get other experts; --balance aux or none train a plain Mixtral", flush=True)


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
