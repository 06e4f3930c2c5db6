"""Buckets, as in torch's DDP: a few large all-reduces that travel while backward is still running.

    python step02_dp/by_hand_buckets.py
"""
from by_hand import dist, run, torch                        # by_hand.py runs first, and prints its lines

NUM_MICRO_BATCHES = 2


class Bucket:                                               # parameters whose gradients share one all-reduce
    def __init__(self, params):
        self.num_pending = NUM_MICRO_BATCHES * len(params)
        self.flat_grad = torch.zeros(sum(param.numel() for param in params))
        for param, view in zip(params, self.flat_grad.split([param.numel() for param in params])):
            param.grad = view.view_as(param)                # backward adds to the buffer itself: no copies
            param.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, param):
        self.num_pending -= 1
        if self.num_pending == 0:                           # after the last micro-batch: now the sum is final
            self.handle = dist.all_reduce(self.flat_grad, async_op=True)     # backward goes on meanwhile


def gradients(rank, world_size):
    torch.manual_seed(0)                                    # the same weights and batch on every rank
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), torch.randn(16, 8)
    params = list(model.parameters())[::-1]                 # backward makes the last layer's gradients first
    buckets = [Bucket(params[:4]), Bucket(params[4:])]
    for x in batch.chunk(world_size)[rank].chunk(NUM_MICRO_BATCHES):
        ((model(x) - x.sin()).square().sum() / len(batch)).backward()
    for bucket in buckets:                                  # the optimizer must not start before this
        bucket.handle.wait()
    return torch.cat([bucket.flat_grad for bucket in buckets]).tolist()


torch.testing.assert_close(run(gradients, 4), 4 * run(gradients, 1))
print("two buckets on four ranks: the gradients of one process")
