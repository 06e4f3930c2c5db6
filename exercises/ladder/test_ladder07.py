"""The ladder of step 7: many experts instead of an MLP, spread over ranks. Each test is a rung; exercise.py explains how to use
them."""
import contextlib
import math
from types import SimpleNamespace
from unittest.mock import patch

import layouts
import pytest
from exercise import rung
from observe import check

STEP = "step07_ep"


def rounded(tensor):
    """Convert to rounded lists, to compare and to print."""
    import torch
    return torch.round(tensor.detach().double(), decimals=4).add(0.0).tolist()


def tensor_from(name, value, shape=None):
    """Return what the function of this name returned, if it is a tensor, and of this shape."""
    import torch
    found = "None" if value is None else f"a {type(value).__name__}"
    assert isinstance(value, torch.Tensor), f"{name} returned {found}, not a tensor"
    assert shape in (None, list(value.shape)), f"{name} returned a tensor of shape {list(value.shape)}, not {shape}"
    return value


def start(ranks):
    """Return the group of these ranks, or on any other rank a group of its own."""
    import torch.distributed as dist
    dist.init_process_group("gloo")
    groups = {tuple(some): dist.new_group(some) for some in (ranks, *([i] for i in range(dist.get_world_size()) if i not in ranks))}
    dist.barrier()                                        # no group may end while the other still connects
    return next(group for some, group in groups.items() if dist.get_rank() in some)


@contextlib.contextmanager
def watched():
    """Yield what is done meanwhile: collectives, each with the number of ranks and of elements that this one gives; products; and
    waits of the CPU for the values of a tensor."""
    import torch
    from watch import Watch, collective_of, tensors
    done = SimpleNamespace(sent=[], products=[], waits=[], largest=0)
    needs_values = "_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave"

    def before(op, args, kwargs):
        name, collective = op._opname, collective_of(op, args)
        if collective and name != "barrier":
            done.sent.append((collective.what, collective.group.size(), sum(tensor.numel() for tensor in collective.payload)))
        masked = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in needs_values and kwargs.get("output_size") is None:
            done.waits.append(name.strip("_"))

    def after(op, args, kwargs, out):
        if op._opname in ("mm", "addmm", "bmm", "mv", "dot"):
            done.products.append((op._opname, out.numel()))
        done.largest = max([done.largest, *(tensor.numel() for tensor in tensors([out]))])

    def waiting(name, method):
        def noting(tensor):
            done.waits.append(name)
            with torch._C.DisableTorchFunction():         # otherwise it would be noted again
                return method(tensor)
        return noting

    def one_hot(tensor, num_classes=-1):                  # on a GPU it reads no value if it gets num_classes
        assert num_classes > 0, "tell one_hot how many experts there are, or the CPU waits to see the largest number"
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()
    names = "tolist", "numpy"
    with patch.multiple(torch.Tensor, **{name: waiting(name, getattr(torch.Tensor, name)) for name in names}), \
            patch.object(torch.nn.functional, "one_hot", one_hot), Watch(before, after):
        yield done


def assert_nobody_waits(what, run):
    """Run on the meta device, where tensors have no values: asking for one raises an error."""
    try:
        run()
    except (RuntimeError, NotImplementedError) as error:  # torch._unique2, bincount ...: "attempted to run"
        words = "meta tensor", "out of meta", "Meta tensors", "register_meta", "data-dependent"
        if isinstance(error, NotImplementedError) and "rung" in str(error) or not any(word in str(error) for word in words):
            raise
        raise AssertionError(
            f"in {what} the CPU waits for the GPU, to read a tensor, or a tensor is made without device=: no .item(), .tolist(), "
            f"nonzero, mask or bincount is needed; and tell one_hot how many experts there are ({error})") from None


# ------------------------------------------------------------------------------------------------ the layer
def product_job():
    """Run three experts that map two numbers to one. Return the products of five rows, and the gradient of the weights."""
    import moe
    import torch
    weight = torch.tensor([[[1.0, 0.0]], [[7.0, 7.0]], [[1.0, 10.0]]], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0], [2.0, 1.0], [5.0, 3.0]], dtype=torch.float64)
    counts = torch.tensor([2, 0, 3])
    grad = torch.tensor([[1.0], [10.0], [1.0], [10.0], [100.0]], dtype=torch.float64)
    x.requires_grad_(), weight.requires_grad_()
    product = tensor_from("grouped_product", moe.grouped_product(x, weight, counts), [5, 1])
    assert product.requires_grad, "the product has no history, so autograd cannot make the gradients of the rows and the weight"
    learned = torch.autograd.grad(product, (x, weight), grad, allow_unused=True)
    none = torch.zeros(3, dtype=torch.int64)
    try:
        nothing = tensor_from("without rows, grouped_product", moe.grouped_product(x[:0], weight, none))
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"a rank may get no rows at all: then return a product without rows; this raised: {error}") from None
    at_rest = torch.autograd.grad(nothing.sum(), weight, allow_unused=True)[0] if nothing.requires_grad else None
    x, weight = x.detach(), weight.detach()
    out, did = tensor_from("grouped_weight_grad", moe.grouped_weight_grad(grad, x, weight, counts), [3, 1, 2]), {}
    no_rows = tensor_from("without rows, grouped_weight_grad", moe.grouped_weight_grad(grad[:0], x[:0], weight, none))
    empty = [list(nothing.shape), at_rest is not None and at_rest.tolist(), no_rows.tolist()]
    wide = [torch.ones(shape, dtype=torch.float64) for shape in ((5, 3), (5, 4), (3, 3, 4))]
    for name, call in dict(grouped_product=lambda: moe.grouped_product(*wide[1:], counts),
                           grouped_weight_grad=lambda: moe.grouped_weight_grad(*wide, counts)).items():
        with watched() as done:
            made = call()
        did[name] = done.products, done.waits, done.largest, str(made.dtype)
    return product.tolist(), out.tolist(), [grad is not None and grad.tolist() for grad in learned], empty, did, short_job()


def short_job():
    """Return how far products and both gradients are from those of single linears, in bfloat16 and in sizes that the grouped kernel
    supports."""
    import moe
    import torch
    from torch.nn.functional import linear
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((24, 16), (3, 8, 16), (24, 8)))
    counts = torch.tensor([10, 0, 14])
    per_expert = list(zip(x.float().split([10, 0, 14]), weight.float(), grad.float().split([10, 0, 14])))
    product = tensor_from("grouped_product", moe.grouped_product(x, weight.requires_grad_(), counts), [24, 8])
    learned, = torch.autograd.grad(product, weight, grad)
    by_hand = tensor_from("grouped_weight_grad", moe.grouped_weight_grad(grad, x, weight.detach(), counts), [3, 8, 16])
    right = torch.cat([linear(rows, one) for rows, one, _ in per_expert])
    gradient = torch.stack([of_rows.T @ rows for rows, _, of_rows in per_expert])
    return [float((came.detach().float() - wanted.detach()).abs().max() / wanted.detach().abs().max())
            for came, wanted in ((product, right), (learned, gradient), (by_hand, gradient))]


@rung({"moe.py": ["grouped_product", "grouped_weight_grad"]}, hints="""
    The first tokens_per_expert[0] rows belong to expert 0, the next tokens_per_expert[1] rows to expert 1, and so on. Each expert
    is a linear without bias. So split the rows by expert, and think of one expert alone: what is its product, and what is the
    gradient of its weight?

    `x.split(tokens_per_expert.tolist())` returns the rows of each expert; one may have no rows. The product of one expert is
    `F.linear(rows, one)`. The gradient of its weight is the outputs' gradient, transposed, times its rows. Join the products of all
    experts with torch.cat, and their gradients with torch.stack.

    grouped_product: `torch.cat([F.linear(rows, one) for rows, one in zip(x.split(tokens_per_expert.tolist()), weight)])`.
    grouped_weight_grad: with sizes = tokens_per_expert.tolist(), `torch.stack([grad.T @ rows for grad, rows in
    zip(grad.split(sizes), x.split(sizes))])`. (If supports_grouped_mm(weight), ours calls F.grouped_mm, which does the same in one
    kernel, and then zeroes the gradients of experts without rows, which that kernel may leave unwritten. The loop is enough
    here.)""")
