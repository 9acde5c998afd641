"""Dead-letter records: what they hold, and where they go."""

from datetime import UTC, datetime

import pytest

from pinactivity.kafka.dead_letter_topics import make_dead_letter
from pinactivity.kafka.dead_lettering import count_poison_at_end, find_limit
from pinactivity.kafka.entry import Entry, State
from pinactivity.kafka.record import Record
from pinactivity.kafka.spec import ConsumerSpec
from pinactivity.kafka.topics import dead_letter_topics
from tests.consuming import NumberHandler


def test_dead_letter_keeps_everything_and_replaces_older_reasons() -> None:
    raw = Record("t", 3, 7, 0, None, b"\xff", (("A", b"\x00"), ("A", None), ("dlq-reason", b"old")))
    dead_letter = make_dead_letter(
        raw, group="g", reason="new", at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    assert (dead_letter.topic, dead_letter.key, dead_letter.value) == ("t.g.dlq", None, b"\xff")
    assert dead_letter.headers == (
        ("A", b"\x00"),
        ("A", b""),
        ("dlq-reason", b"new"),
        ("dlq-topic", b"t"),
        ("dlq-partition", b"3"),
        ("dlq-offset", b"7"),
        ("dlq-at", b"2026-01-01T00:00:00.000000Z"),
    )


def test_every_topic_of_a_consumer_has_its_dead_letter_topic() -> None:
    spec = ConsumerSpec(name="n", topics=("a", "b"), group="g", handler=NumberHandler)
    assert dead_letter_topics([spec]) == ("a.g.dlq", "b.g.dlq")


def entries(states: str) -> list[Entry[None]]:
    """Make messages: p is poison, d is dead-lettered, t is a tombstone, w is written."""
    known = {"p": State.POISON, "d": State.DEAD_LETTERED, "t": State.SKIPPED, "w": State.WRITTEN}
    return [
        Entry(Record("t", 0, offset, 0, None, b"", (), letter == "t"), None, known[letter])
        for offset, letter in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "in_a_row", "limit", "index"),
    [
        ("", 0, 1, None),
        ("pp", 0, 2, None),
        ("ppp", 0, 2, 2),
        ("dpp", 0, 2, 2),
        ("pp", 1, 2, 1),
        ("ptptp", 0, 2, 4),
        ("ppwpp", 0, 2, None),
        ("wpp", 9, 2, None),
        ("ppp", 0, 0, None),
    ],
)
def test_limit_lies_at_the_first_message_with_too_many_poison_messages_before(
    states: str, in_a_row: int, limit: int, index: int | None
) -> None:
    assert find_limit(entries(states), in_a_row=in_a_row, limit=limit) == index


@pytest.mark.parametrize(
    ("states", "count"),
    [("", 3), ("t", 3), ("p", 4), ("dtp", 5), ("w", 0), ("wdp", 2), ("pw", 0), ("pwt", 0)],
)
def test_poison_in_a_row_is_counted_from_the_end_of_a_batch(states: str, count: int) -> None:
    assert count_poison_at_end(entries(states), in_a_row=3) == count
