"""What the relay sends, and which messages it marks as published."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import Error, connection
from kafka.partitioner import murmur2

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import DeliveryError, KafkaPublisher, Message, Publisher
from pinactivity.kafka.topics import SESSION_ENDED
from sessions.events import SessionEnded
from tests.outbox import (
    RefusingPublisher,
    end_backoffs,
    end_other_connections,
    enqueue_committed,
    enqueue_versions,
    make_relay,
    session_ended,
    versions_by_key,
)
from tests.processes import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.kafka
def test_relay_delivers_key_value_and_headers(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    event = session_ended()
    enqueue_committed(event)

    result = make_relay(publisher).run()

    assert (result.published, result.parked, result.error) == (1, 0, None)
    message = OutboxMessage.objects.get()
    assert message.published_at is not None
    (record,) = read_topic(SESSION_ENDED)
    assert record.key.decode() == str(event.session_id)
    assert json.loads(record.value) == {
        "SessionId": str(event.session_id),
        "AnonymousId": str(event.anonymous_id),
        "UserId": None,
        "CreatedAt": event.created_at,
        "LastActivityAt": event.last_activity_at,
        "DurationSeconds": 90,
    }
    headers = {name: value.decode() for name, value in record.headers}
    assert headers == {
        "MessageId": str(message.message_id),
        "CreatedAt": iso_utc(message.created_at),
        **json.loads(message.headers),
    }
    assert set(headers) == {
        "MessageId",
        "EventType",
        "AggregateType",
        "AggregateId",
        "ContractVersion",
        "Version",
        "CreatedAt",
        "CorrelationId",
        "traceparent",
    }


@pytest.mark.kafka
def test_relay_drains_many_batches_in_order_within_a_key(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    keys = [new_id() for _ in range(20)]
    for version in range(2, 12):
        enqueue_committed(*[session_ended(session_id=key, version=version) for key in keys])

    result = make_relay(publisher, batch_size=33).run()

    assert (result.published, result.error) == (200, None)
    versions: dict[bytes, list[int]] = {}
    for record in read_topic(SESSION_ENDED):
        assert record.partition == (murmur2(record.key) & 0x7FFFFFFF) % 6, (
            "not the partition of other producers"
        )
        versions.setdefault(record.key, []).append(int(dict(record.headers)["Version"]))
    assert set(versions) == {str(key).encode() for key in keys}
    assert all(seen == list(range(2, 12)) for seen in versions.values())


@pytest.mark.kafka
def test_message_too_large_is_parked_and_the_rest_flows_c42(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    class Large(SessionEnded, frozen=True, kw_only=True):
        def payload(self) -> dict[str, Any]:
            return {"Text": "x" * 2_000_000}

    event = session_ended()
    large = Large(**msgspec.structs.asdict(event))
    enqueue_committed(large, session_ended(), session_ended())

    result = make_relay(publisher).run()

    assert (result.published, result.parked, result.error) == (2, 1, None)
    parked = OutboxMessage.objects.get(key=str(large.session_id))
    assert parked.parked_at is not None
    assert parked.last_error == "MessageSizeTooLargeError"
    assert len(read_topic(SESSION_ENDED)) == 2
    assert make_relay(publisher).run().claimed == 0


def test_absent_broker_leaves_everything_pending_and_spends_no_attempt() -> None:
    enqueue_committed(session_ended(), session_ended())
    publisher = KafkaPublisher(
        bootstrap_servers=["127.0.0.1:1"], delivery_timeout=timedelta(seconds=1)
    )

    result = make_relay(publisher).run()

    assert result.published == 0
    assert result.error is not None
    assert list(OutboxMessage.objects.values_list("published_at", "parked_at", "attempts")) == [
        (None, None, 0),
        (None, None, 0),
    ]


class _AfterTheMarks:
    """Publishes; the first time it waits until the relay's transaction has marked the batch."""

    def __init__(self, publisher: Publisher, then: Callable[[Any], None] = lambda _: None) -> None:
        self._publisher, self._then = publisher, then
        self._is_marked = False

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        if not self._is_marked:
            self._is_marked = True
            self._wait_for_marks()
        return self._publisher.publish(messages)

    def _wait_for_marks(self) -> None:
        other = connection.copy()
        try:
            wait_until(lambda: not unlocked(other), what="the marks")
            with other.cursor() as cursor:
                cursor.execute("SELECT count(published_at) FROM outbox_messages")
                assert cursor.fetchone() == (0,), "committed before Kafka acknowledged"
            self._then(other)
        finally:
            other.close()

    def is_reachable(self) -> bool:
        return True

    def close(self) -> None: ...


def unlocked(other: Any) -> list[Any]:
    """Return the ids of messages that no transaction has changed or locked."""
    with other.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_messages FOR UPDATE SKIP LOCKED")
        return cursor.fetchall()  # type: ignore[no-any-return]  # a cursor's


@pytest.mark.kafka
def test_marks_made_while_a_batch_is_sent_stay_only_on_what_kafka_acknowledged(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    poisoned, key = new_id(), new_id()
    enqueue_committed(
        session_ended(session_id=key),
        session_ended(session_id=poisoned),
        session_ended(session_id=poisoned, version=3),
        session_ended(session_id=key, version=3),
        session_ended(),
    )
    unsendable = OutboxMessage.objects.latest("id")
    OutboxMessage.objects.filter(id=unsendable.id).update(topic="not a topic's name")
    failing = RefusingPublisher(publisher, lambda message: message.key == str(poisoned).encode())

    result = make_relay(_AfterTheMarks(failing)).run_once()

    assert (result.claimed, result.published, result.parked) == (5, 2, 1)
    states = OutboxMessage.objects.order_by("id")
    assert [(row.delivery, row.attempts) for row in states] == [
        ("Published", 0),
        ("Retrying (CorruptRecordError)", 1),
        ("Pending", 0),
        ("Published", 0),
        ("Parked (ValueError)", 1),
    ]
    end_backoffs()
    assert make_relay(publisher).run().published == 2
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(each).encode(): [2, 3] for each in (key, poisoned)
    }


@pytest.mark.kafka
def test_batch_whose_transaction_is_lost_after_its_marks_is_resent(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    """Marks that were not committed do not count, whatever ended the transaction."""
    key = new_id()
    enqueue_versions([key], range(2, 4))
    enqueue_committed(*[session_ended() for _ in range(5)])
    enqueue_versions([key], range(4, 5))

    with pytest.raises(Error):
        make_relay(_AfterTheMarks(publisher, end_other_connections)).run_once()
    connection.close()
    assert OutboxMessage.objects.pending().count() == 8

    assert make_relay(publisher).run().published == 8
    arrived = read_topic(SESSION_ENDED)
    ids = [dict(record.headers)["MessageId"].decode() for record in arrived]
    assert len(ids) > 8, "some were resent, with the same id"
    assert set(ids) == set(map(str, OutboxMessage.objects.values_list("message_id", flat=True)))
    assert versions_by_key(arrived)[str(key).encode()] == [2, 3, 4]