def test_one_product_per_expert(pool):
    """Write `grouped_product(x, weight, tokens_per_expert)`. The rows of x, [rows, in], are sorted by expert, and tokens_per_expert
    says how many each expert has. Each expert multiplies its rows by its own weight, weight[e], of shape [out, in], as F.linear
    does. Return the result, [rows, out], in the same order. Write `grouped_weight_grad(grad, x, weight, tokens_per_expert)`. It
    returns the gradient of weight, [experts, out, in], where grad is the gradient of the result. An expert without rows gets a
    gradient of zeros, even if no expert has any rows. A loop over experts is good enough, with one product for each.
    tokens_per_expert.tolist() makes the CPU wait for the GPU: call it once, not once per expert."""
    (product, gradient, learned, empty, did, short), = pool.call(product_job, STEP)
    begin = ("Experts 0, 1, 2 have the weights [[1, 0]], [[7, 7]], [[1, 10]] and 2, 0, 3 rows; the rows are [1, 2], [3, 4], "
             "[1, 1], [2, 1], [5, 3].")
    right = [[1], [3], [11], [12], [35]]
    assert product == right, f"{begin} The product is {right}, not {product}"
    right = [[[31, 42]], [[0, 0]], [[521, 311]]]
    assert gradient == right, \
        f"{begin} If the products have the gradients 1, 10, 1, 10, 100, those of the weights are {right}, not {gradient}"
    right = [[[1, 0], [10, 0], [1, 10], [10, 100], [100, 1000]], right]
    assert learned == right, f"{begin} With these gradients, autograd gives rows and weights {right}, not {learned}"
    right = [[0, 1], [[[0, 0]]] * 3, [[[0, 0]]] * 3]
    assert empty == right, ("if a rank gets no rows at all, the product has the shape [0, 1], autograd's gradient of the "
                            f"weight is zero, and so is grouped_weight_grad: {right}; got {empty}")
    for name, off in zip(("grouped_product", "its gradient of the weight", "grouped_weight_grad"), short):
        assert off < 0.02, f"24 rows of 16 numbers, experts with 10, 0 and 14 of them, in bfloat16: {name} is off by {off:.2g}"
    for name, (products, waits, largest, dtype) in did.items():
        made, most = sum(size for _, size in products), 15 if name == "grouped_product" else 36
        assert dtype == "torch.float64", f"{name} of float64 is {dtype}: make tensors in the dtype of x (x.new_zeros, zeros_like)"
        begin = f"five rows of 4 numbers, three experts that map 4 numbers to 3, so with 12 weights each: {name}"
        assert largest <= 36, f"{begin} makes a tensor of {largest} numbers, more than all weights have; it needs none so large"
        assert len(products) <= 3 and made <= most, \
            f"{begin} needs one product per expert, of its own rows, {most} numbers in all; got (kind, size) {products}"
        assert len(waits) <= 2, (f"in {name} the CPU waits for the GPU {len(waits)} times, by {', '.join(waits)}: call "
                                 "tokens_per_expert.tolist() once")


def layer_config(**changes):
    return SimpleNamespace(**dict(hidden_size=2, num_local_experts=3, num_experts_per_tok=2, intermediate_size=2) | changes)


def layer_job():
    """Run a layer with a recorder in place of its three experts. It multiplies the rows of expert e by 10 to the power e."""
    import moe
    import torch
    from torch import nn

    class Recorder(nn.Module):
        def forward(self, x, counts):
            self.seen = [rows.tolist() for rows in x.split(counts.tolist())]
            factor = torch.repeat_interleave(10 ** torch.arange(len(counts)), counts)
            return x * factor.unsqueeze(-1).type_as(x)
    layer = moe.MoE(layer_config()).double()
    layer.experts = Recorder()
    layer.gate.weight.data = torch.tensor([[3.0, 1 / 3], [1, 1], [1 / 3, 3]], dtype=torch.float64).log()
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]]], dtype=torch.float64)          # [batch, seq, hidden]
    out = tensor_from("MoE.forward", layer(x), [2, 2, 2])
    if out.requires_grad:
        out.sum().backward()
    found = {"usual": (layer.experts.seen, rounded(out))}
    learns = layer.gate.weight.grad is not None and bool(layer.gate.weight.grad.abs().sum() > 0.1)
    for name, numbers in dict(chosen=[2, 1], one=[1]).items():
        layer.choose = lambda logits, numbers=numbers: (torch.tensor(numbers).expand(2, 2, len(numbers)), logits)
        out = layer(x)
        found[name] = layer.experts.seen, rounded(out)
    assert learns, "self.gate has no gradient: the router learns through the routing weights; compute them from its logits"
    hooked = {}

    def choose_and_add(logits):                           # as the auxiliary loss does
        assert logits.requires_grad, "choose gets logits without a history: --balance aux adds to their gradient, so do not detach"
        hooked.update(logits=logits)
        logits = logits.view_as(logits)                   # others than it was given
        logits.register_hook(lambda grad: grad + 1)
        return logits.topk(2).indices, logits
    for wide in (x, x.float()):
        layer, layer.gate.weight.grad = layer.to(wide.dtype), None
        leaf = wide.clone().requires_grad_()
        layer.choose = choose_and_add
        layer(leaf).backward(torch.arange(1.0, 9).view(2, 2, 2).to(wide.dtype))
        assert hooked["logits"].dtype == wide.dtype, f"in {wide.dtype} choose gets logits in {hooked['logits'].dtype}"
    logits = (dense := x.clone().requires_grad_()) @ (gate := layer.gate.weight.detach().double().requires_grad_()).T
    weights = logits.masked_fill(logits < logits.topk(2).values[..., 1:], -math.inf).softmax(-1)
    out = (weights * torch.tensor([1.0, 10, 100])).sum(-1, keepdim=True) * dense
    torch.autograd.backward([out, logits], [torch.arange(1.0, 9).view(2, 2, 2).double(), torch.ones_like(logits)])
    grads = [[[round(n, 1) for n in tensor.flatten().tolist()] for tensor in pair]
             for pair in ((leaf.grad, layer.gate.weight.grad), (dense.grad, gate.grad))]
    dtypes = []
    layer = layer.bfloat16()
    layer.choose = lambda logits: dtypes.append(logits.dtype) or (logits.topk(2).indices, logits)
    dtypes.append(layer(x.bfloat16()).dtype)
    meta = moe.MoE(layer_config()).to("meta")
    calls = []
    meta.experts.forward = lambda x, counts: calls.append("self.experts") or x
    meta.dispatch = lambda experts, x, counts: calls.append((experts is meta.experts, list(counts.shape))) or x
    assert_nobody_waits("MoE.forward", lambda: meta(torch.empty(2, 2, 2, device="meta")))
    assert calls == [(True, [3])], ("self.dispatch must be called once, with self.experts, the rows, and tokens_per_expert of all "
                                    f"3 experts; calls (whether self.experts is given, shape of tokens_per_expert): {calls}")
    experts = moe.Experts(layer_config(hidden_size=1, intermediate_size=1)).double()
    for linear, weights in ((experts.gate_proj, (1, 2, 9)), (experts.up_proj, (3, 1, 9)), (experts.down_proj, (1, 5, 9))):
        linear.weight.data = torch.tensor(weights, dtype=torch.float64).view(3, 1, 1)
    called, forward = [], moe.GroupedLinear.forward
    with patch.object(moe.GroupedLinear, "forward", lambda linear, *args: called.append(linear) or forward(linear, *args)):
        rows = experts(torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([1, 1, 0]))
    return found, grads, [str(dtype) for dtype in dtypes], rounded(tensor_from("Experts.forward", rows)), len(called)


@rung({"moe.py": ["MoE.forward", "Experts.forward"]}, hints="""
    Every token appears top_k times, once for each expert that is selected for it. Write down the pairs (token, choice) in a row,
    with the expert of each. The experts need this row sorted by expert. Afterwards their results must go back into the order of
    the row. Then add up the results of each token, each multiplied by its routing weight. How can you sort the rows, and how can
    you undo it?

    `order = selected_experts.flatten().argsort(stable=True)` sorts the pairs, and pair number p belongs to token p // top_k. If
    rows were taken in the order `order`, then taking them again in the order `order.argsort()` undoes it. The routing weights are
    the softmax over the logits of the selected experts alone: `logits.gather(-1, selected_experts)`. The number of rows of each
    expert: `F.one_hot(selected_experts, number of experts)`, summed over all dimensions but the last.

    logits = self.gate(x) in float32 or wider; selected_experts, logits = self.choose(logits); routing_weights = logits.gather(-1,
    selected_experts).softmax(-1).type_as(x); order and tokens_per_expert as above; x = x.flatten(0, 1).index_select(0, order //
    selected_experts.shape[-1]); out = self.dispatch(self.experts, x, tokens_per_expert).index_select(0,
    order.argsort()).view(*selected_experts.shape, -1); return (out * routing_weights.unsqueeze(-1)).sum(-2). Experts.forward, with
    n = tokens_per_expert: self.down_proj(F.silu(self.gate_proj(x, n)) * self.up_proj(x, n), n).""")
