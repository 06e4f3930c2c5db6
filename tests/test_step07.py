"""Step 7: with experts spread over ep, it trains as one process and as transformers' Mixtral do, however tokens are routed."""
import json
import math
import os
from types import SimpleNamespace

import cases
import huggingface
import layouts
import numpy as np
import pytest
import torch
from cases import MLP, SHAPE
from harness import assert_same_run, assert_same_tensors, relative
from jobs import assert_refused, compiled_job, save_in_pieces_job, storage_bytes, trained_parts
from layouts import Layout
from observe import check, observed_job
from safetensors.torch import load_file

STEP = "step07_ep"
EXACT = "--dtype float64 --recompute none"
EXPERTS, HIDDEN = 8, 40
MOE = SHAPE | cases.EXPERTS
slow = pytest.mark.slow


@pytest.mark.parametrize("layout", [*layouts.every_layout(7),
    pytest.param(Layout(STEP, 8, "top2-2", "adamw", f"{EXACT} --micro_batch_size 3 --ep 8 --balance bias"),
                 id="eight ranks", marks=slow),
    pytest.param(Layout(STEP, 8, "top2-2", "adamw", f"{EXACT} --micro_batch_size 6 --tp 4 --ep 8 --zero 3 --balance aux"),
                 id="eight ranks, ep over tp", marks=slow)])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    Layout(STEP, 8, f"top{k}-{layers}", "adamw", f"{EXACT} {more} --balance {balance}") for k, layers, more in [
        (1, 2, "--micro_batch_size 3 --ep 8"), (4, 2, "--micro_batch_size 3 --ep 8"),
        (2, 2, "--micro_batch_size 24 --tp 8 --sp on"), (2, 2, "--micro_batch_size 3 --ep 4 --tp 2 --sp off"),
        (2, 2, "--micro_batch_size 24 --tp 8 --ep 8 --sp off"), (2, 2, "--micro_batch_size 12 --tp 4 --ep 2 --zero 2"),
        (2, 2, "--micro_batch_size 3 --tp 2 --ep 4 --zero 3 --zero_shard 2"),
        (2, 2, "--micro_batch_size 3 --ep 2 --zero 3 --zero_shard 4"),
        (2, 2, "--micro_batch_size 3 --ep 4 --zero 2 --zero_shard 2"),
        (2, 4, "--micro_batch_size 2 --pp 2 --schedule dualpipe --ep 4 --cp 2 --cp_mode zigzag --zero 2")]
    for balance in ("bias", "aux")], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Return {(top_k, layers): the flags of a run}."""
    folder = tmp_path_factory.mktemp("case")
    return {(top_k, layers): cases.make(folder / f"{top_k}_{layers}", **cases.shape(f"top{top_k}-{layers}"))
            for top_k, layers in [(2, 2), (2, 4)]}


def units_job(argv):
    """Return the number of ZeRO's units, and the names of the mesh dimensions over which they are sharded."""
    model, _ = trained_parts(argv)
    return len(model.zero_units), sorted({unit.shard_group.group_desc for unit in model.zero_units})


@pytest.mark.parametrize("ep, units, groups", [(1, 4, 1), (2, 6, 2)])
def test_experts_are_a_unit_of_their_own_only_with_ep(pool, flags, ep, units, groups):
    argv = f"{flags[2, 2]} --micro_batch_size 6 --steps 1 --zero 1 --ep {ep}".split()
    for found, names in pool.call(units_job, STEP, world=2, argv=argv):
        assert found == units and len(names) == groups, names


def load(trained):
    return [line["balance"] for line in trained.lines]


@slow
@pytest.mark.parametrize("more, graphs", [
    ("--ep 2 --recompute full", 3), *(pytest.param(*case, marks=pytest.mark.sweep) for case in [("--ep 2", 1), ("--tp 2", 1)])])
def test_compile(pool, flags, more, graphs):
    base = f"{flags[2, 2]} --micro_batch_size 6"
    # torch 2.11 cannot compile it in float64
    trained = pool.train(STEP, f"{base} {more} --compile", world=2, timeout=200, job=compiled_job)
    assert min(trained.answers) >= graphs
    assert_same_run(trained, pool.reference(STEP, f"{base} --dtype float64"), 1e-4, weights=False)


