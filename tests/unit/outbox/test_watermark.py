"""The decisions of the watermark, without a database."""

from outbox.watermark import Watermark

NOBODY: frozenset[str] = frozenset()


def scan(watermark: Watermark, last_new_id: int | None, writers: frozenset[str]) -> Watermark:
    """Return the watermark after a scan of which everything was sent."""
    begun = watermark.begin_scan(writers)
    return begun.end_scan(last_new_id, seconds=0.0, was_full=False, now=0.0)


def test_watermark_moves_in_the_third_scan_when_nobody_writes() -> None:
    watermark = Watermark()
    positions = []
    for last_new_id in (10, 20, 30, 40):
        watermark = scan(watermark, last_new_id, NOBODY)
        positions.append(watermark.position)
    assert positions == [0, 0, 10, 20]


def test_watermark_waits_for_the_writers_that_may_commit_a_lower_id() -> None:
    watermark = scan(scan(Watermark(), 10, NOBODY), 20, frozenset({"3/7", "4/1"}))
    watermark = scan(watermark, 30, frozenset({"4/1", "5/1"}))
    assert watermark.position == 0
    watermark = scan(watermark, 40, frozenset({"5/1"}))
    assert watermark.position == 10, "the writer 5/1 began after the candidate was noted"


def test_watermark_stays_when_a_scan_does_not_end() -> None:
    watermark = scan(scan(Watermark(), 10, NOBODY), None, NOBODY)
    assert watermark.begin_scan(NOBODY).position == 0
    assert scan(watermark, None, NOBODY).position == 10


def test_watermark_goes_back_to_the_first_when_a_new_message_lies_below_it() -> None:
    watermark = Watermark()
    for last_new_id in (10, 20, 30):
        watermark = scan(watermark, last_new_id, NOBODY)
    assert watermark.position == 10
    assert scan(watermark, 5, NOBODY).position == 0


def test_full_scan_takes_at_most_a_twentieth_of_the_time() -> None:
    moved = scan(scan(scan(Watermark(), 10, NOBODY), 20, NOBODY), 30, NOBODY)
    assert moved.scan_start(now=100.0) == 0, "the first scan is full"
    quick = moved.end_scan(40, seconds=0.1, was_full=True, now=100.0)
    slow = moved.end_scan(40, seconds=2.0, was_full=True, now=100.0)
    assert [quick.scan_start(now) for now in (109.9, 110.0)] == [quick.position, 0]
    assert [slow.scan_start(now) for now in (139.9, 140.0)] == [slow.position, 0]
