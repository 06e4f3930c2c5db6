"""torchtitan 0.3, its own Trainer on a small qwen3: fsdp= ddp= tp= sp= acc= clip= (on CPUs).

    python tools/prove tools/prove/adapters/of_torchtitan_03.py --world 4 --flags "fsdp=2 tp=2"

Trainer.__init__ and train_step are its own; tokenizer, data, checkpoints and metrics are left out. In --both: clip=, tied=. The
pipeline and its spmd_types need a newer torch than 2.13, so build takes partial_dtensor. (of_torchtitan.py is for 0.2.2.)
"""
import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # noqa: F401, before Triton is replaced
import torch._utils
import torch.distributed as dist

NEEDS = "torchtitan==0.3.0"
BATCH, SEQ, VOCAB, LAYERS = 8, 16, 64, 4
if importlib.util.find_spec("triton") is None:            # it imports Triton for its experts, which this model does not have
    sys.modules |= {"triton": MagicMock(), "triton.language": MagicMock()}
torch._utils._get_available_device_type = lambda: "cpu"   # otherwise it takes cuda, even where there is none
import torchtitan.trainer as titan  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

TORCH_DTYPE_MAP.setdefault("float64", torch.float64)
qwen3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()    # its default needs a compiler
titan.utils.get_local_device = lambda: torch.device("cpu")
titan.Trainer.Config.to_dict = lambda self: {}


class LeftOut:
    """The configuration of a component that is not built."""
    create_seed_checkpoint = enable = False

    def __init__(self, component=None):
        self.component = component or MagicMock()

    def build(self, **kwargs):
        return self.component


def small_model(flags):
    rope = qwen3.CosSinRoPE.Config(dim=16, max_seq_len=SEQ, theta=10000.0)
    layers = qwen3._build_qwen3_layers(n_layers=LAYERS, dim=32, hidden_dim=64, n_heads=4, n_kv_heads=2, head_dim=16, rope=rope,
                                       attn_backend="sdpa", fuse_qkv=False)
    tied = bool(flags.get("tied", 0))
    init = qwen3._EMBEDDING_SKIP_INIT if tied else {"weight": torch.nn.init.normal_}
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCAB, dim=32, norm=qwen3._qwen3_norm(32), enable_weight_tying=tied, layers=layers,
        tok_embeddings=qwen3.Embedding.Config(num_embeddings=VOCAB, embedding_dim=32, param_init=init),
        lm_head=qwen3.Linear.Config(in_features=32, out_features=VOCAB, param_init=qwen3._LINEAR_INIT))


def build(flags):
    dist.init_process_group("gloo")
    fsdp, ddp, tp, acc = (flags.get(name, 1) for name in ("fsdp", "ddp", "tp", "acc"))
    metrics = MagicMock()
    metrics.device_memory_monitor = SimpleNamespace(device_name="A100", get_peak_stats=lambda: SimpleNamespace(
        max_reserved_gib=0.0, max_reserved_pct=0.0))
    spec = ModelSpec("qwen3", "small", small_model(flags), qwen3.parallelize_qwen3, pipeline_llm, None, None)
    config = titan.Trainer.Config(model_spec=spec)
    config.tokenizer, config.dataloader, config.checkpoint, config.metrics = LeftOut(), LeftOut(), LeftOut(), LeftOut(metrics)
    config.loss, config.activation_checkpoint, config.optimizer = CrossEntropyLoss.Config(), None, default_adamw(lr=1e-2)
    config.optimizer.implementation, config.lr_scheduler.warmup_steps = "for-loop", 0
    training, parallel = config.training, config.parallelism
    training.dtype = training.mixed_precision_param = training.mixed_precision_reduce = flags["dtype"]
    training.local_batch_size, training.global_batch_size = BATCH // (fsdp * ddp * acc), BATCH
    training.seq_len, training.max_norm, training.disable_cuda_graphs = SEQ, float(flags.get("clip", "inf")), True
    parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = ddp, fsdp
    parallel.spmd_backend = "partial_dtensor"
    parallel.tensor_parallel_degree, parallel.enable_sequence_parallel = tp, bool(flags.get("sp", 1))
    run = titan.Trainer(config)
    run.lr_schedulers, run.metrics_processor.should_log = MagicMock(), lambda step: True

    def log(step, loss, max_loss, grad_norm, **kwargs):
        run.logged = loss, grad_norm
    run.metrics_processor.log = log
    return run


def step(run, inputs, targets):
    dp = run.parallel_dims.get_mesh("batch") if run.parallel_dims.dp_enabled else None
    rows = slice(None) if dp is None else slice(dp.get_local_rank(), None, dp.size())
    batches = zip(inputs[rows].chunk(run.gradient_accumulation_steps), targets[rows].chunk(run.gradient_accumulation_steps))
    run.train_step(({"input": x, "positions": torch.arange(SEQ).expand(len(x), SEQ)}, y) for x, y in batches)
    return run.logged


def parts(run):
    return ((name, param, param.grad, None) for part in run.model_parts for name, param in part.named_parameters())


def place(run):
    return {name: mesh.get_local_rank() for name, mesh in run.parallel_dims.get_all_one_dimensional_meshes().items()
            if name in ("dp_replicate", "fsdp", "tp")}


def modules(run):
    return [(name, module) for part in run.model_parts for name, module in part.named_modules()]