# ------------------------------------------------------------------------------------- extreme routing
def routed_job(argv, bias, folder):
    """Train with a bias that leaves the router little choice, or none."""
    import balance
    import train

    class Forced(balance.LoadBalancer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.bias += torch.tensor(bias)
    balance.LoadBalancer = Forced
    try:
        train.main([*argv, "--save", folder, "--log_file", f"{folder}/log"])
    finally:
        balance.LoadBalancer = Forced.__base__


@slow
@pytest.mark.parametrize("bias", [[9.0, 5] + [0] * 6, [0] * 6 + [5, 9.0], [9.0, 0, 0, 0, 9.0, 0, 0, 0]],
                         ids=["first", "last", "two ranks"])
def test_all_tokens_to_two_experts(pool, flags, tmp_path, bias):
    """Check runs in which some experts, and some ranks, get no token at all."""
    def train(world, more):
        folder = tmp_path / more.replace(" ", "")
        folder.mkdir()
        argv = f"{flags[2, 4]} --balance none --dtype float64 {more}".split()
        pool.call(routed_job, STEP, world=world, argv=argv, bias=bias, folder=str(folder))
        lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        return SimpleNamespace(losses=[line["loss"] for line in lines], grad_norms=[line["grad_norm"] for line in lines],
                               balance=[line["balance"] for line in lines], weights=load_file(folder / "model.safetensors"))
    one = train(1, "--micro_batch_size 6")
    assert one.balance == [4.0] * 4
    for world, more in [(4, "--ep 4 --zero 3 --micro_batch_size 6"),
                        (4, "--ep 2 --pp 2 --schedule zerobubble --micro_batch_size 6 --recompute full")]:
        trained = train(world, more)
        assert_same_run(trained, one, 1e-9, more)
        assert trained.balance == pytest.approx(one.balance)


def hooks_job(argv, bias):
    """Train with a bias that chooses the experts. Return how often each parameter's gradient came."""
    import balance
    import train

    class Forced(balance.LoadBalancer):
        def __init__(self, model, *rest):
            super().__init__(model, *rest)
            self.bias += torch.tensor(bias)
            for name, param in model.named_parameters():
                came[name] = 0
                param.register_post_accumulate_grad_hook(lambda _, name=name: came.__setitem__(name, came[name] + 1))
    came, balance.LoadBalancer = {}, Forced
    try:
        train.main(argv)
    finally:
        balance.LoadBalancer = Forced.__base__
    return came


def test_a_rank_without_tokens_does_what_the_others_do(pool, flags):
    """Check that its experts get gradients, of zero: another rank with the same experts, and tokens for them, waits for these."""
    argv = f"{flags[2, 2]} --steps 1 --balance none --micro_batch_size 6 --ep 2".split()
    some, none = pool.call(hooks_job, STEP, world=2, argv=argv, bias=[9.0, 5] + [0] * 6)
    assert some == none and len(set(none.values())) == 1 and min(none.values()) > 0


# ------------------------------------------------------------------------------------- against transformers
@pytest.fixture(scope="module")
def initial(pool, flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("initial")
    pool.train(STEP, f"{flags[2, 4]} --dtype float64 --steps 0 --save {folder}", weights=False)
    return folder


@pytest.mark.parametrize("family, world, more, exact, tolerance", [
    ("mixtral", 1, "", True, 1e-9), ("qwen3_moe", 1, "", True, 1e-9), *(pytest.param(*case, marks=slow) for case in [
        ("mixtral", 1, "", False, 1e-5), ("qwen3_moe", 1, "", False, 1e-5), ("mixtral", 4, "--ep 4", True, 1e-9),
        ("mixtral", 8, "--ep 2 --tp 2 --pp 2", True, 1e-9), ("qwen3_moe", 8, "--ep 2 --tp 2 --pp 2", True, 1e-9),
        ("mixtral", 8, "--ep 2 --tp 2 --pp 2", False, 1e-5)])])
def test_trains_as_transformers(pool, tmp_path, family, world, more, exact, tolerance):
    flags = cases.make(tmp_path / "case", **cases.shape("top2-4" + "-qk" * (family == "qwen3_moe"))) + " --dtype float64"
    initial = tmp_path / "initial"
    pool.train(STEP, f"{flags} --steps 0 --save {initial}", weights=False)
    base = f"{flags} --init_from {initial} --micro_batch_size 3 --lr_schedule constant"
    trained = pool.train(STEP, f"{base} {more}", world=world)
    model = huggingface.load(initial, torch.float64, exact)
    assert model.config.model_type == family
    tokens = np.load(tmp_path / "case/tokens.npy")
    losses, norms, _ = huggingface.train(model, tokens, 4, 24, 16, lr=1e-2, warmup=2, grad_clip=0.5)
    assert max(norms) > 0.5, "the test should clip"
    for ours, theirs in zip(trained.losses + trained.grad_norms, losses + norms):
        assert relative(ours, theirs) < tolerance
    assert_same_tensors(trained.weights, huggingface.on_disk(model, tmp_path), tolerance if exact else 1e-3)


@slow
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_loads_a_checkpoint_of_transformers_and_saves_one(pool, tmp_path, family):
    import transformers
    torch.manual_seed(3)
    more = dict(moe_intermediate_size=48, norm_topk_prob=True) if family == "Qwen3Moe" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=40, intermediate_size=48, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=6, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    model.set_experts_implementation("eager")
    saved = huggingface.on_disk(model, tmp_path / "theirs")
    flags = cases.make(tmp_path / "case").split(" ", 2)[2]
    theirs = f"--model {tmp_path / 'theirs'} --init_from {tmp_path / 'theirs'} {flags} --dtype float64 --steps 0"
    one = pool.train(STEP, theirs)
    assert_same_tensors(one.weights, saved, 0)
    for world, more in [(8, "--ep 2 --tp 2 --pp 2 --schedule dualpipe --zero 3 --micro_batch_size 3"),
                        (4, "--ep 4 --zero 1 --sp off")]:
        pool.train(STEP, f"{theirs} {more} --save {tmp_path / f'ours{world}'}", world=world, weights=False)
        again = huggingface.load(tmp_path / f"ours{world}", torch.float64, exact=False)
        inputs = torch.arange(60).view(2, 30)
        assert torch.equal(again(input_ids=inputs).logits, model(input_ids=inputs).logits)


@slow
def test_several_files_have_an_index_of_the_experts(pool, flags, tmp_path):
    one = pool.train(STEP, f"{flags[2, 2]} --dtype float64 --steps 1")
    pool.call(save_in_pieces_job, STEP, argv=f"{flags[2, 2]} --dtype float64 --steps 1 --save {tmp_path}".split())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    back = huggingface.load(tmp_path, torch.float64)
    assert_same_tensors(huggingface.on_disk(back, tmp_path / "again"), one.weights, 0)


# The parameters of the released models: all of them, and those that are active for one token, where these are fewer. The small ones
# tie the head to the embedding: it is counted once there, and twice here.
RELEASED = {"llama-1b": [1_235_814_400 + 128256 * 2048], "llama-3b": [3_212_749_824 + 128256 * 3072], "llama-8b": [8_030_261_248],
            "llama-70b": [70_553_706_496], "llama-405b": [405_853_388_800], "qwen3-0.6b": [596_049_920 + 151936 * 1024],
            "qwen3-8b": [8_190_735_360], "mixtral-8x7b": [46_702_792_704, 12_879_925_248],
            "qwen3-30b-a3b": [30_532_122_624, 3_353_032_704]}


def parameters_job():
    """Return for each preset the parameters of our model, of transformers', and those active for one token."""
    import config
    import metrics
    import model
    import transformers
    sizes = {}
    for name, shape in config.PRESETS.items():
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config.to_hugging_face(shape, torch.bfloat16))
            both = [sum(param.numel() for param in one.parameters()) for one in (model.Llama(shape), theirs)]
        sizes[name] = *both, metrics.active_parameter_count(shape)
    return sizes


def test_presets_have_the_released_sizes(pool):
    sizes = pool.call(parameters_job, STEP)[0]
    assert all(ours == theirs for ours, theirs, _ in sizes.values()), sizes
    assert {name: [sizes[name][0], sizes[name][2]] for name in RELEASED} == {
        name: [released[0], released[-1]] for name, released in RELEASED.items()}


# ------------------------------------------------------------------------------------- the products
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_products_against_a_loop(pool, dtype, tolerance):
    worst = pool.call(grouped_job, STEP, dtype=dtype)[0]
    assert worst.keys() == {"kernel", "trainer"} and max(worst.values()) < tolerance


def no_rows_job():
    """Return the gradient of experts without tokens. Fail if the kernel is called for a product without rows."""
    from unittest.mock import patch

    import moe
    weight = torch.randn(2, 24, 16, dtype=torch.bfloat16)
    with patch.object(torch.nn.functional, "grouped_mm", side_effect=AssertionError("asked the kernel")):
        return moe.grouped_weight_grad(torch.empty(0, 24).bfloat16(), torch.empty(0, 16).bfloat16(), weight, torch.tensor([0, 0]))


def test_a_rank_without_tokens_asks_no_kernel_for_its_gradient(pool):
    gradient, = pool.call(no_rows_job, STEP)
    assert gradient.shape == (2, 24, 16) and not gradient.any()


def grouped_job(dtype):
    import moe
    from harness import distance
    draw, worst = torch.Generator().manual_seed(0), {}
    counts = torch.tensor([5, 0, 17, 1, 0, 9])
    x, w, up = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in [(32, 16), (6, 24, 16), (32, 24)])
    kernel = lambda x, w, counts: torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))

    def loop(x, w, counts):
        return torch.cat([rows @ one.T for rows, one in zip(x.split(counts.tolist()), w)])

    def of(product, dtype):
        leaves = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        y = product(*leaves, counts)
        return [y.detach(), *torch.autograd.grad(y, leaves, up.to(dtype))]
    for name, product in dict(kernel=kernel, trainer=moe.grouped_product).items():
        worst[name] = max(distance(a, b) for a, b in zip(of(product, dtype), of(loop, torch.float64)))
    return worst


