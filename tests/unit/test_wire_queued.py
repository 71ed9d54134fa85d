"""What waits for peers: one budget for all of them, and who reads least goes first."""

from __future__ import annotations

from potluck.wire.queued import TRACKED_BYTES, Queued


class Sent:
    """A message that has left when a test says so."""

    def __init__(self) -> None:
        self.done = False


def test_what_has_left_is_not_counted() -> None:
    queued = Queued(most_bytes=100)
    messages = [Sent(), Sent()]
    for now, message in enumerate(messages):
        queued.sent(b"a", message, 60, float(now))
    assert (queued.total_bytes, queued._queues[b"a"].total_bytes) == (120, 120)
    messages[0].done = True
    assert queued.stuck(2.0) == []
    assert queued.total_bytes == 60
    messages[1].done = True
    queued.look(3.0)
    assert (queued.total_bytes, queued._queues) == (0, {})


def test_whoever_has_not_read_for_the_longest_time_goes_until_the_rest_fits() -> None:
    queued = Queued(most_bytes=100)
    for name in (b"reader", b"old", b"older", b"new"):
        now = {b"older": 1.0, b"old": 2.0}.get(name, 3.0)
        queued.sent(name, Sent(), 40, now)
    read = Sent()
    read.done = True
    queued.sent(b"reader", Sent(), 40, 4.0)
    queued._queues[b"reader"].messages[0] = (read, 40)
    assert queued.stuck(5.0) == [(b"older", 40), (b"old", 40)] or queued.total_bytes <= 100
    assert queued._queues[b"reader"].total_bytes == 40
    assert queued._queues[b"new"].total_bytes == 40
    assert queued.stuck(6.0) == []


def test_one_queue_that_moves_does_not_hide_one_that_does_not() -> None:
    queued = Queued(most_bytes=1000)
    queued.sent(b"rogue", Sent(), 900, 0.0)
    for now in range(1, 50):
        message = Sent()
        queued.sent(b"guest", message, 200, float(now))
        out = queued.stuck(float(now))
        if now == 1:
            assert out == [(b"rogue", 900)]
        else:
            assert out == []
        message.done = True


def test_small_messages_are_counted_together() -> None:
    queued = Queued(most_bytes=100)
    assert queued.to_track(b"a", TRACKED_BYTES) == TRACKED_BYTES
    found = [queued.to_track(b"a", TRACKED_BYTES // 4) for _ in range(8)]
    assert found == [None, None, None, TRACKED_BYTES] * 2
    for number in range(5000):
        queued.to_track(number.to_bytes(4, "little"), 1)
    assert len(queued._small) <= 1024
