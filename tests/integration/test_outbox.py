"""The outbox and its relay (design, section 9), on the real broker."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.relay import OutboxRelay
from outbox.services import NotInTransaction, enqueue
from pinactivity.clock import statement_time
from pinactivity.ids import new_id
from pinactivity.kafka.producer import DeliveryFault, KafkaPublisher
from pinactivity.times import iso_utc
from sessions.events import SessionEnded, SessionLinked
from tests.concurrency import run_together

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.kafka]

SESSION_ENDED = SessionEnded.TOPIC


def session_ended(**fields: Any) -> SessionEnded:
    moment = statement_time()
    return SessionEnded(
        **{
            "session_id": new_id(),
            "anonymous_id": new_id(),
            "user_id": None,
            "created_at": iso_utc(moment - timedelta(seconds=90.5)),
            "last_activity_at": iso_utc(moment),
            "duration_seconds": 90,
            "version": 2,
            **fields,
        }
    )


def enqueue_committed(*events: SessionEnded) -> None:
    with transaction.atomic():
        enqueue(events)


@pytest.fixture
def publisher(kafka_topics: None) -> Any:
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=8)
    )
    yield publisher
    publisher.close()


def relay(publisher: Any, **options: Any) -> OutboxRelay:
    return OutboxRelay(publisher=publisher, options=OutboxOptions(**options))


def test_enqueue_outside_a_transaction_raises() -> None:
    with pytest.raises(NotInTransaction):
        enqueue([session_ended()])
    assert not OutboxMessage.objects.exists()


def test_rolled_back_change_leaves_no_event() -> None:
    with transaction.atomic():
        enqueue([session_ended()])
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()


def test_text_of_any_kind_survives_the_way_into_the_table() -> None:
    class Odd(SessionEnded):
        def payload(self) -> dict[str, Any]:
            return {"Text": 'tab\t newline\n return\r backslash\\ "quotes" \\N Ж 🏠', "None": None}

    event = session_ended()
    odd = Odd(**{name: getattr(event, name) for name in event.__slots__})
    enqueue_committed(odd)
    assert json.loads(OutboxMessage.objects.get().payload) == odd.payload()


def test_relay_delivers_key_value_and_headers(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    event = session_ended()
    enqueue_committed(event)

    result = relay(publisher).run()

    assert (result.published, result.parked, result.fault) == (1, 0, None)
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


def test_relay_drains_many_batches_in_order_within_a_key(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    keys = [new_id() for _ in range(20)]
    for version in range(2, 12):
        enqueue_committed(*[session_ended(session_id=key, version=version) for key in keys])

    result = relay(publisher, batch_size=33).run()

    assert (result.published, result.fault) == (200, None)
    versions: dict[bytes, list[int]] = {}
    for record in read_topic(SESSION_ENDED):
        versions.setdefault(record.key, []).append(int(dict(record.headers)["Version"]))
    assert set(versions) == {str(key).encode() for key in keys}
    assert all(seen == list(range(2, 12)) for seen in versions.values())


def test_two_relays_at_once_publish_each_message_once(
    kafka_topics: None, read_topic: Callable[[str], list[Any]]
) -> None:
    for _ in range(10):
        enqueue_committed(*[session_ended() for _ in range(50)])

    def work() -> int:
        publisher = KafkaPublisher(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            delivery_timeout=timedelta(seconds=8),
        )
        try:
            return relay(publisher, batch_size=25).run().published
        finally:
            publisher.close()

    assert sum(run_together([work, work])) <= 500
    relay_again = work()
    assert OutboxMessage.objects.filter(published_at__isnull=True).count() == 0, relay_again
    ids = [dict(record.headers)["MessageId"] for record in read_topic(SESSION_ENDED)]
    assert len(ids) == len(set(ids)) == 500


def test_message_too_large_is_parked_and_the_rest_flows_c42(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    class Large(SessionEnded):
        def payload(self) -> dict[str, Any]:
            return {"Text": "x" * 2_000_000}

    event = session_ended()
    large = Large(**{name: getattr(event, name) for name in event.__slots__})
    enqueue_committed(large, session_ended(), session_ended())

    result = relay(publisher).run()

    assert (result.published, result.parked, result.fault) == (2, 1, None)
    parked = OutboxMessage.objects.get(key=str(large.session_id))
    assert parked.parked_at is not None
    assert parked.last_error == "MessageSizeTooLargeError"
    assert len(read_topic(SESSION_ENDED)) == 2
    assert relay(publisher).run().claimed == 0


def test_absent_broker_leaves_everything_pending_and_spends_no_attempt() -> None:
    enqueue_committed(session_ended(), session_ended())
    publisher = KafkaPublisher(
        bootstrap_servers=["127.0.0.1:1"], delivery_timeout=timedelta(seconds=1)
    )

    result = relay(publisher).run()

    assert result.published == 0
    assert result.fault is not None
    assert list(OutboxMessage.objects.values_list("published_at", "parked_at", "attempts")) == [
        (None, None, 0),
        (None, None, 0),
    ]


class OneTopicIsGone:
    """A broker that has lost one topic: what the real one here, which makes topics, cannot do."""

    def __init__(self, publisher: Any, topic: str) -> None:
        self._publisher, self._topic = publisher, topic

    def publish(self, messages: Any) -> Any:
        there = [message for message in messages if message.topic != self._topic]
        answers = iter(self._publisher.publish(there))
        gone = DeliveryFault("KafkaTimeoutError", message_at_fault=False)
        return [gone if m.topic == self._topic else next(answers) for m in messages]


def test_topic_that_cannot_be_sent_to_keeps_no_other_waiting(publisher: Any) -> None:
    linked = SessionLinked(
        session_id=new_id(),
        anonymous_id=new_id(),
        user_id=new_id(),
        linked_at=statement_time(),
        version=2,
    )
    ended_later = session_ended(session_id=linked.session_id, version=3)
    with transaction.atomic():
        enqueue([linked, session_ended(), ended_later, session_ended()])

    result = relay(OneTopicIsGone(publisher, SessionLinked.TOPIC)).run()

    assert (result.published, result.fault) == (2, "KafkaTimeoutError")
    pending = OutboxMessage.objects.filter(published_at__isnull=True)
    assert set(pending.values_list("key", flat=True)) == {str(linked.session_id)}
    assert pending.count() == 2, "a later message overtook its key's earlier one"
    assert relay(publisher).run().published == 2


def test_lower_id_that_commits_late_is_still_sent(publisher: Any) -> None:
    late = connection.copy()
    try:
        late.set_autocommit(False)
        with late.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_messages (message_id, topic, key, headers, payload)"
                " VALUES (%s, %s, 'k', '{}', '{}')",
                [new_id(), SESSION_ENDED],
            )
        enqueue_committed(session_ended())
        assert relay(publisher).run().published == 1
        late.commit()
    finally:
        late.close()
    assert relay(publisher).run().published == 1
