"""Compare steps 1 and 8 on one GPU with transformers' LlamaForCausalLM in step 1's own loop: python dev/bench/bench_gpu.py

Each row is a process of its own, with the same batches, AdamW and precision in all. Speeds are medians after the third step.
"simulated" is the memory that tools/simulate predicts; the process's own number is from its allocator. MFU counts 6N + 12 L h s
FLOPs per token. 8B does not fit, since its states alone are 135 GiB; 12 of its 32 layers fit, with recomputation.

    python dev/bench/bench_gpu.py --models llama-1b --contestants step01_single_gpu --compile yes         # in pieces of ten minutes
    python dev/bench/bench_gpu.py --kernels                              # the kernels that take longest in a step of step 1
    python dev/bench/bench_gpu.py --rank_of "8 --tp 8" --models llama-8b # one rank of eight, whose collectives are over at once
    python dev/bench/bench_gpu.py --device cpu --models tiny --seq_len 128 --batch 8      # to see that it works
"""
import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from steps import ROOT, clean_environment, step_dir

KINDS = {"attention": "flash|fmha|attention", "fused": "triton_", "products": "gemm|cutlass|cublas|nvjet|_mm_", "nccl": "nccl",
         "copies": "mem(cpy|set)"}                        # the first match counts: some flash kernels have cutlass in their names

#         model, layers (None: all of them), sequences per micro-batch, recomputation
RUNS = [("llama-1b", None, 4, "none"), ("llama-1b", None, 4, "selective"), ("llama-3b", None, 1, "none"),
        ("llama-3b", None, 2, "selective"), ("llama-8b", 12, 1, "selective"), ("llama-8b", 12, 2, "full")]
WARM_UP = 3


def theirs(argv):
    """Run step 1's train.py with transformers' model."""
    sys.path.insert(0, str(step_dir("step01_single_gpu")))
    import train
    from weights import initial_weight
    from config import to_hugging_face
    from transformers import LlamaForCausalLM

    class Theirs(torch.nn.Module):
        model = property(lambda self: self.llama.model)   # its layers are counted

        def __init__(self, config, args):
            super().__init__()
            shape = to_hugging_face(config, args.dtype)
            with torch.device(args.device):
                self.llama = LlamaForCausalLM._from_config(shape, attn_implementation="sdpa", dtype=args.dtype)
            with torch.no_grad():
                for name, param in self.llama.named_parameters():
                    param.copy_(initial_weight(name, param, config, args))
            if args.recompute == "full":
                self.llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
            self.train()
            for layer in self.llama.model.layers if args.compile else []:
                layer.compile()

        def forward(self, inputs, positions, targets):
            logits = self.llama(input_ids=inputs, position_ids=positions.unsqueeze(0), use_cache=False).logits
            return loss(logits, targets)

    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    loss = torch.compile(loss) if "--compile" in argv else loss
    train.build_model = Theirs
    train.main(argv)


def one_of_many(world, argv):
    """Run step 8's rank 0 of many alone on this device: with real kernels, but a process group whose collectives are over at once.

    This measures what a rank computes, and whether the host keeps up; the losses mean nothing. Data from other ranks is replaced by
    this rank's own or by zeros, because before torch 2.13 such a group leaves in the output whatever memory held before.
    """
    from unittest.mock import patch

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    sys.path.insert(0, str(step_dir("step08_5d")))
    import train
    from pipeline_parallel import Pipeline
    init_process_group, reduce_scatter, all_to_all = dist.init_process_group, dist.reduce_scatter_tensor, dist.all_to_all_single
    hop, wait_for = dist.batch_isend_irecv, Pipeline.wait_for

    def own_part(output, tensor, **how):
        output.copy_(tensor.flatten()[:output.numel()].view_as(output))
        return reduce_scatter(output, tensor, **how)

    def own_rows(output, tensor, *splits, **how):
        output.copy_(tensor) if output.shape == tensor.shape else output.zero_()
        return all_to_all(output, tensor, *splits, **how)

    def zeros(sent_and_received):
        for message in sent_and_received:
            message.op is dist.irecv and message.tensor.zero_()
        return hop(sent_and_received)

    def taken(pipeline, message):
        if message in pipeline.recv_handles:
            pipeline.recv_handles[message][1].zero_()
        return wait_for(pipeline, message)

    def fake(backend, **_):
        return init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    os.environ.update(WORLD_SIZE=str(world), RANK="0")
    with patch("torch.distributed.init_process_group", fake), patch("mesh.all_gather_object", lambda value: [value] * world), \
            patch("torch.distributed.Work.is_completed", lambda work: True), patch.object(Pipeline, "wait_for", taken), \
            patch("torch.distributed.batch_isend_irecv", zeros), \
            patch("torch.distributed.reduce_scatter_tensor", own_part), patch("torch.distributed.all_to_all_single", own_rows), \
            patch.dict(dist.Backend.backend_capability, fake=["cpu", "cuda"]):
        train.main(argv)