def test_each_token_meets_its_experts(pool):
    """Write `MoE.forward(x)` for x of [batch, seq, hidden]. self.gate computes one logit per expert for each token; convert them to
    float32 or wider. `self.choose(logits)` returns the numbers of the experts that are selected for each token, [batch, seq,
    top_k], and the logits, from which the routing weights must come (--balance aux adds to their gradient). The routing weights of
    a token are the softmax over the logits of its top_k experts, in x's dtype. self.dispatch(self.experts, rows, tokens_per_expert)
    takes the tokens' rows sorted by expert (a token appears once for each of its experts), and how many rows each expert has; it
    returns the experts' results. Bring them back to the tokens: the layer's output for each token is the sum of routing weight
    times result. The CPU must never wait for the GPU, so do not call functions that read a tensor's values, as bincount does. Write
    `Experts.forward(x, tokens_per_expert)`, a SwiGLU like the MLP: down_proj of silu(gate_proj x) times up_proj x."""
    (found, grads, (of_logits, of_output), swiglu, called), = pool.call(layer_job, STEP)
    begin = ("The tokens of two sequences are [1, 0], [0, 1] and [2, 0], [0, 2]; their logits are the logarithms of 3 1 1/3, "
             "1/3 1 3, 9 1 1/9, 1/9 1 9")
    right = {"usual": ([[[1, 0], [2, 0]], [[1, 0], [0, 1], [2, 0], [0, 2]], [[0, 1], [0, 2]]],
                       [[[3.25, 0], [0, 77.5]], [[3.8, 0], [0, 182]]]),
             "chosen": ([[], *[[[1, 0], [0, 1], [2, 0], [0, 2]]] * 2], [[[32.5, 0], [0, 77.5]], [[38, 0], [0, 182]]]),
             "one": ([[], [[1, 0], [0, 1], [2, 0], [0, 2]], []], [[[10, 0], [0, 10]], [[20, 0], [0, 20]]])}
    for how, (rows, out) in right.items():
        chosen = {"usual": "and the two best experts are selected.", "chosen": "but self.choose returns 2 and 1 for all tokens.",
                  "one": "but self.choose returns 1, one expert for each token."}[how]
        came, out_came = found[how]
        assert [sorted(of_one) for of_one in came] == [sorted(of_one) for of_one in rows], \
            f"{begin}, {chosen} Experts 0, 1, 2 should get the rows {rows}, not {came}"
        assert out_came == out, (f"{begin}, {chosen} The better and the worse expert have the routing weights 3/4 and 1/4, or 9/10 "
                                 "and 1/10; a single one has 1. "
                                 f"If expert e multiplies by 10 to the power e, the output is {out}, not {out_came}")
    for what, came, right in zip(("x", "self.gate.weight"), *grads):
        assert came == right, (f"{begin}; the output has the gradients 1 to 8, and choose returns logits to whose gradients it "
                               f"adds 1. Then {what} has the gradients {right}, not {came}: they come through the experts and "
                               "through the routing weights, which must be computed from the logits that choose returns")
    assert (of_logits, of_output) == ("torch.float32", "torch.bfloat16"), \
        f"in bfloat16, choose should get float32 logits, and the output should be in bfloat16; they are {of_logits} and {of_output}"
    silu = [x / (1 + math.exp(-x)) for x in (1, 4)]
    right = [[round(3 * silu[0], 4)], [round(10 * silu[1], 4)]]
    assert swiglu == right, (
        "Experts.forward: expert 0 has gate_proj 1, up_proj 3, down_proj 1 and the row 1; expert 1 has 2, 1, 5 and the row 2. They "
        f"make 1 * silu(1) * 3 and 5 * silu(4) * 2, which is {right}, not {swiglu}")
    assert called == 3, ("Experts.forward must call self.gate_proj, up_proj and down_proj once each (split_backward replaces their "
                         f"forward), not {called} in all")


# ------------------------------------------------------------------------------------------------ who has which experts
MATRICES = "gate_proj", "up_proj", "down_proj"


def found_at(weight, name, num_experts):
    """Return what a rank knows about its part of an expert's matrices."""
    import torch.distributed as dist
    from shards import local_slices
    from torch.distributed.device_mesh import DeviceMesh
    placement = getattr(weight, "placement", None)
    assert placement is not None, f"the new {name} has no placement: it must take over that of the whole one"
    mesh = placement.data_mesh
    assert isinstance(mesh, DeviceMesh) and mesh.ndim == 1, \
        f"placement.data_mesh of {name} must be a 1D mesh, of the ranks with the same experts, not {mesh}"
    return {"shape": list(weight.shape), "experts": list(range(num_experts))[local_slices(weight)[0]],
            "ranks of placement.data_mesh": sorted(dist.get_process_group_ranks(mesh.get_group())),
            "placement.num_replicas": placement.num_replicas}


REASONS = {"shape": "a rank has a part of the experts, and each of these whole: tp cuts no expert",
           "experts": "rank i of a group of ep has the i-th part of the experts, and placement.shards says so",
           "ranks of placement.data_mesh": "gradients are summed over all ranks of the stage that have the same experts; these "
                                           "compute on different tokens, those of tp, too",
           "placement.num_replicas": "divide it by ep, because one in every ep ranks has these elements"}


def shard_experts_job():
    """Shard four experts over a grid of two by two ranks. They were on eight ranks before."""
    import expert_parallel
    import torch
    import torch.distributed as dist
    from placement import Placement
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    ep_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "ep"))
    dist.barrier()                                        # no rank may end while others still connect
    linear = nn.Linear(1, 1)
    linear.weight = nn.Parameter(torch.empty(4, 6, 2, device="meta"))
    linear.weight.placement = Placement(8, True, ep_mesh)
    expert_parallel.shard_experts(linear, ep_mesh)
    assert all(shard.group is ep_mesh.get_group("ep") for shard in linear.weight.placement.shards), \
        'the group of the Shard must be ep_mesh.get_group("ep"), whose ranks have the other experts'
    return found_at(linear.weight, "weight", 4)


def stage_of_experts(config, mesh):
    """Make two layers with a mixture of experts and one without, as far as expert_parallel looks at them."""
    import moe
    import torch
    import torch.distributed as dist
    from mesh import data_mesh
    from placement import Placement
    from torch import nn
    with torch.device("meta"):
        layers = {"0": SimpleNamespace(mlp=nn.Linear(1, 1)), **{name: SimpleNamespace(mlp=moe.MoE(config)) for name in "12"}}
    for layer in layers.values():
        for param in layer.mlp.parameters():
            param.placement = Placement(dist.get_world_size(), True, data_mesh(mesh))
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


def apply_job(pp, dp, cp, tp, ep):
    import expert_parallel
    import torch.distributed as dist
    from mesh import build_mesh, data_mesh
    args = SimpleNamespace(device="cpu", pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, sp="off")
    config = layer_config(num_local_experts=4, hidden_size=3, intermediate_size=5)
    mesh = build_mesh(args)
    model = stage_of_experts(config, mesh)
    layers = [layer.mlp for layer in model.model.layers.values()]
    before = [dict(layer.named_parameters()) for layer in layers]
    routed = []                                           # what rung 6 changes

    def noted(moe, group, args):
        routed.append((layers.index(moe), "group of tp" if group is mesh.get_group("tp") else group))
    with patch.object(expert_parallel, "route_own_part", noted):
        expert_parallel.apply(model, config, mesh, args)
    dist.barrier()                                        # no rank may end while others still connect
    expected = [(1, "group of tp"), (2, "group of tp")] if tp > 1 else []
    assert routed == expected, (
        f"tp {tp}, ep {ep}, layers 1 and 2 have experts, and layer 0 has none: apply must call route_own_part for (layer, group) "
        f"{expected}, but called it for {routed}")
    found, groups, of_mesh = [], [], []
    for layer in layers[1:]:
        weights = {name: getattr(layer.experts, name).weight for name in MATRICES}
        found.append({name: found_at(weight, name, 4) for name, weight in weights.items()})
        of_mesh += [weight.placement.data_mesh.get_group() for weight in weights.values()]
        groups.append(layer.dispatch.group if isinstance(layer.dispatch, expert_parallel.TokenDispatcher) else None)
        assert isinstance(groups[-1], dist.ProcessGroup | None), \
            f"TokenDispatcher needs the process group of ep, but got a {type(groups[-1]).__name__}"
    ranks = [sorted(dist.get_process_group_ranks(group)) if group else "none" for group in groups]
    assert len(set(of_mesh)) == 1 and (groups[0] is groups[1] or ranks[0] != ranks[1]), \
        "make the grid once, not for each layer: each group has its own connections, and gradients are summed group by group"
    same = [name for layer, params in zip(layers, before) for name, param in layer.named_parameters()
            if param is params[name] and param.placement.data_mesh == data_mesh(mesh) and not param.placement.shards]
    return found, ranks, same


@rung({"expert_parallel.py": ["apply", "shard_experts"]}, hints="""
    The ranks of a stage all route different tokens: those of dp and cp have different ones anyway, and those of tp each take a part
    of the sequence (rung 6). Write these ranks down in a row, as they are numbered: tp is the innermost dimension of the mesh, then
    come cp and dp. Cut the row into groups of ep neighbours, and write the groups below each other, as the rows of a grid. In each
    group, every expert is on one rank. Which ranks have the same experts as rank 0, but have seen other tokens?

    Those in the same column. `stage_mesh(mesh)` is the row, a 1D mesh, and `stage_mesh(mesh)._unflatten(0, (dp * cp * tp // ep,
    ep), ("expert_dp", "ep"))` is the grid. Its `get_group("ep")` is this rank's row; indexing it by ["expert_dp"] gives this rank's
    column, a mesh, and that is placement.data_mesh. With ep 1 there is only one column, with all ranks of the stage. So with tp 2
    and ep 1 each rank keeps all experts and dispatches nothing, but their gradients are summed over dp x cp x tp instead of dp x
    cp. The new parameter of `shard_experts` is `nn.Parameter(full.chunk(ep)[i])` on rank i of ep (there is no memory yet, so only
    its shape matters).

    shard_experts: group, full = ep_mesh.get_group("ep"), linear.weight; linear.weight =
    nn.Parameter(full.chunk(group.size())[group.rank()]); then with placement = linear.weight.placement = full.placement:
    placement.shards.append(Shard(group, 0, group.size(), group.rank())); placement.num_replicas //= group.size();
    placement.data_mesh = ep_mesh["expert_dp"]. apply: return if ep and tp are 1, or if config.num_local_experts is 0. Make the
    grid. For moe in moe_layers(model): for linear in moe.experts.children(): shard_experts(linear, grid); if args.ep > 1:
    moe.dispatch = TokenDispatcher(grid.get_group("ep")); if args.tp > 1: route_own_part(moe, mesh.get_group("tp"), args).""")
