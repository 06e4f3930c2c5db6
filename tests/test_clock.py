"""The virtual clock: played back by hand, and the tables that the READMEs have of it."""
import clock
import pytest
from clock import Operation, play
from layouts import every_other
from steps import NAMES, ROOT


def operation(n, wire, ranks=(0, 1), what="_allgather_base_"):
    return Operation(("g", ranks, what, n), ranks, wire, "dp")


def rank(*notes, operations):
    return list(notes), operations


def test_a_collective_waits_for_the_slowest_and_takes_its_bytes():
    operations = [operation(0, 5)]
    fast = rank(("compute", 10), ("start", 0), ("wait", 0), ("compute", 1), operations=operations)
    slow = rank(("compute", 30), ("start", 0), ("wait", 0), ("compute", 1), operations=operations)
    played = play([fast, slow], 2)
    assert played.time == 30 + 2 * 5 + 1 and played.compute == [11, 31]
    assert played.waited == {"dp": ((40 - 10) + (40 - 30)) / 2}


@pytest.mark.parametrize("work, time", [(100, 107), (4, 17)])
def test_what_is_computed_meanwhile_hides_it(work, time):
    notes = [("start", 0), ("compute", work), ("wait", 0), ("compute", 7)]
    assert play([rank(*notes, operations=[operation(0, 5)])] * 2, 2).time == time


def test_a_link_carries_one_thing_after_the_other():
    notes = [("start", 0), ("start", 1), ("wait", 1), ("wait", 0)]
    both = [operation(0, 5), operation(1, 8)]
    assert play([rank(*notes, operations=both)] * 2, 1).time == 13


def test_messages_in_both_directions_travel_together():
    there, back = operation(0, 5, (0, 1), "send"), operation(0, 5, (1, 0), "send")
    notes = [("start", 0), ("start", 1), ("wait", 0), ("wait", 1)]
    played = play([rank(*notes, operations=[there, back]), rank(*notes, operations=[back, there])], 1)
    assert played.time == 5


def test_a_message_is_sent_when_both_ends_have_started_it():
    send = [operation(0, 5, (0, 1), "send")]
    first = rank(("start", 0), ("compute", 2), ("wait", 0), operations=send)
    last = rank(("compute", 10), ("start", 0), ("wait", 0), operations=send)
    assert play([first, last], 1).time == 15


def test_ranks_that_wait_for_ever_are_an_error():
    with pytest.raises(AssertionError, match="for ever"):
        play([rank(("start", 0), ("wait", 0), operations=[operation(0, 1)]), rank(operations=[])], 1)


def test_a_real_run(pool):
    """Ranks with equal parts of the batch wait for nothing else than what is sent; what that takes grows with its bytes."""
    of_ranks = clock.run(pool, NAMES[1], 2, "--dp_mode naive", num_hidden_layers=1)
    played = [play(of_ranks, speed) for speed in (0, 10, 20)]
    assert played[0].time == played[0].compute[0] == played[0].compute[1] > 1e8
    weights = 2 * 64 * 128 + 128 * (2 * 128 + 2 * 64 + 3 * 384 + 2) + 128
    per_rank = 4 * (weights + 1)                          # an all-reduce between two: as many bytes; and the loss
    assert [p.time - played[0].time for p in played[1:]] == [10 * per_rank, 20 * per_rank]
    overlap = clock.run(pool, NAMES[1], 2, "--dp_mode overlap", num_hidden_layers=1)
    assert play(overlap, 20).time < played[2].time and play(overlap, 0).time == played[0].time


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, *every_other(number for number in clock.LAYOUTS if number != 3)])       # 3: a break's test
def test_the_tables_in_the_readmes(pool, number):
    assert "\n".join(clock.table(pool, number)) in (ROOT / NAMES[number - 1] / "README.md").read_text()
