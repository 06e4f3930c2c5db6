"""What was seen, as a text for people and as numbers for programs."""


def report(seen, ranks, rank):
    args, degree = seen.args, {name: size for name, (_, size) in seen.mesh.items()}
    where = ", ".join(f"{name} {index} of {size}" for name, (index, size) in seen.mesh.items())
    dp, cp = degree.get("dp", 1), degree.get("cp", 1)
    micro_batches = args.global_batch_size // (args.micro_batch_size * dp)
    print(f"rank {rank:,} of {ranks:,}{': ' * bool(where)}{where}\n"
          f"{args.model}, {str(args.dtype).removeprefix('torch.')}, a training step of {micro_batches} "
          f"micro-batches of {args.micro_batch_size} x {args.seq_len:,} tokens\n")
    print_memory(seen)
    tokens = args.global_batch_size // dp * args.seq_len // cp
    print(f"{seen.flops:.4e} FLOPs, {seen.flops / tokens:.4e} for each of the {tokens:,} tokens "
          "that this rank works on")
    if "pp" in degree:
        print_bubble(seen, degree["pp"], micro_batches)
    print_sent(seen.sent)


def print_memory(seen):
    print(f"{'memory, MiB':<18}{'between steps':>15}{'at the peak':>15}{'at most':>15}")
    for kind in seen.peak:
        print_row(kind, [column[kind] for column in (seen.between, seen.peak, seen.most)])
    print_row("all", [sum(column.values()) for column in (seen.between, seen.peak)])
    print(f"the peak is {seen.place}\n")


def print_row(kind, sizes):
    print(f"{kind:<18}" + "".join(f"{size / 2**20:>15,.2f}" for size in sizes))


def print_bubble(seen, pp, micro_batches):
    import schedules
    args = seen.args
    events = schedules.simulate(schedules.make(args.schedule, pp, micro_batches, args.stages_per_rank))
    idle, whole = schedules.bubble(events)[seen.mesh["pp"][0]], max(event.end for event in events)
    print(f"bubble: {args.schedule} leaves this rank idle for {idle} of {whole} units, {idle / whole:.1%} of "
          f"the step, {idle / (whole - idle):.1%} of its work (a stage's F, I and W take one each)")


def print_sent(sent):
    if not sent.calls:
        return
    print(f"\n{'dimension':<16}{'collective':<16}{'calls':>9}{'payload bytes':>20}{'on the wire':>20}")
    for what in sorted(sent.calls):
        print(f"{what[0]:<16}{what[1]:<16}{sent.calls[what]:>9,}{sent.payload[what]:>20,}"
              f"{sent.wire[what]:>20,.0f}")


def as_json(seen):
    """Bytes of all at the peak and between steps, and of each kind; the FLOPs; what was sent."""
    sent = [dict(dimension=what[0], collective=what[1], calls=seen.sent.calls[what],
                 payload_bytes=seen.sent.payload[what], wire_bytes=seen.sent.wire[what])
            for what in sorted(seen.sent.calls)]
    return dict(peak_bytes=sum(seen.peak.values()), between_bytes=sum(seen.between.values()),
                peak_by_kind=seen.peak, between_by_kind=seen.between, most_by_kind=seen.most,
                flops=seen.flops, sent=sent)
