"""picotron, from your checkout (PICOTRON=folder in the environment), in its CPU mode: dp= cp= tp= pp= acc= engine=afab or 1f1b.

    git clone https://github.com/huggingface/picotron
    PICOTRON=picotron python tools/prove tools/prove/adapters/of_picotron.py --world 2 --flags "pp=2 acc=4"

This was written for its commit 59714b1, and changes nothing in it. build does what lines 169 to 209 of its train.py do.
"""
import os
import sys
import tempfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

BATCH, SEQ, VOCAB, HIDDEN, LAYERS = 8, 16, 64, 32, 4
# it imports these on a CPU, too, and does not use them there
FLASH = ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.layer_norm")
sys.modules |= {name: MagicMock() for name in ("wandb", *(f"flash_attn{name}" for name in FLASH))}
torch.cuda.synchronize = lambda: None                     # its pp and cp call it in CPU mode, too
sys.path.insert(0, os.environ.get("PICOTRON", "picotron"))
os.environ.update(FLASH_ATTEN="0", DEVICE="cpu")
import picotron.process_group_manager as pgm  # noqa: E402
import train  # noqa: E402


def build(flags):
    tp, cp, pp, dp = sizes = [flags.get(dim, 1) for dim in ("tp", "cp", "pp", "dp")]
    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, rope_theta=1e4,
                             rms_norm_eps=1e-5, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ)
    dist.init_process_group("gloo")
    train.setup_process_group_manager(*sizes)
    train.set_all_seed(42)
    with train.init_model_with_dematerialized_weights():
        model = train.Llama(config)
        saved = {hub_name(name): torch.zeros(param.shape) for name, param in model.named_parameters()}
        model = train.apply_tensor_parallel(model) if tp > 1 else model
        model = train.PipelineParallel(model, config) if pp > 1 else model
    with tempfile.TemporaryDirectory() as folder:         # it takes names and shapes from a file, and draws the weights
        save_file(saved, f"{folder}/model.safetensors")
        model = train.init_model_with_materialized_weights(model, config, save_dir=folder)
    model = (train.apply_context_parallel(model) if cp > 1 else model).to(getattr(torch, flags["dtype"]))
    model = train.DataParallelBucket(model) if dp > 1 else model
    return SimpleNamespace(model=model.train(), adamw=torch.optim.AdamW(model.parameters(), lr=1e-2), pg=pgm.process_group_manager,
                           acc=flags.get("acc", 1), engine=getattr(train, f"train_step_pipeline_{flags.get('engine', '1f1b')}"))


def hub_name(name):
    for own, hub in (("decoder_layers", "model.layers"), ("attention.", "self_attn."), ("out_proj", "o_proj"),
                     ("embedding", "model.embed_tokens"), ("final_norm", "model.norm")):
        name = name.replace(own, hub)
    return name


def step(run, inputs, targets):
    getattr(run.model, "reset", lambda: None)()           # train.py does this and zeroes gradients at the end of a step
    run.adamw.zero_grad()
    pg, cpu, mine = run.pg, torch.device("cpu"), torch.arange(inputs.shape[1]).chunk(run.pg.cp_world_size)[run.pg.cp_rank]
    x, y = (t[pg.dp_rank::pg.dp_world_size][:, mine].contiguous().chunk(run.acc) for t in (inputs, targets))
    batches = iter([dict(input_ids=a, target_ids=b, position_ids=mine.expand(len(a), -1), hidden_states=None)
                    for a, b in zip(x, y)])
    loader = type("Loader", (), dict(grad_acc_steps=run.acc, __next__=lambda self: next(batches)))()
    if pg.pp_world_size == 1:
        loss = train.train_step(run.model, loader, cpu)
    else:
        loss = run.engine(run.model, loader, (len(x[0]), len(mine), HIDDEN), cpu, next(run.model.parameters()).dtype)
    loss = train.average_loss_across_dp_cp_ranks(loss, cpu)
    run.adamw.step()
    return loss if pg.pp_is_last_stage else None, None    # it computes no gradient norm


def parts(run):
    for path, module in modules(run):
        for name, param in module.named_parameters(path, recurse=False):
            # its row-parallel matrices are cut along dimension 1, the others along 0
            where = {int("Row" in type(module).__name__): module.tp_rank} if hasattr(module, "tp_rank") else None
            yield name, param, param.grad, where


def place(run):
    return {dim: getattr(run.pg, f"{dim}_rank") for dim in ("dp", "pp", "cp", "tp")}


def modules(run):
    return getattr(run.model, "module", run.model).named_modules()
