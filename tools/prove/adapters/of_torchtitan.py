"""torchtitan, as it is installed: fsdp= ddp= tp= cp= pp= acc= schedule=Interleaved1F1B reshard=always.

    python -m pip install torchtitan==0.2.2
    python tools/prove tools/prove/adapters/of_torchtitan.py --world 4 --flags "fsdp=2 tp=2"

Its own Trainer.train_step trains its own llama3, both unchanged. Only the constructor is replaced, by those of its lines that need
no tokenizer, no text, no checkpoint and no GPU.
"""
import contextlib
import importlib.util
import sys
from unittest.mock import MagicMock

import torch
import torch._utils
import torch.distributed as dist

NEEDS = "torchtitan==0.2.2"
BATCH, SEQ, VOCAB, LAYERS = 8, 16, 64, 4
if importlib.util.find_spec("triton") is None:            # it imports Triton for its experts, which this model does not have
    sys.modules |= {"triton": MagicMock(), "triton.language": MagicMock()}
torch._utils._get_available_device_type = lambda: "cpu"   # otherwise it takes cuda, even where there is none
import torchtitan.train as titan  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402


class Trainer(titan.Trainer):
    def __init__(self, flags):
        degrees = {name: flags.get(flag, 1) for name, flag in (("dp_replicate", "ddp"), ("dp_shard", "fsdp"), ("cp", "cp"),
                                                               ("tp", "tp"), ("pp", "pp"))}
        self.gradient_accumulation_steps = flags.get("acc", 1)
        self.job_config = job = titan.JobConfig()
        job.training.dtype = job.training.mixed_precision_param = job.training.mixed_precision_reduce = flags["dtype"]
        titan.TORCH_DTYPE_MAP.setdefault("float64", torch.float64)
        job.training.local_batch_size = BATCH // (degrees["dp_shard"] * degrees["dp_replicate"] * self.gradient_accumulation_steps)
        job.training.seq_len, job.training.max_norm = SEQ, float("inf")
        job.parallelism.fsdp_reshard_after_forward = flags.get("reshard", "default")
        job.parallelism.pipeline_parallel_degree = degrees["pp"]
        job.parallelism.pipeline_parallel_schedule = flags.get("schedule", "1F1B")
        job.activation_checkpoint.mode = flags.get("recompute", "none")
        job.optimizer.lr, job.optimizer.implementation = 1e-2, "for-loop"

        self.device = torch.device("cpu")
        self.parallel_dims = dims = titan.ParallelDims(**degrees, ep=1, etp=1, world_size=dist.get_world_size())
        dims.build_mesh()
        spec = get_train_spec()
        self.model_args = TransformerModelArgs(dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, multiple_of=16,
                                               max_seq_len=SEQ)
        titan.dist_utils.set_determinism(dims, self.device, job.debug, distinct_seed_mesh_dims=["pp"])
        with torch.device("meta"), titan.utils.set_default_dtype(getattr(torch, flags["dtype"])):
            model = spec.model_cls(self.model_args)
        self.loss_fn = spec.build_loss_fn(job, parallel_dims=dims)
        if dims.pp_enabled:
            self.pp_schedule, self.model_parts, self.pp_has_first_stage, self.pp_has_last_stage = spec.pipelining_fn(
                model, dims, job, self.device, self.model_args, spec.parallelize_fn, self.loss_fn)
        else:
            self.model_parts = [spec.parallelize_fn(model, dims, job)]
        for part in self.model_parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
        self.optimizers = spec.build_optimizers_fn(self.model_parts, job.optimizer, dims)
        self.train_context = titan.dist_utils.get_train_context(dims.tp_enabled)
        self.maybe_enable_amp = contextlib.nullcontext()
        self.step = self.ntokens_seen = 0
        self.lr_schedulers, self.checkpointer, self.metrics_processor = MagicMock(), MagicMock(), MagicMock()
        self.metrics_processor.log = self.log

    def log(self, step, loss, max_loss, grad_norm, extra_metrics):
        self.logged = loss if not self.parallel_dims.pp_enabled or self.pp_has_last_stage else None, grad_norm


def build(flags):
    dist.init_process_group("gloo")
    return Trainer(flags)


def step(run, inputs, targets):
    dp = run.parallel_dims.get_optional_mesh("batch")
    rows = slice(None) if dp is None else slice(dp.get_local_rank(), None, dp.size())
    batches = zip(inputs[rows].chunk(run.gradient_accumulation_steps), targets[rows].chunk(run.gradient_accumulation_steps))
    run.train_step(({"input": x}, y) for x, y in batches)
    return run.logged


def parts(run):
    for part in run.model_parts:
        for name, param in part.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), param, param.grad, None


def place(run):
    return {name: mesh.get_local_rank() for name, mesh in run.parallel_dims.get_all_one_dimensional_meshes().items()
            if name in ("dp_replicate", "fsdp", "cp", "tp", "pp")}


def modules(run):
    return [(name, module) for part in run.model_parts for name, module in part.named_modules()]