def unwritten_job(argv, garbage, folder):
    """Train with a kernel that, as a GPU's may, writes no gradient for experts without rows: there, whatever was in memory stays.
    Return how many such gradients there were in autograd, and in W."""
    from unittest.mock import patch

    import train
    found = dict(autograd=0, W=0, products=0)

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, sizes):               # [rows, in], [experts, in, out]
            ctx.save_for_backward(x, weight)
            ctx.sizes = sizes
            return torch.cat([rows @ one for rows, one in zip(x.split(sizes), weight)])

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            of_x = torch.cat([rows @ one.T for rows, one in zip(grad.split(ctx.sizes), weight)])
            return of_x, gradients("autograd", x, grad, ctx.sizes), None

    def gradients(where, a, b, sizes):                    # [rows, in], [rows, out]
        made = a.new_full((len(sizes), a.shape[1], b.shape[1]), garbage)
        for one, rows, grad in zip(made, a.split(sizes), b.split(sizes)):
            if len(rows):
                one.copy_(rows.T @ grad)
            else:
                found[where] += 1
        return made

    def grouped_mm(a, b, offs):
        sizes, found["products"] = offs.diff(prepend=offs.new_zeros(1)).tolist(), found["products"] + 1
        return Grouped.apply(a, b, sizes) if b.dim() == 3 else gradients("W", a.T, b, sizes)
    with patch("torch.nn.functional.grouped_mm", grouped_mm):
        train.main([*argv, "--save", folder])
    return found


