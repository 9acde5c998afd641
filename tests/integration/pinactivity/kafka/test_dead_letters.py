"""Dead-record records as an operator sees them, on the real broker."""

import json
from io import StringIO

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError

from pinactivity.kafka.dead_letter_topics import DeadLetterTopics
from tests.consuming import (
    Bench,
    NumberHandler,
    drive,
)
from tests.echo.process import Echo
from tests.processes import wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture
def poisoned(echo: Echo) -> Bench:
    """A bench with four dead-record records: two of each reason."""
    bench = echo.bench
    bench.send_bytes(b"no json", b"{}", b"no json", b"{}", key=b"k")
    drive(bench.consumer(NumberHandler()), lambda: bench.committed == 4)
    bench.close()
    return bench


def run_command(*arguments: str) -> str:
    output = StringIO()
    call_command("dead_letters", *arguments, stdout=output)
    return output.getvalue()


def test_dead_letters_are_counted_by_reason(poisoned: Bench) -> None:
    dead_letters = DeadLetterTopics(bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)
    assert dead_letters.count([poisoned.dead_letter_topic]) == {
        poisoned.dead_letter_topic: {"value-not-json": 2, "number-missing": 2}
    }


def test_dead_letters_list_knows_the_registered_topics(kafka_topics: None) -> None:
    call_command("create_topics", stdout=StringIO())
    topic = "pin.identity.user-signed-in.user-activity-identity-signed-in.dlq"
    wait_until(lambda: topic in run_command("list"), what="the news of a topic just created")


def test_dead_letter_is_shown_whole(poisoned: Bench) -> None:
    record = poisoned.dead_letters[1]
    shown = json.loads(
        run_command("show", poisoned.dead_letter_topic, str(record.partition), str(record.offset))
    )
    assert (shown["key"], shown["value"]) == ("k", {})
    assert shown["headers"]["dlq-reason"] == "number-missing"
    with pytest.raises(CommandError, match="no record"):
        run_command("show", poisoned.dead_letter_topic, str(record.partition), "99")


def test_redrive_sends_the_original_once_whatever_the_order_of_redrives(
    poisoned: Bench,
) -> None:
    topic = poisoned.dead_letter_topic
    original = poisoned.broker.read(poisoned.topic)

    assert run_command("redrive", topic, "--limit", "1") == "1 published again, 3 remain\n"
    assert (
        run_command("redrive", topic, "--reason", "number-missing")
        == "2 published again, 0 remain\n"
    )
    assert run_command("redrive", topic) == "1 published again, 0 remain\n"
    assert run_command("redrive", topic) == "0 published again, 0 remain\n"

    again = poisoned.broker.read(poisoned.topic)[4:]
    assert [(each.key, each.value, each.headers) for each in again] == [
        (original[index].key, original[index].value, original[index].headers)
        for index in (0, 1, 3, 2)
    ]


def test_redrive_of_a_missing_topic_is_refused() -> None:
    with pytest.raises(CommandError, match="There is no topic"):
        run_command("redrive", "pin.test.nothing.group.dlq")
