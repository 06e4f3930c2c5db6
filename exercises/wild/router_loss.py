"""transformers' Trainer counts a router's auxiliary loss once for every micro-batch and every rank, whatever its coefficient says.

    python exercises/wild/router_loss.py
    torchrun --nproc_per_node 2 exercises/wild/router_loss.py

All micro-batches of all ranks are equal, so nothing may depend on their number. Run with transformers 5.24.0, accelerate 1.15.0 and
torch 2.13.0, on CPUs.
"""
import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


class Kept(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.grad = model.model.layers[0].mlp.gate.weight.grad.clone()


def gradient(coefficient, micro_batches):
    """Return the router's gradient in the first step of training."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, use_cache=False,
        output_router_logits=True, router_aux_loss_coef=coefficient))
    args = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                             max_steps=1, max_grad_norm=1e9, gradient_accumulation_steps=micro_batches)
    batches = [dict(input_ids=tokens, labels=tokens)] * micro_batches
    trainer = Trainer(model, args, train_dataset=batches, callbacks=[kept := Kept()])
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.train()
    return trainer.accelerator.num_processes, trainer.is_world_process_zero(), kept.grad


for micro_batches in (1, 2, 4, 8):
    (ranks, first, with_loss), (*_, without) = gradient(0.01, micro_batches), gradient(0.0, micro_batches)
    if first:
        norm = (with_loss - without).norm()
        print(f"{ranks} ranks, {micro_batches} micro-batches: the auxiliary loss moves the router by {norm:.6f}", flush=True)