@pytest.mark.parametrize("world, more, where", [(1, "", "autograd"), (2, "--pp 2 --schedule zerobubble", "W"), *(
    pytest.param(*case, marks=slow) for case in [(1, "--recompute full", "autograd"), (2, "--ep 2 --zero 2", "autograd"),
                                                 (2, "--pp 2 --schedule dualpipe --stages_per_rank 2", "W")])])
def test_what_a_kernel_leaves_unwritten_reaches_no_weight(pool, tmp_path, world, more, where):
    """Check experts without tokens: NaN in their gradients would end the run, any other number would go unnoticed."""
    flags = cases.make(tmp_path / "case", **cases.shape("top2-4")).replace("--global_batch_size 24", "--global_batch_size 8")
    argv = f"{flags} --dtype bfloat16 --micro_batch_size 1 --seq_len 4 {more}".split()
    trained = {}
    for garbage in (0.0, math.nan, 1e3):
        folder = tmp_path / str(garbage)
        found = pool.call(unwritten_job, STEP, world=world, argv=argv, garbage=garbage, folder=str(folder))
        if os.environ.get("EXERCISE") and not any(of_rank["products"] for of_rank in found):
            pytest.skip("products in a loop, without this kernel")
        assert sum(of_rank[where] for of_rank in found) > 10, "there should be experts without tokens"
        trained[garbage] = load_file(folder / "model.safetensors")
    for garbage in (math.nan, 1e3):
        for name, tensor in trained[garbage].items():
            assert torch.equal(tensor, trained[0.0][name]), f"{garbage} in a gradient that the kernel left unwritten changed {name}"