def test_who_has_which_experts(pool):
    """Write `shard_experts(linear, ep_mesh)`. ep_mesh is a grid of ranks: its dimension "ep" has the ranks that divide all experts
    among them, and "expert_dp" those that have the same ones. Replace linear.weight, [experts, out, in], by a parameter that is one
    of ep equal parts along dimension 0; rank i of ep gets the i-th. The new parameter takes over the old placement: add a Shard to
    its shards, divide num_replicas (how many ranks have these elements) by ep, and let data_mesh (over which gradients are summed)
    be the 1D mesh of "expert_dp". Write `apply(model, config, mesh, args)`. ep is folded into dp x cp x tp, the ranks of
    `stage_mesh(mesh)`, in their order: ep neighbours are a group in which every expert is on one rank. Make this grid once. For
    each MoE layer (`moe_layers(model)` lists them) shard gate_proj, up_proj and down_proj with it. If ep > 1, the layer's dispatch
    becomes a `TokenDispatcher` of this rank's group of ep. If tp > 1, call `route_own_part(layer, group of tp, args)`, of rung 6.
    If ep and tp are 1, or the model has no experts, change nothing."""
    for rank, came in enumerate(pool.call(shard_experts_job, STEP, world=4)):
        first = 2 * (rank % 2)
        right = {"shape": [2, 6, 2], "experts": [first, first + 1], "ranks of placement.data_mesh": [rank % 2, rank % 2 + 2],
                 "placement.num_replicas": 4}
        for what, reason in REASONS.items():
            assert came[what] == right[what], (
                "shard_experts of a weight of 4 x 6 x 2 with 8 replicas, in a grid of ep 2 (the rows, ranks 0 1 and 2 3) and "
                f"expert_dp 2 (the columns, 0 2 and 1 3), rank {rank}: {what} should be {right[what]}, not {came[what]}: {reason}")
    #         pp, dp, cp, tp, ep: for each rank its experts, the ranks with the same ones, and its ep group
    cases = {(1, 4, 1, 1, 2): [([0, 1], [0, 2], [0, 1]), ([2, 3], [1, 3], [0, 1]), ([0, 1], [0, 2], [2, 3]),
                               ([2, 3], [1, 3], [2, 3])],
             (1, 2, 2, 1, 4): [([i], [i], [0, 1, 2, 3]) for i in range(4)],
             (1, 2, 1, 1, 1): [([0, 1, 2, 3], [0, 1], "none")] * 2,
             (1, 2, 1, 2, 2): [([0, 1], [0, 2], [0, 1]), ([2, 3], [1, 3], [0, 1]), ([0, 1], [0, 2], [2, 3]),
                               ([2, 3], [1, 3], [2, 3])],
             (1, 2, 1, 2, 4): [([i], [i], [0, 1, 2, 3]) for i in range(4)],
             (1, 2, 1, 2, 1): [([0, 1, 2, 3], [0, 1, 2, 3], "none")] * 4,
             (2, 2, 1, 1, 2): [([0, 1], [0], [0, 1]), ([2, 3], [1], [0, 1]), ([0, 1], [2], [2, 3]), ([2, 3], [3], [2, 3])],
             (2, 1, 1, 2, 1): [([0, 1, 2, 3], [0, 1], "none")] * 2 + [([0, 1, 2, 3], [2, 3], "none")] * 2,
             (1, 2, 2, 2, 4): [([i], [i, i + 4], [*ranks]) for ranks in (range(4), range(4, 8)) for i in range(4)]}
    for (pp, dp, cp, tp, ep), of_ranks in cases.items():
        answers = pool.call(apply_job, STEP, world=pp * dp * cp * tp, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
        for rank, ((found, groups, same), (experts, same_experts, group_of_ep)) in enumerate(zip(answers, of_ranks)):
            where = (f"pp {pp}, dp {dp}, cp {cp}, tp {tp}, ep {ep}, four experts, rank {rank}"
                     f"{f' in the group of ep {group_of_ep}' * (ep > 1)}")
            for layer, (name, came) in [(layer, item) for layer, of_layer in enumerate(found, 1) for item in of_layer.items()]:
                right = {"shape": [4 // ep, *([3, 5] if name == "down_proj" else [5, 3])], "experts": experts,
                         "ranks of placement.data_mesh": same_experts, "placement.num_replicas": pp * dp * cp * tp // ep}
                for what, reason in REASONS.items():
                    assert came[what] == right[what], (f"{where}: {name} of layer {layer}: {what} should be {right[what]}, not "
                                                       f"{came[what]}: {reason}")
            assert groups == [group_of_ep] * 2, (
                f"{where}: the groups of both layers' TokenDispatchers (none without ep) have the ranks {[group_of_ep] * 2}, not "
                f"{groups}")
            what, expected = "the router and the layer without experts", ["weight", "bias", *["gate.weight"] * 2]
            if ep == tp == 1:
                what = "all parameters"
                expected = ["weight", "bias", *["gate.weight", *(f"experts.{name}.weight" for name in MATRICES)] * 2]
            assert same == expected, \
                f"{where}: {what} must stay as they are, with their placements: {expected}; but of these only {same} do"


# ------------------------------------------------------------------------------------------------ there and back
# SIZES[r][s]: how many rows rank r sends to rank s; the second time, rank 1 has none, and gets none
SIZES = [[[1, 0, 2], [0, 2, 1], [3, 0, 0]], [[2, 0, 1], [0, 0, 0], [1, 0, 0]]]


def all_to_all_job():
    """Send rows of 100 times the sender, 10 times the receiver and a number. Return the rows that arrive, and the gradient when the
    result has twice itself as gradient. Of four ranks, 1 to 3 are a group, and 0 is alone and sends itself two rows."""
    import expert_parallel
    import torch
    from prove.unforgiving import unforgiving
    group, found = start([1, 2, 3]), []
    rank = group.rank()
    for sizes in SIZES if group.size() > 1 else [[[2]]]:
        input_splits, output_splits = sizes[rank], [of[rank] for of in sizes]
        numbers = [100.0 * rank + 10 * to + i for to, count in enumerate(input_splits) for i in range(count)]
        x = torch.tensor([numbers, numbers], dtype=torch.float64).T.requires_grad_()             # [rows, 2], and not contiguous
        saved = []
        with unforgiving(), watched() as done:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(1) or tensor, lambda tensor: tensor):
                out = expert_parallel.TokenAllToAll.apply(x, input_splits, output_splits, group)
            tensor_from("TokenAllToAll.forward", out)
            assert done.sent, "a rank with nothing to send or receive must take part, too: the others wait for it"
            saved += [1 for value in vars(out.grad_fn).values() if isinstance(value, torch.Tensor)]
            out.backward(2 * out.detach().T.contiguous().T)                        # not contiguous either
        found.append((out.tolist(), x.grad.tolist(), x.tolist(), done.sent, str(out.dtype), len(saved)))
    return group.size(), rank, found


@rung({"expert_parallel.py": ["TokenAllToAll.forward", "TokenAllToAll.backward"]}, hints="""
    `dist.all_to_all_single(out, x, output_splits, input_splits, group=group)` sends the first input_splits[0] rows to rank 0, the
    next input_splits[1] rows to rank 1, and so on; `out` gets output_splits[0] rows from rank 0, then those from rank 1. How many
    rows must `out` have? And which way do gradients go?

    Make `out = x.new_empty(sum(output_splits), x.shape[1])`; x must be contiguous. Backward sends gradients the other way: it sends
    as many as were received, and receives as many as were sent. So keep both lists and the group on ctx.

    forward: `ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group`; make out;
    `dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group=group)`; return out. backward: `return
    TokenAllToAll.apply(grad, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None`.""")
def test_as_many_rows_as_there_are(pool):
    """Write `TokenAllToAll.apply(x, input_splits, output_splits, group)`. It sends the rows of x, [rows, hidden], to the ranks of
    the group: the first input_splits[0] to rank 0, the next input_splits[1] to rank 1, and so on. It returns the rows that arrive,
    ordered by sender: output_splits[0] rows from rank 0, then output_splits[1] rows from rank 1, and so on. The lists may contain
    zeros, even only zeros. A rank with nothing to send still takes part, because the others wait for it. Backward returns the
    gradient of each row to its sender. Each direction is one dist.all_to_all_single of exactly these rows. Keep no tensor for
    backward."""
    for ranks, rank, found in pool.call(all_to_all_job, STEP, world=4):
        for all_sizes, (out, grad, x, done, dtype, saved) in zip(SIZES if ranks > 1 else [[[2]]], found):
            right = [[100 * of + 10 * rank + i] * 2 for of, sizes in enumerate(all_sizes) for i in range(sizes[rank])]
            begin = (f"Of four ranks, 1 to 3 are a group of three, 0 is alone. With rows of the digits sender, receiver, number "
                     f"(in the group), rank {rank} of {ranks}")
            assert out == right, f"{begin} should receive {right}, and received {out}"
            sent = [[2 * a for a in row] for row in x]
            assert grad == sent, f"{begin} sent {x}; their gradients are twice that, {sent}, but came back as {grad}"
            expected = [("all_to_all", ranks, 2 * len(x)), ("all_to_all", ranks, 2 * len(right))]
            assert done == expected, (f"{begin} has {len(x)} rows of 2 numbers for {ranks} ranks and gets {len(right)}. Out and "
                                      f"back it should start (collective, ranks, numbers) {expected}, but did {done}")
            assert dtype == "torch.float64", f"rows in float64 come as {dtype}: receive them into a tensor of x's dtype"
            assert not saved, "forward keeps a tensor for backward, and so its memory; the lists and the group are enough"


# for each rank, its rows for each of six experts; the second time, nobody has any for rank 1's, and rank 2 has none
COUNTS = [[[2, 1, 0, 1, 1, 0], [1, 0, 2, 3, 0, 1], [0, 1, 1, 0, 0, 2]], [[1, 0, 0, 0, 2, 1], [2, 1, 0, 0, 0, 1], [0] * 6]]
ALONE = [[[2, 1]]]
NTH = "first", "second", "third"


def dispatch_job():
    """Run three ranks with two experts each, and one alone. Expert e multiplies by e + 1. Rows have the digits rank + 1, expert,
    number."""
    import expert_parallel
    import torch
    from prove.unforgiving import unforgiving
    group, found = start([1, 2, 3]), []
    rank = group.rank()
    for counts in COUNTS if group.size() > 1 else ALONE:
        seen = []

        def experts(x, counts, seen=seen):
            before = len(done.waits)
            rows = x.split(counts.tolist())
            seen.append([sorted(of_one.flatten().tolist()) for of_one in rows])
            del done.waits[before:]                       # the reader did not cause these
            return torch.cat([of_one * (2 * rank + e + 1) for e, of_one in enumerate(rows)])
        dispatch = expert_parallel.TokenDispatcher(group)
        numbers = [100.0 * (rank + 1) + 10 * e + i for e, count in enumerate(counts[rank]) for i in range(count)]
        x, local = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).requires_grad_(), torch.tensor(counts[rank])
        splits = [[sum(of[2 * to:2 * to + 2]) for of, to in pairs]
                  for pairs in ([(counts[rank], to) for to in range(group.size())], [(of, rank) for of in counts])]
        wanted, apply = [splits, splits[::-1]], expert_parallel.TokenAllToAll.apply

        def checked(x, *args, counts=counts, wanted=wanted, apply=apply):
            if wanted and x.is_floating_point():
                came, right, way = [*map(list, args[:2])], wanted.pop(0), "to the experts" if wanted else "back"
                assert came == right, (
                    f"the ranks of the group have {counts} rows for its experts, two on each rank. To send rows {way}, the group's "
                    f"{NTH[rank]} rank needs the input_splits and output_splits {right}, not {came}")
            return apply(x, *args)
        with unforgiving(), watched() as done:
            try:
                # tensors that are made without device= land there
                with torch.device("meta"), patch.object(expert_parallel.TokenAllToAll, "apply", checked):
                    out = tensor_from("TokenDispatcher.__call__", dispatch(experts, x, local))
                forward = list(done.sent)
                out.sum().backward()
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error).lower():
                    raise
                raise AssertionError(f"a tensor was made without device=x.device, so not where the rows are ({error})") from None
        backward, waits = done.sent[len(forward):], list(done.waits)
        found.append((seen, out.flatten().tolist(), x.grad.flatten().tolist(), numbers, forward, backward, waits))
    return group.size(), rank, found


