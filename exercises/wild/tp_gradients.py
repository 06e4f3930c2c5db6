"""transformers' tensor parallelism sums the gradients of some norms again in every micro-batch, and those of others never.

    torchrun --nproc_per_node 2 exercises/wild/tp_gradients.py qwen3 4             # and with 1 micro-batch, which is right
    torchrun --nproc_per_node 2 exercises/wild/tp_gradients.py apertus 1           # or phi, glm4_moe

Compare the gradients on two CPU ranks with those of the same model, whole. Run with transformers 5.24.0 and torch 2.13.0.
"""
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

kind, micro_batches = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
more = dict(phi=dict(qk_layernorm=True, head_dim=8), glm4_moe=dict(
    use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=2))
config = AutoConfig.for_model(kind, **dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None) | more.get(kind, {}))
torch.manual_seed(0)
dist.broadcast_object_list(folder := [tempfile.mkdtemp()])
AutoModelForCausalLM.from_config(config).double().save_pretrained(folder[0])       # on rank 0
dist.barrier()
load = dict(dtype=torch.float64, experts_implementation="eager")
whole = AutoModelForCausalLM.from_pretrained(folder[0], **load).eval()             # eval: without dropout
cut = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=DistributedConfig(tp_size=2), **load).eval()
tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
for model in (whole, cut):
    for part in tokens.chunk(micro_batches):
        (model(input_ids=part, labels=part).loss / micro_batches).backward()
for (name, param), right in zip(cut.named_parameters(), whole.parameters()):
    grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
    dist.all_reduce(total := grad.clone())
    wrong, of_sum = (float((each - right.grad).norm() / right.grad.norm()) for each in (grad, total))
    if dist.get_rank() == 0 and wrong > 1e-9:
        print(f"{name}: off by {wrong:.2g}; the sum over both ranks is off by {of_sum:.1g}", flush=True)
dist.destroy_process_group()