# ------------------------------------------------------------------------------------- balance
def auxiliary_job(argv):
    """Return the gradients with --balance aux, those that autograd computes from the loss as the papers write it, and those without
    a balance loss."""
    import balance
    import config
    import moe
    import train
    from mesh import build_mesh

    def gradients(extra, written_out):
        args = config.parse_args([*argv, "--balance", extra], train.TECHNIQUES)
        shape = config.load_config(args)
        config.check(args, shape, train.TECHNIQUES)
        mesh = build_mesh(args) if not torch.distributed.is_initialized() else gradients.mesh
        gradients.mesh, logits = mesh, []
        model = train.build_model(shape, mesh, args)
        balance.LoadBalancer(model, shape, mesh, args)
        for layer in moe.moe_layers(model):
            layer.gate.register_forward_hook(lambda module, inputs, output: logits.append(output))
        inputs, positions, targets = next(train.batches(train.load_tokens(args, shape.vocab_size), shape, mesh, args))[1][0]
        loss = model(inputs, positions, targets) / targets.numel()
        for layer in logits if written_out else []:
            scores = layer.softmax(-1)                                             # [batch, seq, experts]
            chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(2).indices, 1.0)
            share, mean = chosen.sum(1) / (2 * args.seq_len), scores.mean(1)       # [batch, experts]
            loss = loss + balance.AUX_WEIGHT * shape.num_local_experts * (share * mean).sum(-1).mean()
        loss.backward()
        return {name: param.grad for name, param in model.named_parameters()}
    return gradients("aux", False), gradients("none", True), gradients("none", False)


def test_the_auxiliary_loss_has_the_gradient_of_its_formula(pool, flags):
    argv = f"{flags[2, 2]} --dtype float64 --micro_batch_size 24".split()
    added, written_out, without = pool.call(auxiliary_job, STEP, argv=argv)[0]
    assert_same_tensors(added, written_out, 1e-12)
    gate = "model.layers.0.mlp.gate.weight"
    assert (added[gate] - without[gate]).norm() > 1e-3 * without[gate].norm()