@rung({"expert_parallel.py": ["TokenDispatcher.__call__"]}, hints="""
    A rank knows how many rows it has for each expert of all ranks. Before it can receive rows it must know how many arrive, so
    exchange these counts first. The rows then arrive ordered by sender, and those of each sender by expert. But the experts need
    rows sorted by expert alone. Which expert does each received row belong to?

    Counts: `dist.all_to_all_single(recv_counts, tokens_per_expert, group=self.group)` with recv_counts like tokens_per_expert;
    viewed as [ep, experts of this rank], row r says how many rows arrive from rank r for each. Rank r gets as many rows as the sum
    of row r of `tokens_per_expert.view(ep, -1)`. The expert of each received row: 0, 1, ..., 0, 1, ... (once for each sender), each
    repeated as often as `recv_counts` says: torch.repeat_interleave. Then sort as in MoE.forward, and undo it before you send the
    rows back.

    ep = self.group.size(); counts = torch.stack((tokens_per_expert, recv_counts)).unflatten(1, (ep, -1)); input_splits,
    output_splits = counts.sum(-1).tolist(), the only wait of the CPU; recv_counts = counts[1]; x = TokenAllToAll.apply(x,
    input_splits, output_splits, self.group); expert = torch.arange(recv_counts.shape[1],
    device=x.device).repeat(ep).repeat_interleave(recv_counts.flatten(), output_size=len(x)); order = expert.argsort(stable=True);
    out = experts(x.index_select(0, order), recv_counts.sum(0)).index_select(0, order.argsort()); return TokenAllToAll.apply(out,
    output_splits, input_splits, self.group).""")
def test_rows_travel_to_their_experts(pool):
    """Write `TokenDispatcher.__call__(experts, x, tokens_per_expert)`, which MoE.forward calls as self.dispatch. The rows of x are
    sorted by expert, and tokens_per_expert says how many rows each expert has, for the experts of all ranks. Each rank of
    self.group has the same number of experts, in the order of the ranks. Send the counts, then the rows, to the ranks that have
    their experts; sort the received rows by expert; call `experts(rows, tokens_per_expert)` with the counts of this rank's own
    experts, once, even if no row has arrived; send the results back. Return them in the order of x. The lists of an all-to-all are
    Python lists, so the CPU must wait for the GPU to have them. Let it wait only once, for both lists together. Create all tensors
    on x's device."""
    for ranks, rank, found in pool.call(dispatch_job, STEP, world=4):
        for counts, (seen, out, grad, x, forward, backward, waits) in zip(COUNTS if ranks > 1 else ALONE, found):
            begin = (f"Of four ranks, 1 to 3 are a group, 0 is alone. The ranks of a group of {ranks} have {counts} rows for "
                     "its experts, with the digits rank in the group + 1, expert, number.")
            here = f"the group's {NTH[rank]} rank"
            assert len(seen) == 1, (f"{begin} On {here} experts was called {len(seen)} times, not once. (Call it even without "
                                    "rows: the weights need a gradient, of zeros, which other ranks wait for.)")
            local = 2 * rank, 2 * rank + 1
            right = [[100 * (of + 1) + 10 * e + i for of in range(ranks) for i in range(counts[of][e])] for e in local]
            assert seen[0] == right, f"{begin} On {here} the experts {local} should get {right} of them, but got {seen[0]}"
            factors = [e + 1 for e, count in enumerate(counts[rank]) for _ in range(count)]
            came, right = sum(map(len, right)), [a * b for a, b in zip(x, factors)]
            assert out == right, f"{begin} Expert e multiplies by e + 1: {here} should get back {right}, but got {out}"
            assert grad == factors, \
                f"{begin} Expert e multiplies by e + 1: the rows of {here} have the gradients {factors}, not {grad}"
            sizes = [[2 * ranks, len(x), came], [len(x), came]]
            for what, done, numbers in zip(("forward", "backward"), (forward, backward), sizes):
                right = [("all_to_all", ranks, n) for n in numbers]
                assert done == right, (
                    f"{begin} In {what}, {here}, which has {len(x)} rows of one number and gets {came}, should start "
                    f"(collective, ranks, numbers) {right}: {'counts, ' * (what == 'forward')}rows there and back. It did {done}")
            assert len(waits) <= 1, (
                f"the CPU waits for the GPU {len(waits)} times, by {', '.join(waits)}; once is enough: one .tolist() of both "
                "sums, stacked, and tell repeat_interleave its output_size")


# two sequences of four tokens of one number, and the gradients of the layer's outputs
TOKENS_OF_TP, GRADS_OF_TP = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 0, 2, 1], [3, 1, 0, 2]]


