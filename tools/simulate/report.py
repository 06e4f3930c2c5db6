"""What was seen, as a text for people and as numbers for programs."""


def report(seen, ranks, rank):
    args, size = seen.args, {name: size for name, (_, size) in seen.mesh.items()}
    where = ", ".join(f"{name} {index} of {size[name]}" for name, (index, _) in seen.mesh.items())
    micro_batches = args.global_batch_size // (args.micro_batch_size * size.get("dp", 1))
    print(f"rank {rank} of {ranks:,}{': ' * bool(where)}{where}\n{args.model}, {str(args.dtype).removeprefix('torch.')}, "
          f"a training step of {micro_batches} micro-batches of {args.micro_batch_size} x {args.seq_len:,} tokens\n")
    print(f"{'memory, MiB':<18}{'between steps':>15}{'at the peak':>15}{'at most':>15}")
    columns = seen.between, seen.peak, seen.most
    for kind in seen.peak:
        print(f"{kind:<18}" + "".join(f"{column[kind] / 2**20:>15,.2f}" for column in columns))
    print(f"{'all':<18}" + "".join(f"{sum(column.values()) / 2**20:>15,.2f}" for column in columns[:2]))
    print(f"the peak is {seen.place}\n")
    tokens = args.global_batch_size // size.get("dp", 1) * args.seq_len // size.get("cp", 1)
    print(f"{seen.flops:.4e} FLOPs, {seen.flops / tokens:.4e} for each of the {tokens:,} tokens that this rank works on")
    if "pp" in size:
        import schedules                                  # the step's
        events = schedules.simulate(schedules.make(args.schedule, size["pp"], micro_batches, args.stages_per_rank))
        idle, whole = schedules.bubble(events)[seen.mesh["pp"][0]], max(event.end for event in events)
        print(f"bubble: {args.schedule} leaves this rank idle for {idle} of {whole} units, {idle / whole:.1%} of "
              f"the step, {idle / (whole - idle):.1%} of its work (a stage's F, I and W take one each)")
    if seen.sent:
        print(f"\n{'dimension':<16}{'collective':<16}{'calls':>9}{'payload bytes':>20}{'on the wire':>20}")
    for (dimension, collective), (calls, payload, wire) in seen.sent.items():
        print(f"{dimension:<16}{collective:<16}{calls:>9,}{payload:>20,}{wire:>20,.0f}")


def as_json(seen):
    names = "dimension", "collective", "calls", "payload_bytes", "wire_bytes"
    return dict(peak_bytes=sum(seen.peak.values()), between_bytes=sum(seen.between.values()), flops=seen.flops,
                sent=[dict(zip(names, (*what, *sizes))) for what, sizes in seen.sent.items()])