def biased_layer_job(argv, bias):
    """Return the output of one layer under a bias, and the sum over its chosen experts written out, with routing weights
    that leave out the bias."""
    import balance
    import config
    import moe
    import train
    from mesh import build_mesh
    args = config.parse_args(argv, train.TECHNIQUES)
    shape = config.load_config(args)
    config.check(args, shape, train.TECHNIQUES)
    mesh = build_mesh(args)
    model = train.build_model(shape, mesh, args)
    balance.LoadBalancer(model, shape, mesh, args).bias += torch.tensor(bias)
    layer = moe.moe_layers(model)[0]
    x = torch.randn(1, 32, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    written_out, scores = torch.zeros(32, shape.hidden_size, dtype=torch.float64), (x[0] @ layer.gate.weight.T).softmax(-1)
    for token, row, score in zip(range(32), x[0], scores):
        chosen = (score + torch.tensor(bias)).topk(2).indices
        for expert in chosen:
            gate, up, down = (linear.weight[expert] for linear in layer.experts.children())
            out = down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            written_out[token] += score[expert] / score[chosen].sum() * out
    return layer(x)[0].detach(), written_out.detach()


def test_the_bias_chooses_and_does_no_more(pool, flags):
    argv, bias = f"{flags[2, 2]} --dtype float64".split(), [0.1, -0.2, 0.3, 0.0, -0.1, 0.05, 0.2, -0.3]
    of_layer, written_out = pool.call(biased_layer_job, STEP, argv=argv, bias=bias)[0]
    assert_same_tensors(dict(out=of_layer), dict(out=written_out), 1e-12)


@slow
def test_the_bias_evens_out_the_load(pool):
    base = "--model tiny-moe --seq_len 32 --steps 60 --lr_schedule constant"
    loads = {balance: load(pool.train(STEP, f"{base} --balance {balance}", weights=False)) for balance in ("none", "bias", "aux")}
    late = {balance: sum(values[-10:]) / 10 for balance, values in loads.items()}
    assert loads["none"][0] == loads["bias"][0] == loads["aux"][0]
    assert late["bias"] < 0.8 * late["none"] and late["aux"] < 0.8 * late["none"], late


@pytest.mark.sweep
def test_the_bias_evens_out_the_load_of_a_whole_run(pool):
    run = {balance: pool.train(STEP, f"--model tiny-moe --steps 200 --balance {balance}", weights=False, timeout=600)
           for balance in ("none", "bias")}
    late = {balance: sum(load(trained)[-20:]) / 20 for balance, trained in run.items()}
    loss = {balance: sum(trained.losses[-20:]) / 20 for balance, trained in run.items()}
    assert min(load(run["bias"])) < 1.3 and late["bias"] < 1.4 and late["none"] > 1.5, late
    assert loss["bias"] < 1.01 * loss["none"], loss


# ------------------------------------------------------------------------------------- what is sent and what is kept
def test_all_to_all_bytes(pool, flags):
    """Compare with the bytes written out for one layout: top_k x tokens x hidden, there and back, in forward and backward; and the
    counts."""
    argv = f"{flags[2, 4]} --steps 1 --micro_batch_size 3 --dtype bfloat16 --ep 2".split()
    answers = pool.call(observed_job, STEP, world=2, argv=argv, optimizer="adamw")
    # for a rank and layer: the bytes one way, and the counts' bytes in four micro-batches
    rows, counts = 2 * (12 * 16) * HIDDEN * 2, 4 * EXPERTS * 8
    sent = [seen for _, rank in answers for (_, collective), (seen, _) in rank.items() if collective == "all_to_all"]
    assert sum(sent) == 2 * 4 * (4 * rows + counts)


def expert_bytes_job(argv):
    """Train. Return the bytes of this rank's experts, of their gradients and of their optimizer states."""
    model, optimizer = trained_parts(argv)
    experts = [param for name, param in model.named_parameters() if ".experts." in name]
    if "--zero" in argv:
        units = list(dict.fromkeys(param.unit for param in experts))
        weights = [tensor for unit in units for tensor in (unit.flat_param, unit.param_shard)]
        grads = [unit.grad_shard if unit.flat_grad is None else unit.flat_grad for unit in units]
        ours = {tensor.untyped_storage()._cdata for tensor in grads}
        of_experts = [grad.untyped_storage()._cdata in ours for grad in optimizer.grads]
    else:
        weights, grads = experts, [param.main_grad.clone() for param in experts]    # views of a bucket
        ours = {id(param) for param in experts}
        of_experts = [id(param) in ours for param in optimizer.params]
    states = [t for master, ours in zip(optimizer.masters, of_experts) if ours
              for t in optimizer.adamw.state[master].values() if t.dim()]
    return [storage_bytes(weights), storage_bytes(grads), storage_bytes(states)]


@pytest.mark.parametrize("more, weights, grads, states", [  # divided by
    ("--ep 2 --zero 2", 2, 4, 4), *(pytest.param(*case, marks=slow) for case in [
        ("--ep 4", 4, 4, 4), ("--ep 2 --tp 2", 2, 2, 2), ("--ep 4 --tp 2", 4, 4, 4), ("--ep 2 --tp 2 --zero 1", 2, 2, 4),
        ("--tp 4 --zero 3", 4, 4, 4), ("--ep 2 --zero 1", 2, 2, 4), ("--ep 2 --zero 3", 4, 4, 4),
        ("--ep 4 --zero 3", 4, 4, 4), ("--ep 2 --zero 3 --zero_shard 2", 2, 2, 2)])])
def test_bytes_of_experts(pool, flags, more, weights, grads, states):
    whole = 2 * EXPERTS * 3 * HIDDEN * MLP * 4
    for measured in pool.call(expert_bytes_job, STEP, world=4, argv=f"{flags[2, 2]} --steps 2 --micro_batch_size 3 {more}".split()):
        assert measured == [whole // weights, whole // grads, 2 * whole // states]


# ------------------------------------------------------------------------------------- the log
@pytest.mark.parametrize("shape, has", [("dense-2", False), ("top2-2", True)])
def test_the_log_has_a_balance_where_there_are_experts(pool, tmp_path, shape, has):
    flags = f"{cases.make(tmp_path, **cases.shape(shape))} --steps 2 --micro_batch_size 12"
    trained = pool.train(STEP, flags, world=2, weights=False)
    assert [("balance" in line) for line in trained.lines] == [has] * 2 and ("balance" in trained.output) == has


# ------------------------------------------------------------------------------------- what can go wrong
QWEN3_MOE = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


@pytest.mark.parametrize("model, world, more, message", [
    ({}, 4, "--tp 2 --ep 3", "--ep 3: must divide dp 2 x cp 1 x tp 2 = 4; choose from 1, 2, 4"),
    (dict(num_local_experts=2), 4, "--ep 4", "--ep 4: must divide num_local_experts 2; choose from 1, 2"),
    ({}, 2, "--tp 2 --sp off --seq_len 15",
     "--seq_len 15: must be a multiple of cp 1 x tp 2, whose ranks each route a part of it; choose 14 or 16"),
    ({}, 3, "--ep 3", "--ep 3: must divide num_local_experts 8; choose from 1"),
    ({}, 2, "--ep 0", "argument --ep: must be at least 1 and below 100000000, but is 0"),
    ({}, 2, "--balance both", "invalid choice: 'both'"),
    (dict(model_type="llama"), 2, "--ep 2", "has no experts"),
    (dict(num_local_experts=None), 1, "", "num_local_experts"),           # it would train as a dense model
    (dict(num_experts_per_tok=9), 1, "", "num_experts_per_tok 9 must be at most num_local_experts 8"),
    (dict(sliding_window=64), 1, "", "sliding_window is 64; only None is supported"),
    (QWEN3_MOE | dict(norm_topk_prob=False), 1, "", "norm_topk_prob is False; only True is supported"),
    (QWEN3_MOE | dict(mlp_only_layers=[0]), 1, "", "mlp_only_layers is [0]; only [] is supported"),
    (QWEN3_MOE | dict(decoder_sparse_step=2), 1, "", "decoder_sparse_step is 2; only 1 is supported")])
def test_bad_layouts_are_refused(pool, tmp_path, model, world, more, message):
    assert_refused(pool, STEP, world, f"{cases.make(tmp_path, **MOE | model)} --micro_batch_size 1 {more}", message)


@slow
def test_a_bias_is_not_saved_and_that_is_said(pool, flags, tmp_path):
    said = {balance: pool.train(STEP, f"{flags[2, 2]} --steps 1 --balance {balance} --save {tmp_path}", world=2).output
            for balance in ("none", "bias", "aux")}
    assert "cannot hold the biases" in said["bias"] and said["bias"].count("cannot hold the biases") == 1
    assert "cannot hold the biases" not in said["none"] + said["aux"]


def test_started_from_a_checkpoint_there_is_no_bias(pool, flags, initial):
    assert "cannot hold the biases" not in pool.train(STEP, f"{flags[2, 4]} --init_from {initial} --steps 1").output