def own_part_job(sp):
    """Run a layer that multiplies by its router's only weight, 10. Of four ranks, 0 and 1 are a group of tp, 2 and 3 another, whose
    tokens are 100 times as large. Return what the layer gets and returns, the gradients, and what is sent."""
    import expert_parallel
    import moe
    import torch
    import torch.distributed as dist
    from placement import Placement
    from prove.unforgiving import unforgiving
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(2)
    dist.barrier()                                        # no group may end while the other still connects
    times, args = 100**(dist.get_rank() // 2), SimpleNamespace(dp=2, cp=1, tp=2, ep=1, sp=sp)
    x, grad = (torch.tensor(numbers, dtype=torch.float64).unsqueeze(-1) for numbers in (TOKENS_OF_TP, GRADS_OF_TP))
    x = times * x                                                                  # [batch, seq, hidden]
    part = expert_parallel.own_part(x.repeat(1, 1, 4), group)
    assert callable(part), f"own_part returned a {type(part).__name__}, not a function that returns the part, as all_gather does"
    part = tensor_from("for x of [2, 4, 4], on two ranks, own_part's function", part(), [2, 2, 4])[..., :1]
    layer, seen = moe.MoE(layer_config(hidden_size=1, num_local_experts=1, num_experts_per_tok=1)).double(), []
    layer.gate.weight.data.fill_(10)
    for param in layer.parameters():
        param.placement = Placement(4, True, None)

    def forward(x):
        seen.append(x.squeeze(-1).tolist())
        return x * layer.gate.weight
    layer.forward = forward
    expert_parallel.route_own_part(layer, group, args)
    replaced = layer.forward is not forward
    local = slice(2 * group.rank(), 2 * group.rank() + 2) if sp == "on" else slice(None)
    leaf = x[:, local].clone().requires_grad_()
    grad = grad[:, local].contiguous()
    with unforgiving(), watched() as done:
        out = tensor_from("the function that replaces moe.forward", layer(leaf))
        assert out.requires_grad, "the output has no history, so autograd cannot make the gradients of x and the router"
        sent = list(done.sent)
        if out.shape == grad.shape:
            out.backward(grad)
    groups = {name: param.placement.grad_reduce_group for name, param in layer.named_parameters()}
    record = {name: "the group" if over is group else over for name, over in groups.items() if over is not None}
    numbers = [None if tensor is None else tensor.squeeze(-1).tolist() for tensor in (part, out, leaf.grad)]
    gate = 0.0 if layer.gate.weight.grad is None else layer.gate.weight.grad.item()
    return group.rank(), times, numbers, seen, gate, record, replaced, sent, done.sent[len(sent):]


@rung({"expert_parallel.py": ["route_own_part", "own_part"]}, hints="""
    With --sp on, a rank of tp has only its part of the sequence where the layer is called, so it routes only its tokens. With --sp
    off every rank of tp has the whole sequence. If each of them routed all tokens, every row would be computed tp times, and the
    experts' gradients, which are summed over dp x cp x tp, would be tp times as large. So each rank takes its part, and routes
    that. But the layers around it compute on the whole sequence: what must the ranks exchange after the layer in forward, and
    what in backward?

    Forward: the outputs, an all-gather. Backward: every rank has the gradients of all outputs and takes those of its part; then the
    ranks gather the gradients of x. This is f and g of step 4, with other functions: `enter_region(x, comm)` does gather in forward
    and reduce in backward, `leave_region(x, comm)` does reduce in forward and gather in backward, and comm is (gather, reduce,
    group). Here all_gather is gather, and own_part takes the place of reduce, so it has the same form: it returns a function that
    returns the result. Which of the two comes first? With --sp on and off, a rank's router sees only a part of the tokens: over
    which group must its gradient be summed?

    own_part: `return lambda: x.chunk(group.size(), dim=1)[group.rank()]`. route_own_part:
    moe.gate.weight.placement.grad_reduce_group = group. Then if args.sp == "off": forward = moe.forward; comm = (all_gather,
    own_part, group); moe.forward = lambda x: enter_region(forward(leave_region(x, comm)), comm).""")
def test_each_rank_of_tp_routes_its_part(pool):
    """Write `own_part(x, group)`, for x of [batch, seq, hidden]. The sequence has as many equal parts as the group has ranks, and
    this rank's part is the one of its rank in the group. Like all_gather and reduce_scatter of tensor_parallel.py, own_part returns
    a function, and that returns the part. Write `route_own_part(moe, group, args)`, for the group of tp. With --sp off, replace
    moe.forward by a function of x, the whole sequence. It takes this rank's part, does with it what moe.forward did before, and
    gathers the outputs of all ranks, so that it returns the whole sequence. Backward does the opposite: it takes this rank's part
    of the gradient, and in the end gathers the gradients of x. With --sp on, x is this rank's part already: leave moe.forward as it
    is. In both cases the router's gradient lacks the tokens of the other ranks, so its `placement.grad_reduce_group` must be the
    group over which the trainer sums it, once per step. The experts' placements stay as rung 3 left them."""
    #       for each rank: its part of TOKENS_OF_TP, the gradient of the router
    parts = [([[1, 2], [5, 6]], 22), ([[3, 4], [7, 8]], 26)]
    outputs, grads_of_x = [[10, 20, 30, 40], [50, 60, 70, 80]], [[10, 0, 20, 10], [30, 10, 0, 20]]
    for sp in ("off", "on"):
        for rank, times, (part, out, of_x), seen, gate, record, replaced, sent, sent_back in pool.call(
                own_part_job, STEP, world=4, sp=sp):
            own, of_gate = parts[rank]
            begin = (f"tp 2, --sp {sp}, rank {rank} of tp; the group has two sequences, {TOKENS_OF_TP}"
                     f"{', times 100' * (times > 1)}, and the layer multiplies by the router's weight, 10")
            own = [[times * token for token in sequence] for sequence in own]
            assert sp == "off" or not replaced, "with --sp on, x is this rank's part already, so moe.forward must stay as it is"
            assert part == own, f"{begin}: own_part of both sequences should be {own}, this rank's half of each, not {part}"
            calls = f"called with {', then with '.join(map(str, seen))}" if seen else "not called"
            assert seen == [own], \
                f"{begin}: what was moe.forward before should be called once, with this rank's part, {own}; it was {calls}"
            of_this = slice(2 * rank, 2 * rank + 2) if sp == "on" else slice(None)
            right = [[times * token for token in sequence[of_this]] for sequence in outputs]
            assert out == right, (f"{begin}: the layer should return {right}, not {out}"
                                  f"{': the outputs of all ranks, in the order of the sequence' * (sp == 'off')}")
            right = [sequence[of_this] for sequence in grads_of_x]
            begin = f"{begin}; the outputs have the gradients {GRADS_OF_TP}"
            why = (". (All ranks have the same gradients of the outputs, so nothing is summed: each takes its part, and in the end "
                   "they gather those of x.)")
            assert of_x == right, f"{begin}: those of x are {right}, not {of_x}{why * (sp == 'off')}"
            assert gate == times * of_gate, (f"{begin}: that of the router's weight, from this rank's tokens only, is "
                                             f"{times * of_gate}, not {gate}")
            right = {"gate.weight": "the group"}
            assert record == right, (
                f"with --sp {sp}, placement.grad_reduce_group should be {right}, and None for all others, but is {record}: the "
                "router's gradient lacks the tokens of the other ranks of tp. (Those of the experts are summed over "
                "placement.data_mesh, which has the ranks of tp.)")
            if sp == "on":
                assert not sent + sent_back, f"{begin}: nothing should be sent, but it did {sent + sent_back}"
            else:
                right = [("all_gather", 2, 8)]
                assert sent == right and sent_back == right, (
                    f"{begin}: in forward it should gather the outputs, and in backward the gradients of x, (collective, ranks, "
                    f"numbers) {right} each time; it did {sent} and {sent_back}")


# ------------------------------------------------------------------------------------------------ as many tokens for each
# for each rank and each layer of its stage, how often each of four experts was chosen
TOKENS = [[[3, 1, 0, 0], [0, 3, 0, 1]], [[1, 1, 2, 0], [0, 3, 0, 1]], [[4, 0, 0, 0]], [[4, 0, 0, 0]]]


def update_job(kind):
    """Run four ranks, two in each of two stages: the first stage has two layers of four experts, the second has one. Return the
    results of two updates, and the state that they leave."""
    import balance
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups, (alone, _) = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))], dist.new_subgroups(1)
    dist.barrier()
    balancer = object.__new__(balance.LoadBalancer)
    tokens = torch.tensor(TOKENS[rank])
    balancer.args, balancer.config = SimpleNamespace(balance=kind, pp=2), SimpleNamespace(num_hidden_layers=3, num_local_experts=4)
    balancer.layers, balancer.stage_group, balancer.sequence_group = ["a layer"] * len(tokens), groups[rank // 2], alone
    balancer.tokens_per_expert, balancer.bias = torch.zeros_like(tokens), torch.zeros(tokens.shape)
    ratios = []
    with watched() as done:
        for _ in range(2):
            balancer.tokens_per_expert += tokens
            ratios.append(balancer.update())
    assert all(isinstance(ratio, dict) and list(ratio) == ["balance"] for ratio in ratios), \
        f"update must return a dict with one entry, balance, not {ratios}"
    ratios = [ratio["balance"] for ratio in ratios]
    assert all(isinstance(ratio, torch.Tensor) and ratio.dtype == torch.float64 for ratio in ratios), \
        f"update's balance must be a tensor in float64, not {ratios}"
    bias = (balancer.bias / balance.BIAS_STEP).round(decimals=3).tolist()
    counts, balancer.layers = balancer.tokens_per_expert.flatten().tolist(), []
    return [round(ratio.item(), 4) for ratio in ratios], bias, counts, balancer.update(), done.waits


@rung({"balance.py": ["LoadBalancer.update"]}, hints="""
    self.tokens_per_expert, [layers, experts], has the choices of this rank since the last step. Which ranks route the other tokens
    of the global batch, for the same layers? An expert with more tokens than the mean should be selected less often: what happens
    to its bias?

    Those of dp x cp x tp: `dist.all_reduce(self.tokens_per_expert, group=self.stage_group)`. The mean is that over a layer's
    experts. The bias changes by BIAS_STEP up or down, however large the difference is: `.sign()`. For the log, a layer's load is
    its largest number of tokens over its mean. A rank has the layers of its stage only, so the mean over all layers needs the ranks
    of the other stages.

    With n = self.tokens_per_expert, after its all-reduce: mean = n.double().mean(1, keepdim=True); if self.args.balance == "bias":
    self.bias += BIAS_STEP * (mean - n).sign(); largest = (n.amax(1) / mean.squeeze(1)).sum() / self.config.num_hidden_layers;
    n.zero_(); dist.all_reduce(largest); return {"balance": largest / (dist.get_world_size() / self.args.pp)}, because that many
    ranks have each stage. Without layers return {} at once.""")
def test_a_bias_against_crowds(pool):
    """Write `LoadBalancer.update()`, which runs after every step. It sums self.tokens_per_expert over self.stage_group (dp x cp x
    tp), the ranks that route the other tokens for the same layers. With --balance bias, it lowers the bias of each expert that had
    more tokens than the mean of its layer by BIAS_STEP, and raises the bias of each that had fewer by as much. An expert with
    exactly the mean keeps its bias. Then it zeroes self.tokens_per_expert. It returns {"balance": a tensor in float64, the same on
    all ranks}: a layer's largest number of tokens over its mean, averaged over the layers of all stages
    (self.config.num_hidden_layers); or {} if self.layers is empty. Sum over the whole world, in which every layer appears world
    size / pp times. The CPU must not wait for the GPU."""
    for kind in ("bias", "none", "aux"):
        for rank, (ratios, bias, counts, nothing, waits) in enumerate(
                pool.call(update_job, STEP, world=4, kind=kind)):
            where = (f"--balance {kind}, two stages of two ranks. In each layer of their stage the ranks count {TOKENS} tokens, so "
                     "the stages [4, 2, 2, 0] [0, 6, 0, 2] and [8, 0, 0, 0]")
            assert ratios == [3, 3], \
                f"{where}: largest over mean is 4 / 2, 6 / 2 and 8 / 2, on average 3. Called twice, update returned {ratios}"
            right = [[-2, 0, 0, 2], [2, -2, 2, 0]] if rank < 2 else [[-2, 2, 2, 2]]
            right = right if kind == "bias" else [[0] * 4] * len(right)
            assert bias == right, f"{where}: after two such steps rank {rank}'s bias is {right} times BIAS_STEP, not {bias}"
            assert not any(counts), f"{where}: update must zero self.tokens_per_expert for the next step; it is {counts}"
            assert nothing == {}, f"without layers that have experts, update must return {{}}, to log nothing, not {nothing}"
            assert not waits, f"update needs no number on the CPU, but the CPU waits for the GPU, by {', '.join(waits)}"


# two sequences of four tokens, two tokens of each on each of two ranks: the scores of three experts
SCORES = [[[[.5, .3, .2], [.6, .3, .1]], [[.2, .3, .5], [.2, .5, .3]]],
          [[[.2, .5, .3], [.7, .2, .1]], [[.1, .2, .7], [.6, .3, .1]]]]
BIAS = [-0.25, 0.0, 0.15]


def choose_job(kind, bias, top_k):
    """Choose in layer 1 of two. Return the experts, tokens_per_expert after two calls, and what choose added to the logits'
    gradient; also that gradient by the formula of the loss. Ranks 0 and 1 are one sequence_group, with parts of the same sequences;
    2 and 3 are another, with the scores rolled."""
    import gc
    import weakref

    import balance
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(2)
    dist.barrier()
    scores = torch.tensor(SCORES, dtype=torch.float64)
    scores = scores if dist.get_rank() < 2 else scores.roll(1, -1)
    balancer = object.__new__(balance.LoadBalancer)
    balancer.args = SimpleNamespace(balance=kind, seq_len=4, global_batch_size=6, tp=2)
    balancer.config = SimpleNamespace(num_experts_per_tok=top_k, num_local_experts=3)
    balancer.tokens_per_expert, balancer.bias = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[9.0, 0, 0], bias])
    balancer.sequence_group, balancer.stage_group = group, dist.group.WORLD
    losses, auxiliary_loss = [], balancer.auxiliary_loss

    def noted(*args, **kwargs):
        loss = tensor_from("auxiliary_loss", auxiliary_loss(*args, **kwargs))
        losses.append(loss.detach().clone())
        return loss
    balancer.auxiliary_loss = noted
    leaf = scores[group.rank()].log().requires_grad_()
    logits = leaf + 1                                     # softmax does not notice
    with watched() as done:
        expert, returned = balancer.choose(1, logits)
        returned.sum().backward()
    sent, waits = done.sent, done.waits
    assert torch.equal(returned, logits), "choose must return the logits with the values that they have"
    with torch.no_grad(), watched() as done:              # without gradients, there is no loss to add
        balancer.choose(1, leaf + 1)
    chosen = torch.nn.functional.one_hot(scores.topk(top_k).indices, 3).double().sum((0, 2, 3))          # [sequences, experts]
    leaf2 = scores[group.rank()].log().requires_grad_()
    mean_score = leaf2.softmax(-1).sum(1) / 4
    loss = balance.AUX_WEIGHT * 3 * (chosen / 4 / top_k * mean_score).sum() / 6
    loss.backward()
    added = [rounded(grad * 1e6) for grad in (leaf.grad - 1, leaf2.grad)]
    there = weakref.ref(leaf)
    gc.disable()
    del logits, leaf, returned
    left = there() is not None
    gc.enable()
    counts = balancer.tokens_per_expert.tolist()
    losses = [value.sum().item() * 1e6 for value in (*losses, loss)]
    to_both = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in ((2,), ())]
    if kind == "aux":
        balance.AddAuxiliaryLoss.apply(*to_both).backward(torch.tensor([3.0, 5.0], dtype=torch.float64))
    passed = [None if tensor.grad is None else tensor.grad.tolist() for tensor in to_both]
    loss = losses, chosen.long().tolist(), passed
    return group.rank(), expert.sort(-1).values.tolist(), counts, *added, sent, done.sent, waits, left, *loss


