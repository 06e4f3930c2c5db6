"""Training by hand: forward, backward and AdamW without autograd, with a count of every byte that they keep.

    python step01_single_gpu/by_hand.py
"""
import gc
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

VOCAB, HIDDEN, INNER, BATCH, LR = 256, 64, 192, 512, 0.01
SHAPES = dict(embed=(VOCAB, HIDDEN), up=(HIDDEN, INNER), down=(INNER, HIDDEN), head=(HIDDEN, VOCAB))
torch.manual_seed(0)
FIRST = {name: torch.randn(shape) / 8 for name, shape in SHAPES.items()}   # the weights to begin with
TEXT = torch.tensor(list(topics["import"].encode()[:10 * BATCH + 1]))      # a token is a byte
BATCHES = list(zip(TEXT[:-1].split(BATCH), TEXT[1:].split(BATCH)))         # ten pairs of (tokens, targets)
gc.freeze()                                                                # live_bytes counts from here on


def live_bytes():                                                          # shared memory counts once
    return sum({x.data_ptr(): x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor}.values())


def forward(w, tokens):
    x = w["embed"][tokens]                                                 # [tokens, hidden]
    up = x @ w["up"]                                                       # [tokens, inner]
    act = F.silu(up)                                                       # up x sigmoid(up)
    out = x + act @ w["down"]                                              # [tokens, hidden]
    return out @ w["head"], (x, up, act, out)                              # [tokens, vocab]; the activations


def backward(w, tokens, kept, grad, main_grad):
    x, up, act, out = kept                                                 # what backward needs from forward
    main_grad["head"] += out.T @ grad
    grad = grad @ w["head"].T
    main_grad["down"] += act.T @ grad
    grad_up = grad @ w["down"].T * up.sigmoid() * (1 + up - act)           # the derivative of silu
    main_grad["up"] += x.T @ grad_up
    main_grad["embed"].index_add_(0, tokens, (grad + grad_up @ w["up"].T).float())


def micro_batch(w, tokens, targets, main_grad):
    logits, kept = forward(w, tokens)
    log_p = logits.float().log_softmax(-1)
    grad = (log_p.exp() - F.one_hot(targets, VOCAB)) / BATCH               # by ALL tokens of the batch
    backward(w, tokens, kept, grad.to(logits.dtype), main_grad)
    return F.nll_loss(log_p, targets, reduction="sum").item() / BATCH, sum(x.nbytes for x in kept)


def train(dtype, size, persistent_bytes):
    master = {name: weight.clone() for name, weight in FIRST.items()}
    w = {name: weight.to(dtype) for name, weight in master.items()}        # in float32, this is master itself
    main_grad, m, v = ({name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(3))
    for step, (tokens, targets) in enumerate(BATCHES, 1):
        losses, kept = zip(*[micro_batch(w, *part, main_grad)
                             for part in zip(tokens.split(size), targets.split(size))])
        for name, grad in main_grad.items():                               # AdamW
            m[name].lerp_(grad, 0.1)                                       # the running mean of gradients
            v[name].lerp_(grad**2, 0.05)                                   # and that of their squares
            master[name] *= 1 - LR * 0.1                                   # weight decay
            master[name] -= LR * m[name] / (1 - 0.9**step) / ((v[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            w[name].copy_(master[name])                                    # rounded, if w is bfloat16
            grad.zero_()
    stays = live_bytes() / sum(weight.numel() for weight in FIRST.values())
    print(f"{dtype}, {size} at a time: loss {sum(losses):.3f}; {stays:.0f} bytes per parameter persist, "
          f"{max(kept):,} bytes of activations are freed")
    assert stays == persistent_bytes and max(kept) == size * dtype.itemsize * (2 * HIDDEN + 2 * INNER)
    return master


train(torch.bfloat16, 512, 18)
train(torch.bfloat16, 128, 18)
by_hand = train(torch.float32, 128, 16)
w = {name: weight.clone().requires_grad_() for name, weight in FIRST.items()}
optimizer = torch.optim.AdamW(w.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
for tokens, targets in BATCHES:                                            # with autograd, on whole batches
    F.cross_entropy(forward(w, tokens)[0], targets).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.testing.assert_close(by_hand, w, rtol=0, atol=1e-5)
print("The weights equal those that autograd and torch.optim.AdamW compute from whole batches.")
