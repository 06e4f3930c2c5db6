"""transformers' own parallelism in a plain loop: tp= fsdp= replicas= ep= acc= (its DistributedConfig; on CPUs).

    python tools/prove tools/prove/adapters/hf_native.py --world 2 --flags tp=2

With tp=2 acc=4, this release is APART: docs/wild.md tells why.

Flags for the model, in --both: model=, one of MODELS (qwen3 by default); aux=1, with the router's auxiliary loss.
"""
import contextlib
import importlib
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

NEEDS = "transformers==5.24.0, accelerate==1.15.0"
BATCH, SEQ, VOCAB = 8, 16, 64
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, use_cache=False, tie_word_embeddings=False,
             attention_dropout=0.0, pad_token_id=None, bos_token_id=None, eos_token_id=None)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
MODELS = dict(llama={}, qwen3={}, apertus={}, phi=dict(qk_layernorm=True, head_dim=8),
              qwen3_moe=dict(num_experts=4, decoder_sparse_step=1, norm_topk_prob=True, **EXPERTS),
              glm4_moe=dict(use_qk_norm=True, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1,
                            n_shared_experts=1, **EXPERTS))
transformers.logging.set_verbosity_error()
for kind in MODELS:                                       # what is imported here, the ranks need not import
    importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


@contextlib.contextmanager
def shared_folder():
    """Yield a folder that all ranks see, and that is gone when all have left."""
    folder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    name = [folder and folder.name]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if folder:
        folder.cleanup()


def small_model(flags, **how):
    """Return a small model in the way that transformers shards one, which is to load it from a checkpoint."""
    kind = flags.get("model", "qwen3")
    config = AutoConfig.for_model(kind, **SMALL | MODELS[kind])
    if flags.get("aux"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.1
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=getattr(torch, flags["dtype"]),
                                                     experts_implementation="eager", **how)     # the others compute no float64
    return model.train()


def distributed(flags):
    """Return what from_pretrained needs to shard a model. One process gets a plain one."""
    sizes = dict(tp_size="tp", fsdp_size="fsdp", dp_replicate_size="replicas", ep_size="ep")
    sizes = {size: flags.get(flag, 1) for size, flag in sizes.items()}
    return dict(distributed_config=DistributedConfig(**sizes)) if dist.get_world_size() > 1 else {}


def build(flags):
    dist.init_process_group("gloo")
    model = small_model(flags, **distributed(flags))
    return SimpleNamespace(model=model, acc=flags.get("acc", 1), tp=flags.get("tp", 1), fsdp=flags.get("fsdp", 1),
                           aux=flags.get("aux", 0), adamw=torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))


def own_rows(run):
    """Return which sequences of the global batch this rank reads: tp ranks read the same."""
    return slice(dist.get_rank() // run.tp, None, dist.get_world_size() // run.tp)


def step(run, inputs, targets):
    run.adamw.zero_grad()
    count, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)      # of the global batch
    mine, dp = own_rows(run), dist.get_world_size() // run.tp
    micro_batches = [*zip(inputs[mine].chunk(run.acc), targets[mine].chunk(run.acc))]
    for i, (x, y) in enumerate(micro_batches):
        if hasattr(run.model, "set_requires_gradient_sync"):
            run.model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        out = run.model(input_ids=x)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="sum") / count
        if run.aux:
            loss = loss + 0.1 * out.aux_loss / run.acc / dp
        (loss * dp).backward()                            # FSDP averages over these ranks
        total += loss.detach()
    grads = [param.grad for param in run.model.parameters() if param.grad is not None]
    norm = torch.nn.utils.get_total_norm([grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads])
    run.adamw.step()
    dist.all_reduce(total)
    return total / run.tp, norm


def parts(run):
    return ((name, param, param.grad, None) for name, param in run.model.named_parameters())


def place(run):
    rank = dist.get_rank()
    return {"tp": rank % run.tp, "fsdp": rank // run.tp % run.fsdp, "replicas": rank // run.tp // run.fsdp}


def modules(run):
    return run.model.named_modules()