@rung({"balance.py": ["LoadBalancer.choose", "LoadBalancer.auxiliary_loss", "AddAuxiliaryLoss.forward",
                      "AddAuxiliaryLoss.backward"]}, hints="""
    The scores of a token are the softmax of its logits, over all experts. Add the bias to them to select experts, and use it for
    nothing else. The auxiliary loss is the sum over experts of (fraction of the choices) x (mean score) x experts. It is lower if
    popular experts have low scores. The fractions come from counts, and have no gradient. But the loss is computed deep inside the
    model: how does it train the router, without being added to the loss that forward returns? Backward has to treat it as if its
    gradient were 1.

    A sequence may be spread over cp x tp: chosen, [batch, experts], must be summed over self.sequence_group for the auxiliary loss,
    but not for self.tokens_per_expert. The scores stay those of this rank's tokens: each rank returns its own term of the loss, and
    the router's gradient is summed over dp x cp x tp later, so nothing needs to be divided by the number of ranks.
    `AddAuxiliaryLoss.apply(logits, loss)` returns the logits, and its backward returns two gradients: that of the logits
    unchanged, and 1 for the loss. Then autograd computes the rest, if the scores have their history.

    scores = logits.softmax(-1); selected_experts = (scores.detach() + self.bias[i]).topk(top_k).indices; chosen =
    F.one_hot(selected_experts, num_experts).sum((1, 2)); self.tokens_per_expert[i] += chosen.sum(0). If self.args.balance == "aux"
    and logits.requires_grad: logits = AddAuxiliaryLoss.apply(logits, self.auxiliary_loss(scores, chosen)). Return
    selected_experts, logits. auxiliary_loss: dist.all_reduce(chosen, group=self.sequence_group); fraction
    = chosen.unsqueeze(1).type_as(scores) / (top_k * seq_len); return AUX_WEIGHT * num_experts * (fraction * scores).sum() / seq_len
    / global_batch_size. AddAuxiliaryLoss.forward: ctx.dtype = loss.dtype; return logits.view_as(logits). backward: return grad,
    torch.ones((), dtype=ctx.dtype, device=grad.device).""")
def test_choosing_and_counting(pool):
    """Write `LoadBalancer.choose(i, logits)`, which layer i calls as self.choose. It returns the numbers of each token's experts,
    [batch, seq, top_k], those whose softmax score plus self.bias[i] is highest, and the logits. It adds to
    self.tokens_per_expert[i] how often this rank's tokens chose each expert. With --balance aux, and if logits.requires_grad, it
    returns `AddAuxiliaryLoss.apply(logits, self.auxiliary_loss(scores, chosen))` instead of the logits: the same values, but
    backward adds the gradient of the auxiliary loss to their gradient. chosen, [batch, experts], has how often each expert was
    selected in each sequence. Write `auxiliary_loss(scores, chosen)`. This loss is, for each sequence, AUX_WEIGHT times the sum
    over experts of (fraction of the sequence's choices) x (mean score) x (number of experts). It is averaged over the sequences of
    the global batch. A sequence has seq_len tokens, spread over the ranks of self.sequence_group (cp x tp). Each rank counts only
    its part of a sequence, so sum `chosen` over self.sequence_group; but return only the term of this rank's scores, because the
    ranks' gradients are summed later. Communicate nothing else, and never make the CPU wait. Write `AddAuxiliaryLoss.forward` and
    `backward`."""
    best = [[[[0], [0]], [[2], [1]]], [[[1], [0]], [[2], [0]]]]
    cases = {("bias", (0.0, 0.0, 0.0), 1): best, ("aux", (0.0, 0.0, 0.0), 1): best,
             ("bias", tuple(BIAS), 1): [[[[2], [0]], [[2], [1]]], [[[1], [0]], [[2], [0]]]],
             ("aux", (0.0, 0.0, 0.0), 2): [[[[0, 1], [0, 1]], [[1, 2], [1, 2]]], [[[1, 2], [0, 1]], [[1, 2], [0, 1]]]]}
    for (kind, bias, top_k), of_ranks in cases.items():
        answers = pool.call(choose_job, STEP, world=4, kind=kind, bias=list(bias), top_k=top_k)
        for i, (rank, expert, counts, added, by_formula, sent, again, waits, left, losses, chosen, passed) in enumerate(answers):
            where = (f"--balance {kind}, top_k {top_k}, layer 1 with the bias {list(bias)}, scores {SCORES[rank]} on rank {rank} "
                     f"of sequence_group{', rolled by one expert' * (i > 1)}")
            right = of_ranks[rank]
            if i > 1 and any(bias):                       # with a bias and rolled scores, only check the first group
                continue
            if i > 1:
                right = [[sorted((e + 1) % 3 for e in token) for token in sequence] for sequence in right]
            assert expert == right, f"{where}: the experts are {right}, not {expert}"
            flat = sum(sum(right, []), [])
            twice = [[0] * 3, [2 * flat.count(e) for e in range(3)]]
            assert counts == twice, \
                f"{where}: after two such calls, self.tokens_per_expert of layers 0 and 1 is {twice}, not {counts}"
            expected = [("all_reduce", 2, 6)] if kind == "aux" else []
            assert sent == expected, (
                f"{where}: for 2 sequences and 3 experts, choose should start (collective, ranks, numbers) {expected}"
                f"{', which sums chosen over sequence_group' * (kind == 'aux')}, not {sent}")
            where = f"{where}; two ranks in sequence_group, seq_len 4, global_batch_size 6"
            if kind == "aux":
                assert losses[0] == pytest.approx(losses[-1]), (
                    f"{where}: summed over sequence_group, chosen is {chosen}. Then auxiliary_loss returns for this rank's tokens "
                    f"{losses[-1]:.3f} millionths, not {losses[0]:.3f} (nothing is divided by a number of ranks)")
                assert passed == [[3, 5], 1], (
                    "AddAuxiliaryLoss.backward must give loss the gradient 1, and pass on that of the logits: if this is [3, 5], "
                    f"logits and loss get [[3, 5], 1], not {passed}")
            expected = by_formula if kind == "aux" else [[[0] * 3] * 2] * 2
            came, wanted = [sum(sum(tensor, []), []) for tensor in (added, expected)]
            assert came == pytest.approx(wanted, abs=2e-4), \
                f"{where}: choose must add to the gradient of logits, in millionths, {expected}, not {added}"
            assert not again, f"{where}: if logits need no gradient, there is nothing to sum, but choose did {again}"
            assert not waits, f"{where}: the CPU waits for the GPU, by {', '.join(waits)}; choose needs to read no number"
            assert not left, (f"{where}: after backward the logits are still in memory: something keeps them, or a tensor that was "
                              "computed from them and has its history, such as a hook on them, or a list in self")


