"""The output projection and the cross-entropy in one, a chunk of tokens at a time.

With a vocabulary of 128K the logits of one sequence of 8,192 tokens are 4 GiB in float32, and their gradient
as much again. Here a chunk's logits become its loss and its gradients at once and are dropped, so neither
ever exists whole.
"""
import torch
from torch import nn

CHUNK = 2**27                                                                    # logits that exist at a time


def cross_entropy(logits, targets):                                                # [tokens, vocab], [tokens]
    """The sum of -log softmax(logits)[target], and its gradient, softmax(logits) - onehot(target)."""
    target = targets.unsqueeze(-1)
    log_probability = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    loss = -log_probability.gather(-1, target).sum()
    gradient = log_probability.exp_()
    return loss, gradient.scatter_add_(-1, target, gradient.new_full(target.shape, -1.0))


class ChunkedLoss(torch.autograd.Function):
    """Forward computes the loss and the gradients of both inputs; backward has only to scale them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, cross_entropy):              # [tokens, hidden], [vocab, hidden]
        loss, grad_hidden = 0, torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        size = max(1, CHUNK // weight.shape[0])
        if size > 128:
            size -= size % 128                            # a GPU makes products in tiles of 128
        for x, target, grad_x in zip(hidden.split(size), targets.split(size), grad_hidden.split(size)):
            chunk_loss, grad_logits = cross_entropy(x @ weight.T, target)
            grad_logits = grad_logits.to(weight.dtype)                             # [chunk, vocab]
            grad_x.copy_(grad_logits @ weight)
            grad_weight += grad_logits.T @ x
            loss = loss + chunk_loss
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():                # backward may come again
            grad_hidden, grad_weight = grad_hidden.clone(), grad_weight.clone()
        return grad_hidden.mul_(grad_loss), grad_weight.mul_(grad_loss).type_as(grad_hidden), None, None


class LMHead(nn.Linear):
    def __init__(self, hidden_size, vocab_size):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.cross_entropy = cross_entropy

    def forward(self, hidden, targets=None):                              # [batch, seq, hidden], [batch, seq]
        if targets is None:
            return super().forward(hidden)
        return ChunkedLoss.apply(hidden.flatten(0, -2), self.weight, targets.flatten(), self.cross_entropy)