def ceiling(size=8192):
    """Return the TFLOP/s of a large product in bfloat16, which bounds the MFU from above."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size**3 / statistics.median(times) / 1e9


def start(command):
    """Run a command and return its output; raise with the line that says why there is none."""
    done = subprocess.run([sys.executable, *map(str, command)], env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise RuntimeError("out of memory" if "out of memory" in done.stderr.lower() else lines[-1])
    return done.stdout


def measure(command, folder):
    log = os.path.join(folder, "log.jsonl")
    start([*command, "--log_file", log])
    with open(log) as file:
        lines = [json.loads(line) for line in file]
    os.remove(log)
    speed, mfu = (statistics.median(line[name] or 0 for line in lines[WARM_UP:]) for name in ("tokens_per_s", "mfu"))
    return speed, mfu, lines[-1]["peak_memory_gib"], lines[-1]["loss"]


def simulated(flags, folder):
    """Return the peak GiB that tools/simulate predicts."""
    seen = os.path.join(folder, "seen.json")
    start([ROOT / "tools/simulate", 8, 1, "--json", seen, *flags])
    with open(seen) as file:
        return json.load(file)["peak_bytes"] / 2**30


def model_folder(model, layers, folder):
    """Return a preset, or the folder of one with fewer layers."""
    if not layers:
        return model
    sys.path.insert(0, str(step_dir("step01_single_gpu")))
    import config
    shape = config.to_hugging_face(config.PRESETS[model], torch.bfloat16)
    path = os.path.join(folder, f"{model}-{layers}")
    shape.num_hidden_layers = layers
    shape.save_pretrained(path)
    return path


def print_kernels(trace):
    with open(trace) as file:
        events = json.load(file)["traceEvents"]
    spent, calls = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spent[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel"]
    if not spans:
        return print("no kernel in the trace: not a GPU's")
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    print(f"from the first kernel to the last {whole / 1e3:.1f} ms, in kernels {sum(spent.values()) / 1e3:.1f} ms")
    groups = collections.Counter()
    for name, micros in spent.items():
        groups[next((kind for kind, words in KINDS.items() if re.search(words, name, re.I)), "elementwise and other")] += micros
    for kind, micros in [*groups.most_common(), ("idle", whole - sum(spent.values()))]:
        print(f"{micros / 1e3:9.2f} ms {micros / whole:6.1%}  {kind}")
    for name, micros in spent.most_common(25):
        print(f"{micros / 1e3:9.2f} ms {micros / whole:6.1%} {calls[name]:6} x  {name[:110]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", help="only these models of RUNS; or any preset, with a micro-batch of 2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16, help="sequences per training step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contestants", nargs="*", help="step01_single_gpu, step08_5d, transformers; all if not given")
    parser.add_argument("--recompute", nargs="*", help="only the RUNS with one of these modes")
    parser.add_argument("--compile", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rank_of", help="a number of ranks and a layout's flags: only rank 0 of these ranks runs")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        return print("no GPU here; --device cpu --models tiny --seq_len 128 --batch 8 shows that the benchmark works")
    runs = [run for run in RUNS if not args.models or run[0] in args.models]
    runs = runs or [(model, None, 2, recompute) for model in args.models for recompute in ("none", "full")]
    runs = [run for run in runs if not args.recompute or run[3] in args.recompute]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    if args.device == "cuda":
        print(f"a product of 8,192 cubed: {float(start([__file__, 'ceiling'])):,.0f} TFLOP/s")    # this process must hold no memory
    print(f"{name}, torch {torch.__version__}; sequences of {args.seq_len:,}, {args.batch} a step\n")
    print(f"{'model':<14}{'recompute':<11}{'':<19}{'compiled':<10}{'tokens/s':>10}{'MFU':>8}{'GiB':>8}{'simulated':>11}{'loss':>8}")
    contestants = {name: [step_dir(name) / "train.py"] for name in ("step01_single_gpu", "step08_5d")}
    contestants["transformers"] = [__file__, "theirs"]
    if args.rank_of:
        contestants = {"rank 0 of " + args.rank_of: [__file__, "one_of_many", *args.rank_of.split()]}
    contestants = {name: command for name, command in contestants.items() if name in (args.contestants or contestants)}
    with tempfile.TemporaryDirectory() as folder:
        for model, layers, micro, recompute in runs:
            flags = ["--model", model_folder(model, layers, folder), "--seq_len", args.seq_len, "--global_batch_size", args.batch,
                     "--micro_batch_size", micro, "--recompute", recompute, "--steps", args.steps, "--lr", 1e-4,
                     "--device", args.device]
            for compile in {"yes": [["--compile"]], "no": [[]], "both": [[], ["--compile"]]}[args.compile]:
                for name, command in contestants.items():
                    if name == "transformers" and recompute == "selective":
                        continue                          # transformers has no selective recomputation
                    row = f"{model + (f'/{layers}' if layers else ''):<14}{recompute:<11}{name:<19}{'yes' if compile else 'no':<10}"
                    try:
                        if args.kernels and name == "step01_single_gpu":
                            start([*command, *flags, *compile, "--steps", 5, "--profile", folder])
                            print(row)
                            print_kernels(os.path.join(folder, "trace_rank0.json"))
                        elif not args.kernels:
                            speed, mfu, memory, loss = measure([*command, *flags, *compile], folder)
                            said = f"{simulated(flags, folder):.2f}" if name == "step08_5d" and not compile else ""
                            print(f"{row}{speed:>10,.0f}{mfu:>8.1%}{memory:>8.2f}{said:>11}{loss:>8.3f}", flush=True)
                    except RuntimeError as error:
                        print(f"{row}{error}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["theirs"]:
        theirs(sys.argv[2:])
    elif sys.argv[1:2] == ["one_of_many"]:
        one_of_many(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["ceiling"]:
        print(ceiling())
    else:
        main()
