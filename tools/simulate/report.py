"""Report what was recorded and played, as text for people and as numbers for programs."""
from collections import Counter


class Result:
    """The results of a training step on all ranks."""
    def __init__(self, recordings, ranks, rank, count, played, cluster):
        self.recordings, self.ranks, self.rank, self.count, self.played = recordings, ranks, rank, count, played
        self.seen = recordings[ranks.stands_for(rank)]
        self.args, self.gpu = self.seen.args, cluster.gpu
        self.tokens = self.args.global_batch_size * self.args.seq_len
        self.speed = self.tokens / played.seconds / count
        self.mfu = self.speed * self.seen.flops_per_token / self.gpu.peak(str(self.args.dtype).removeprefix("torch."))
        self.exposed, self.waits, self.many = Counter(), Counter(), len(recordings)
        for of_rank in played.waited.values():
            for (dimension, site), seconds in of_rank.items():
                self.exposed[dimension] += seconds / self.many
                self.waits[dimension, site] += seconds / self.many
        self.host = sum(played.host.values()) / self.many
        self.bubble = sum(played.idle.values()) / self.many / played.seconds

    def as_json(self):
        names, seen = ("dimension", "collective", "calls", "payload_bytes", "wire_bytes"), self.seen
        return dict(step_seconds=self.played.seconds, tokens_per_s_per_gpu=self.speed, mfu=self.mfu,
                    peak_bytes=sum(seen.peak.values()), exposed={**self.exposed}, bubble=self.bubble,
                    between_bytes=sum(seen.between.values()), flops=seen.flops,
                    sent=[dict(zip(names, (*what, *sizes))) for what, sizes in seen.sent.items()])


def report(result, name, details=False):
    seen, args, size = result.seen, result.args, {name: size for name, (_, size) in result.seen.mesh.items()}
    where = ", ".join(f"{name} {index} of {size[name]}" for name, (index, _) in seen.mesh.items())
    micro_batches = args.global_batch_size // (args.micro_batch_size * size.get("dp", 1))
    dtype = str(args.dtype).removeprefix("torch.")
    print(f"rank {result.rank} of {result.count:,}{': ' * bool(where)}{where}")
    print(f"{args.model}, {dtype}, a training step of {micro_batches} micro-batches of {args.micro_batch_size} x "
          f"{args.seq_len:,} tokens")
    if dtype in ("float32", "float64") or name == "v100":
        print(f"attention is timed as a flash kernel; {'a v100' if name == 'v100' else dtype} has none, and its kernel is slower")
    if any(kernel.name == "_grouped_mm" for kernel in seen.kernels):
        print("every expert is assumed to get the same number of tokens")
    print(f"\n{'memory, MiB':<18}{'between steps':>15}{'at the peak':>15}{'at most':>15}")
    for kind in seen.peak:
        print(f"{kind:<18}" + "".join(f"{column[kind] / 2**20:>15,.2f}" for column in (seen.between, seen.peak, seen.most)))
    print(f"{'all':<18}" + "".join(f"{sum(column.values()) / 2**20:>15,.2f}" for column in (seen.between, seen.peak)))
    peak = sum(seen.peak.values()) / 2**30
    print(f"the peak is {seen.place}: {peak:.1f} of the {result.gpu.usable:.1f} GiB that can be used: "
          f"{'fits' if peak < result.gpu.usable else 'DOES NOT FIT'}\n")
    whole, many = result.played.seconds, result.many
    print(f"simulated on {result.count:,} {name}: {whole:,.4g} s a step, {result.speed:,.0f} tokens/s/GPU, "
          f"MFU {result.mfu:.1%} (all of attention, embedding counted)")
    print(f"{'seconds, mean of ' + str(many) + ' ranks played':<34}{'of the step':>12}")
    rows = {"computing": sum(result.played.computing.values()) / many,
            **{f"waiting for {dimension}": seconds for dimension, seconds in result.exposed.most_common()},
            "waiting for the host": result.host}
    rows["done before the slowest"] = whole - sum(rows.values())
    for what, seconds in rows.items():
        if seconds >= whole / 2000:
            print(f"{what:<24}{seconds:>10,.4f}{seconds / whole:>12.1%}")
    if size.get("pp", 1) > 1:
        print(f"bubble: a rank stands idle for {result.bubble:.1%} of the step, waiting for ranks of other stages")
    if details:
        report_details(result, result.tokens // size.get("dp", 1) // size.get("cp", 1))


def report_details(result, tokens):
    seen = result.seen
    if longest := [f"{dimension} in {site} {s:,.4f} s" for (dimension, site), s in result.waits.most_common(3) if s > 0]:
        print("the longest waits: " + "; ".join(longest))
    print(f"\n{seen.flops:.4e} FLOPs, {seen.flops / tokens:.4e} for each of the {tokens:,} tokens that this rank works on")
    if seen.sent:
        print(f"\n{'dimension':<16}{'collective':<16}{'calls':>9}{'payload bytes':>20}{'on the wire':>20}")
    for (dimension, collective), (calls, payload, wire) in seen.sent.items():
        print(f"{dimension:<16}{collective:<16}{calls:>9,}{payload:>20,}{wire:>20,.0f}")
