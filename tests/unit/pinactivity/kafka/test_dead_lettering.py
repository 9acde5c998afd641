"""Dead-letter records: what they hold, and where they go."""

from datetime import UTC, datetime

from pinactivity.kafka.dead_letters import make_dead_letter
from pinactivity.kafka.record import Record
from pinactivity.kafka.spec import ConsumerSpec
from pinactivity.kafka.topics import dead_letter_topics
from tests.consuming import (
    NumberHandler,
)

GOOD = b'{"Number": 1}'
SECRET = "0f8fad5b-d9cb-469f-a165-70867728950e"


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