class NamedMesh:
    """A mesh whose groups are names."""

    def __init__(self, name=None):
        self.name = name

    def get_group(self, name=None):
        return name or self.name

    def __getitem__(self, names):
        return NamedMesh(names if isinstance(names, str) else "_".join(names))

    def _flatten(self, name):
        return self


def traffic_job(cases):
    """Return what both functions say for layers with six experts, three per token, hidden 5, for 24 sequences of 16 tokens,
    float32."""
    import balance
    import expert_parallel
    import moe
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    config = layer_config(hidden_size=5, num_experts_per_tok=3, num_local_experts=6, num_hidden_layers=4)
    found = []
    for layers, flags in cases:
        args = SimpleNamespace(**dict(dp=1, cp=1, tp=1, pp=2, ep=1, sp="on", dtype=torch.float32, seq_len=16, global_batch_size=24,
                                      micro_batch_size=3, recompute="none", balance="bias") | flags)
        model = SimpleNamespace(model=SimpleNamespace(config=config, layers={}))
        for i in range(layers):
            model.model.layers[str(i)] = SimpleNamespace(mlp=moe.MoE(config))
            if args.ep > 1:
                model.model.layers[str(i)].mlp.dispatch = expert_parallel.TokenDispatcher("ep")
        for technique in (expert_parallel, balance):
            entries, sent = technique.traffic(model, NamedMesh(), args), {}
            assert entries is not None, f"{technique.__name__}.traffic returned None, not a list"
            for group, collective, size in entries:
                what = "world" if group is dist.group.WORLD else group, collective
                sent[what] = sent.get(what, 0) + size
            found.append(sent)
    return found


@pytest.mark.slow
@rung({"expert_parallel.py": ["traffic"], "balance.py": ["traffic"]}, hints="""
    The ledger compares the bytes sent with what `expected_traffic` returns, and asks each file for its part. In expert_parallel.py
    three things are sent: rows, there and back; before them counts; and with --sp off what the ranks of tp gather after they have
    routed (rung 6). In balance.py, it is what update sums once per step, and what auxiliary_loss sums in forward. How many tokens
    does a rank route in a step, and how often is each of its rows sent?

    A rank routes args.global_batch_size // args.dp * args.seq_len // (args.cp * args.tp) tokens in a step. Each is
    num_experts_per_tok rows of hidden_size elements in each layer. Rows are sent there and back in forward, and gradients there and
    back in backward; with recomputation forward runs twice. The counts (int64, one for each expert) are sent once in each forward
    of each micro-batch. With --sp off the ranks of tp gather the outputs in forward, and the gradients in backward; an all-gather
    counts with the bytes of its result, which are those of tp ranks. Recomputation stops before it would gather the outputs again,
    because backward needs no outputs. In balance.py update sums a count for each expert of each layer over dp x cp x tp, and one
    float64 over the world. With --balance aux the counts of each sequence are summed over cp x tp, in each forward.

    Both: layers = moe_layers(model); without MoE layers return []; forwards = 1 if args.recompute == "none" else 2; sequences =
    args.global_batch_size // args.dp; count_bytes = len(layers) * num_local_experts * 8. expert_parallel.py: token_bytes =
    len(layers) * tokens * hidden_size * args.dtype.itemsize. If ep > 1, in the group layers[0].dispatch.group: "all_to_all" of 2 *
    (forwards + 1) * num_experts_per_tok * token_bytes, and of forwards * sequences // args.micro_batch_size * count_bytes. If tp >
    1 and sp is off: (mesh.get_group("tp"), "all_gather", 2 * args.tp * token_bytes). balance.py: (stage_mesh(mesh).get_group(),
    "all_reduce", count_bytes), (dist.group.WORLD, "all_reduce", 8); if aux, (sequence_group(mesh), "all_reduce", forwards *
    sequences * count_bytes).""")
@pytest.mark.parametrize("ranks, shape, flags", [
    (2, "top2-2", "--ep 2 --micro_batch_size 12 --recompute full --balance bias"),
    (2, "top2-2", "--ep 2 --micro_batch_size 24 --tp 2 --sp off --recompute selective --balance aux"),
    (4, "top2-2", "--ep 4 --micro_batch_size 12 --tp 2 --recompute none --balance aux"),
    (4, "top4-2", "--ep 2 --micro_batch_size 6 --cp 2 --recompute selective --balance aux"),
    (4, "top1-3", "--ep 2 --micro_batch_size 6 --pp 2 --schedule zerobubble --recompute none --balance bias")])
def test_a_training_run(pool, ranks, shape, flags):
    """Write `traffic(model, mesh, args)` twice: in expert_parallel.py for what `apply` has put into the layers, and in balance.py
    for the LoadBalancer. Each returns what a rank sends in one training step, as a list of (group, collective, payload bytes), for
    the layers of its own stage; both together must equal the ledger's bytes. `stage_mesh(mesh)` and `sequence_group(mesh)` lead to
    the groups. A rank cannot know how many rows its experts will get, so count as many as it sends. An all-gather counts with the
    bytes of its result. With --recompute selective or full, forward runs twice. Then four steps must give the losses, gradient
    norms and weights of one process: on two ranks with ep 2, once over dp, and once over tp with --sp off; on four ranks with ep 4
    over dp x tp, and with ep 2 and cp or pp 2."""
    # with two layers, six experts and three of them per token: all tokens of a step, all their rows, and the counts, in bytes
    tokens, rows, counts = 2 * 24 * 16 * 5 * 4, 2 * 24 * 16 * 3 * 5 * 4, 96
    update = {("dp_cp_tp", "all_reduce"): 96, ("world", "all_reduce"): 8}
    there_and_back = lambda sent, counted: {("ep", "all_to_all"): int(sent * rows) + counted * counts}
    gathered = lambda times: {("tp", "all_gather"): int(times * tokens)}
    summed = {("cp_tp", "all_reduce"): 24 * counts}
    cases = [(0, {}, {}, {}), (0, dict(ep=2, tp=2, sp="off", balance="aux"), {}, {}), (2, {}, {}, update),
             (2, dict(ep=2, dp=2), there_and_back(2, 4), update),
             (2, dict(ep=2, dp=4, cp=2, micro_batch_size=2), there_and_back(1 / 2, 3), update),
             (2, dict(ep=2, dp=2, tp=2), there_and_back(1, 4), update),
             (2, dict(ep=2, cp=2, recompute="selective"), there_and_back(3, 16), update),
             (2, dict(ep=2, cp=2, recompute="full"), there_and_back(3, 16), update),
             (2, dict(tp=2, sp="off"), gathered(2), update), (2, dict(tp=2), {}, update),
             (2, dict(ep=2, dp=2, tp=4, sp="off", recompute="full"), there_and_back(3 / 4, 8) | gathered(1), update),
             (2, dict(balance="aux", tp=2), {}, update | summed),
             (2, dict(balance="aux", dp=2, cp=2, recompute="selective"), {}, update | summed)]
    came = pool.call(traffic_job, STEP, cases=[case[:2] for case in cases])[0]
    for (layers, flags_here, *right), *found in zip(cases, came[::2], came[1::2]):
        for file, expected, got in zip(("expert_parallel", "balance"), right, found):
            assert got == expected, (
                f"{layers} layers with 6 experts on this stage of two, top_k 3, hidden 5, 24 sequences of 16 tokens, 3 in a "
                f"micro-batch, float32, no recomputation, --sp on, --balance bias, all other sizes 1, changed by {flags_here}: the "
                f"bytes of {file}.traffic are {expected}, not {got}")
    check(pool, layouts.Layout(STEP, ranks, shape, "adamw", f"--dtype float64 {flags}"))
