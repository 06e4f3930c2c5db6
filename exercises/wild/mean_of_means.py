"""OLMo-core divides the loss of each data-parallel rank by that rank's own number of targets, and then takes a mean over the ranks.

    torchrun --nproc_per_node 2 exercises/wild/mean_of_means.py

Rank 0 has 15 targets, and rank 1 has 3. Run with ai2-olmo-core 3.0.0 and torch 2.13.0, on two CPU ranks.
"""
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module.transformer import TransformerTrainModule
from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig

dist.init_process_group("gloo")
torch.manual_seed(0)
config = TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=1, n_heads=4, attn_backend=AttentionBackendName.torch)
trainer = TransformerTrainModule(config.build(), AdamWConfig(), rank_microbatch_size=16, max_sequence_length=16,
                                 device=torch.device("cpu"),
                                 dp_config=TransformerDataParallelConfig(name=DataParallelType.ddp))
trainer._trainer = MagicMock()                            # it would only log
tokens, labels = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
labels[0, 15:] = labels[1, 3:] = -100


def gradient(counts):
    """Return the head's gradient on one process; counts says by how many targets each sequence is divided."""
    whole = config.build()
    whole.load_state_dict(trainer.model.state_dict())
    losses = torch.nn.functional.cross_entropy(whole(tokens).transpose(1, 2), labels, reduction="none").sum(1)
    (losses / torch.tensor(counts)).sum().backward()
    return whole.lm_head.w_out.weight.grad


right, of_means, rank = gradient([18, 18]), gradient([2 * 15, 2 * 3]), dist.get_rank()
trainer.train_batch(dict(input_ids=tokens[rank:rank + 1], labels=labels[rank:rank + 1]))
for name, each in (("mean over 18 targets", right), ("mean of the ranks' means", of_means)):
    if rank == 0:
        print(f"off from the {name} by {(trainer.model.lm_head.w_out.weight.grad - each).norm() / each.norm():.1g}", flush=True)
