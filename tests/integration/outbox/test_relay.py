"""The outbox and its relay (design, section 9), on the real broker."""

import io
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from celery import current_app
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import Error, connection, transaction
from django.test import Client
from kafka.partitioner import murmur2
from structlog.testing import capture_logs

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.relay import OutboxRelay
from outbox.retention import purge_published
from outbox.selectors import outbox_snapshot
from outbox.services import NotInTransaction, enqueue, redrive
from outbox.wakeup import _Bell
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import DeliveryFault, KafkaPublisher, Message, Publisher
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry import metrics
from sessions.events import SessionEnded, SessionLinked
from tests.concurrency import run_together
from tests.factories import make_session
from tests.processes import wait_until
from tests.tokens import SECRET, bearer, development_token

pytestmark = pytest.mark.django_db(transaction=True)

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


def end_waits() -> None:
    """Let the time pass until which messages wait."""
    OutboxMessage.objects.waiting().end_waits()


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
    class Odd(SessionEnded, frozen=True, kw_only=True):
        def payload(self) -> dict[str, Any]:
            return {"Text": 'tab\t newline\n return\r backslash\\ "quotes" \\N Ж 🏠', "None": None}

    event = session_ended()
    odd = Odd(**msgspec.structs.asdict(event))
    enqueue_committed(odd)
    assert json.loads(OutboxMessage.objects.get().payload) == odd.payload()


@pytest.mark.kafka
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


@pytest.mark.kafka
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
        assert record.partition == (murmur2(record.key) & 0x7FFFFFFF) % 6, "not as other producers"
        versions.setdefault(record.key, []).append(int(dict(record.headers)["Version"]))
    assert set(versions) == {str(key).encode() for key in keys}
    assert all(seen == list(range(2, 12)) for seen in versions.values())


@pytest.mark.kafka
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

    def is_reachable(self) -> bool:
        return True


def test_topic_that_cannot_be_sent_to_keeps_no_other_waiting(publisher: Any) -> None:
    linked = SessionLinked(
        session_id=new_id(),
        anonymous_id=new_id(),
        user_id=new_id(),
        linked_at=iso_utc(statement_time()),
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
    assert set(pending.values_list("attempts", flat=True)) == {0}
    end_waits()
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


# -- marks, which are made while the batch is sent -----------------------------------------


class _AfterTheMarks:
    """Publishes, the first time, when the relay's transaction has marked the batch."""

    def __init__(self, publisher: Publisher, then: Callable[[Any], None] = lambda _: None) -> None:
        self._publisher, self._then = publisher, then
        self._is_marked = False

    def publish(self, messages: Sequence[Message]) -> list[DeliveryFault | None]:
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
                assert cursor.fetchone() == (0,), "told before Kafka's word was known"
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
def test_marks_made_while_a_batch_is_sent_are_kept_for_what_kafka_acknowledged_alone(
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
    failing = _Failing(publisher, lambda message: message.key == str(poisoned).encode())

    result = relay(_AfterTheMarks(failing)).run_once()

    assert (result.claimed, result.published, result.parked) == (5, 2, 1)
    states = OutboxMessage.objects.order_by("id")
    assert [(row.delivery, row.attempts) for row in states] == [
        ("Published", 0),
        ("Waiting (CorruptRecordError)", 1),
        ("Pending", 0),
        ("Published", 0),
        ("Parked (ValueError)", 1),
    ]
    end_waits()
    assert relay(publisher).run().published == 2
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(each).encode(): [2, 3] for each in (key, poisoned)
    }


@pytest.mark.kafka
def test_batch_whose_transaction_is_lost_after_its_marks_is_sent_again(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    """Whoever ends it, marks that nobody committed count for nothing."""
    key = new_id()
    enqueue_versions([key], range(2, 4))
    enqueue_committed(*[session_ended() for _ in range(5)])
    enqueue_versions([key], range(4, 5))

    with pytest.raises(Error):
        relay(_AfterTheMarks(publisher, end_other_connections)).run_once()
    connection.close()
    assert OutboxMessage.objects.pending().count() == 8

    assert relay(publisher).run().published == 8
    arrived = read_topic(SESSION_ENDED)
    ids = [dict(record.headers)["MessageId"].decode() for record in arrived]
    assert len(ids) > 8, "some were sent twice, with the same id"
    assert set(ids) == set(map(str, OutboxMessage.objects.values_list("message_id", flat=True)))
    assert versions_by_key(arrived)[str(key).encode()] == [2, 3, 4]


# -- batches of one transaction, each read while the one before is sent ---------------------


class _Before:
    """Publishes, and before the batch of a number, from 1 on, does something."""

    def __init__(self, publisher: Publisher, number: int, then: Callable[[Any], None]) -> None:
        self._publisher, self._number, self._then = publisher, number, then
        self._begun = 0

    def publish(self, messages: Sequence[Message]) -> list[DeliveryFault | None]:
        self._begun += 1
        if self._begun == self._number:
            other = connection.copy()
            try:
                self._then(other)
            finally:
                other.close()
        return self._publisher.publish(messages)

    def is_reachable(self) -> bool:
        return True

    def close(self) -> None: ...


def end_other_connections(other: Any) -> None:
    with other.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_transaction_takes_a_few_batches_and_then_tells_of_them(publisher: Any) -> None:
    insert_messages(100)
    told: list[Any] = []

    def note(other: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("SELECT count(published_at) FROM outbox_messages")
            told.append(cursor.fetchone())

    result = relay(_Before(publisher, 4, note), batch_size=10).run_once()

    assert (result.claimed, result.published) == (40, 40)
    assert told == [(0,)]
    assert OutboxMessage.objects.pending().count() == 60


def test_slow_broker_gets_one_batch_a_transaction(
    publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay._BEGIN_SECONDS", 0.2)
    insert_messages(30)
    worker = relay(_Before(publisher, 1, lambda _: time.sleep(0.3)), batch_size=10)

    assert worker.run_once().published == 10
    assert worker.run().published == 20


def test_fault_of_reading_ahead_keeps_what_was_sent(publisher: Any) -> None:
    insert_messages(25)
    odd = OutboxMessage.objects.order_by("id")[14]
    OutboxMessage.objects.filter(id=odd.id).update(headers='"no object"')
    worker = relay(publisher, batch_size=10)

    with capture_logs() as logs:
        assert worker.run_once().published == 10

    assert OutboxMessage.objects.pending().count() == 15
    assert [line["event"] for line in logs] == ["look ahead failed"]
    with pytest.raises(AttributeError):
        worker.run_once()


@pytest.mark.kafka
def test_fault_of_a_batch_keeps_what_was_read_ahead_from_being_sent(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    keys = [new_id() for _ in range(10)]
    enqueue_versions(keys, range(2, 6))

    def is_third_version_of_one(message: Message) -> bool:
        version = dict(message.headers)["Version"]
        return (message.key, version) == (str(keys[3]).encode(), b"3")

    result = relay(_Failing(publisher, is_third_version_of_one), batch_size=10).run_once()

    assert (result.claimed, result.published, result.is_held) == (20, 19, True)
    assert OutboxMessage.objects.pending().count() == 21
    end_waits()
    assert relay(publisher, batch_size=10).run().published == 21
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): [2, 3, 4, 5] for key in keys
    }


def test_relay_that_loses_a_transaction_is_where_it_was_before(publisher: Any) -> None:
    insert_messages(50)
    worker = relay(_Before(publisher, 4, end_other_connections), batch_size=10)

    with pytest.raises(Error):
        worker.run_once()
    connection.close()

    assert OutboxMessage.objects.pending().count() == 50
    results: list[Any] = []
    places = places_of(lambda: results.append(worker.run()))
    assert places[:3] == [0, 0, 0]
    assert results[0].published == 50


def test_order_of_a_key_holds_when_the_number_of_shards_changes_within_a_transaction(
    publisher: Any, read_topic: Callable[[str], list[Any]], settings: Any
) -> None:
    keys = [new_id() for _ in range(10)]
    settings.OUTBOX = OutboxOptions(shards=1)
    enqueue_versions(keys, range(2, 3))
    is_written = False

    def write_beside_the_mark(
        execute: Any, sql: str, parameters: Any, many: bool, context: Any
    ) -> Any:
        nonlocal is_written
        if sql.startswith("UPDATE") and not is_written:
            is_written = True
            for version, shards in enumerate((4, 1), start=3):
                settings.OUTBOX = OutboxOptions(shards=shards)
                run_together([partial(enqueue_versions, keys, range(version, version + 1))])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(write_beside_the_mark):
        result = relay(publisher, batch_size=10, shards=1).run()

    assert result.published == 30
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): [2, 3, 4] for key in keys
    }


# -- several relays ------------------------------------------------------------------------


class EverySeventhFails:
    """The real broker's publisher, but every seventh message is not sent.

    Shared by relays in threads, so that it counts what all of them send.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._lock = threading.Lock()

    def around(self, publisher: Publisher) -> Publisher:
        return _Failing(publisher, self._is_next_to_fail)

    def _is_next_to_fail(self, _: Message) -> bool:
        with self._lock:
            self._sent += 1
            return self._sent % 7 == 0


class _Failing:
    """Refuses some messages in the broker's name, and publishes the others."""

    def __init__(self, publisher: Publisher, fails: Callable[[Message], bool]) -> None:
        self._publisher, self._fails = publisher, fails

    def publish(self, messages: Sequence[Message]) -> list[DeliveryFault | None]:
        failing = [self._fails(message) for message in messages]
        pairs = zip(messages, failing, strict=True)
        answers = iter(self._publisher.publish([each for each, fails in pairs if not fails]))
        refused = DeliveryFault("CorruptRecordError", message_at_fault=False, was_refused=True)
        return [refused if fails else next(answers) for fails in failing]

    def is_reachable(self) -> bool:
        return True

    def close(self) -> None:
        self._publisher.close()


def versions_by_key(records: Sequence[Any]) -> dict[bytes, list[int]]:
    """In the order of arrival; a message that came again is left out."""
    seen: set[bytes] = set()
    versions: dict[bytes, list[int]] = {}
    for record in records:
        headers = dict(record.headers)
        if headers["MessageId"] not in seen:
            seen.add(headers["MessageId"])
            versions.setdefault(record.key, []).append(int(headers["Version"]))
    return versions


def enqueue_versions(keys: Sequence[Any], versions: range) -> None:
    for version in versions:
        enqueue_committed(*[session_ended(session_id=key, version=version) for key in keys])


def relay_until_drained(wrap: Callable[[Publisher], Publisher], **options: Any) -> Counter[str]:
    """Run a relay of its own until nothing is pending, waits cut short."""
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=8)
    )
    worker = relay(wrap(publisher), **options)
    counts: Counter[str] = Counter()
    try:
        while OutboxMessage.objects.pending().exists():
            result = worker.run()
            counts += Counter(published=result.published, faults=result.fault is not None)
            end_waits()
    finally:
        publisher.close()
    return counts


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.kafka)])
def test_order_of_a_key_holds_with_two_relays_when_every_seventh_send_fails_c41(
    kafka_topics: None,
    read_topic: Callable[[str], list[Any]],
    settings: Any,
    shards: int,
) -> None:
    settings.OUTBOX = OutboxOptions(shards=shards)
    keys = [new_id() for _ in range(12)]
    enqueue_versions(keys, range(2, 12))
    failing = EverySeventhFails()
    work = partial(relay_until_drained, failing.around, batch_size=25, shards=shards)

    counts = run_together([work, work])

    assert sum(count["published"] for count in counts) == 120
    assert sum(count["faults"] for count in counts) > 0
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): list(range(2, 12)) for key in keys
    }


@contextmanager
def held_shard(shard: int) -> Iterator[None]:
    """Hold a shard as another relay does."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(
                "SELECT pg_advisory_lock(hashtextextended(%s, 0))",
                [f"Pin:lock:outbox-relay:{shard}"],
            )
        yield
    finally:
        other.close()


def test_shard_that_another_relay_works_at_keeps_no_other_waiting(
    publisher: Any, settings: Any
) -> None:
    settings.OUTBOX = OutboxOptions(shards=4)
    enqueue_committed(*[session_ended() for _ in range(40)])
    pending = OutboxMessage.objects.pending()
    assert set(pending.values_list("shard", flat=True)) == {3, 4, 5, 6}

    with held_shard(5):
        relay(publisher, shards=4).run()
        assert set(pending.values_list("shard", flat=True)) == {5}
    relay(publisher, shards=4).run()
    assert not pending.exists()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4)])
def test_order_of_a_key_holds_when_the_number_of_shards_changes(
    publisher: Any,
    read_topic: Callable[[str], list[Any]],
    settings: Any,
    before: int,
    after: int,
) -> None:
    """While writers of both layouts are there, as in a deployment: one version each in turn."""
    keys = [new_id() for _ in range(10)]
    layouts = [before, after] * 5
    for version, shards in enumerate(layouts, start=2):
        settings.OUTBOX = OutboxOptions(shards=shards)
        enqueue_versions(keys, range(version, version + 1))

    result = relay(publisher, batch_size=7, shards=after).run()

    assert result.published == 100
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): list(range(2, 12)) for key in keys
    }


def test_earlier_message_that_commits_late_goes_out_before_its_keys_later_one(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    """The relay's place has moved beyond the late one's id, had it not watched who writes."""
    worker, late = relay(publisher), connection.copy()
    enqueue_committed(session_ended())
    worker.run()
    key = new_id()
    try:
        late.set_autocommit(False)
        with late.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_messages (message_id, topic, key, headers, payload)"
                " VALUES (%s, %s, %s, '{\"Version\": \"2\"}', '{}')",
                [new_id(), SESSION_ENDED, str(key)],
            )
        for _ in range(4):
            enqueue_committed(session_ended())
            assert worker.run().published == 1
        late.commit()
    finally:
        late.close()
    enqueue_committed(session_ended(session_id=key, version=3))

    assert worker.run().published == 2
    assert versions_by_key(read_topic(SESSION_ENDED))[str(key).encode()] == [2, 3]


# -- faults --------------------------------------------------------------------------------


def test_backoff_of_a_poisoned_message_is_in_its_row_and_all_relays_keep_to_it_c46(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    poisoned = new_id()
    enqueue_committed(
        *[session_ended() for _ in range(5)],
        session_ended(session_id=poisoned, version=2),
        session_ended(session_id=poisoned, version=3),
        *[session_ended() for _ in range(5)],
    )
    tried: list[bytes | None] = []

    def fails(message: Message) -> bool:
        if message.key == str(poisoned).encode():
            tried.append(dict(message.headers)["Version"])
            return True
        return False

    relays = [relay(_Failing(publisher, fails)) for _ in range(5)]
    first = OutboxMessage.objects.filter(key=str(poisoned)).earliest("id")
    waits: list[timedelta] = []
    for attempt in range(1, 9):
        enqueue_committed(session_ended())
        for each in relays:
            each.run()
        first.refresh_from_db()
        assert len(tried) == attempt == first.attempts, "one attempt, whoever made it"
        assert first.next_attempt_at is not None
        waits.append(first.next_attempt_at - statement_time())
        end_waits()

    assert set(tried) == {b"2"}, "the key's later message never overtook it"
    assert first.last_error == "CorruptRecordError"
    assert first.delivery == "Waiting (CorruptRecordError)"
    longest = [timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]
    assert all(wait <= most for wait, most in zip(waits, longest, strict=True))
    assert waits[-1] > timedelta(seconds=30)
    assert OutboxMessage.objects.filter(published_at=None).count() == 2, "all others went out"

    relay(publisher).run()
    assert versions_by_key(read_topic(SESSION_ENDED))[str(poisoned).encode()] == [2, 3]


def test_message_refused_once_is_sent_again_by_itself(publisher: Any) -> None:
    """The broker refuses a request as a whole: its neighbours must not fail with it for ever."""
    enqueue_committed(*[session_ended() for _ in range(10)])
    batches: list[int] = []

    class Refusing(_Failing):
        def publish(self, messages: Sequence[Message]) -> list[DeliveryFault | None]:
            batches.append(len(messages))
            return super().publish(messages)

    keys = OutboxMessage.objects.order_by("id").values_list("key", flat=True)
    neighbours = {key.encode() for key in keys[3:6]}
    relay(Refusing(publisher, lambda message: message.key in neighbours)).run()
    end_waits()
    relay(Refusing(publisher, lambda _: False)).run()

    assert batches == [10, 1, 1, 1]
    assert not OutboxMessage.objects.pending().exists()


def test_wait_for_the_broker_is_shared_and_ends_when_it_is_back(publisher: Any) -> None:
    class Away:
        asked = 0
        is_back = False

        def publish(self, messages: Sequence[Message]) -> list[DeliveryFault | None]:
            if self.is_back:
                return publisher.publish(messages)  # type: ignore[no-any-return]  # a fixture's
            self.asked += 1
            return [DeliveryFault("NoBrokersAvailable", message_at_fault=False)] * len(messages)

        def is_reachable(self) -> bool:
            return self.is_back

        def close(self) -> None: ...

    away = Away()
    relays = [relay(away) for _ in range(3)]
    enqueue_committed(*[session_ended() for _ in range(3)])
    for each in relays:
        enqueue_committed(session_ended())
        each.run()
    assert away.asked == 1, "one relay has asked, and all keep to its wait"
    messages = OutboxMessage.objects.pending()
    assert list(messages.values_list("attempts", flat=True)) == [0] * 6

    away.is_back = True
    assert relays[1].run().published == 6


@pytest.mark.kafka
def test_message_that_cannot_be_sent_is_parked_and_sent_again_by_command(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    enqueue_committed(session_ended(), session_ended())
    unsendable = OutboxMessage.objects.earliest("id")
    OutboxMessage.objects.filter(id=unsendable.id).update(topic="not a topic's name")

    worker = relay(publisher)
    result = worker.run()

    assert (result.published, result.parked, result.fault) == (1, 1, None)
    unsendable.refresh_from_db()
    assert (unsendable.attempts, unsendable.delivery) == (1, f"Parked ({unsendable.last_error})")
    with pytest.raises(CommandError, match="which"):
        run_command("redrive")
    assert f"{unsendable.id}" in run_command("list")
    assert run_command("redrive", "--reason", "Another") == "0 on their way, 1 parked\n"
    assert run_command("redrive", str(unsendable.id)) == "1 on their way, 0 parked\n"

    assert worker.run().parked == 1, "still at fault: parked again"
    OutboxMessage.objects.filter(id=unsendable.id).update(topic=SESSION_ENDED)
    assert run_command("redrive", "--all") == "1 on their way, 0 parked\n"
    assert worker.run().published == 1, "although the relay's place is behind it"
    assert len(read_topic(SESSION_ENDED)) == 2


def run_command(*arguments: str) -> str:
    output = io.StringIO()
    call_command("parked_messages", *arguments, stdout=output)
    return output.getvalue()


def test_sending_again_touches_parked_messages_only() -> None:
    enqueue_committed(*[session_ended() for _ in range(4)])
    moment = statement_time()
    first, _, third, fourth = OutboxMessage.objects.order_by("id")
    OutboxMessage.objects.filter(id=first.id).update(published_at=moment)
    OutboxMessage.objects.filter(id__in=[third.id, fourth.id]).update(parked_at=moment)
    assert redrive(OutboxMessage.objects.all(), limit=1) == 1
    assert [message.delivery.split()[0] for message in OutboxMessage.objects.order_by("id")] == [
        "Published",
        "Pending",
        "Waiting",
        "Parked",
    ]


# -- what PostgreSQL makes of it -----------------------------------------------------------


def plans_of(call: Callable[[], object]) -> dict[str, set[str]]:
    """Run a call; return, of what it read from the table, each statement with its plan's nodes."""
    plans: dict[str, set[str]] = {}

    def nodes(plan: dict[str, Any]) -> Iterator[str]:
        yield plan["Node Type"]
        for part in plan.get("Plans", ()):
            yield from nodes(part)

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if "outbox_messages" in sql and "pg_locks" not in sql:
            execute(f"EXPLAIN (FORMAT JSON) {sql}", parameters, many, context)
            plans[sql] = set(nodes(context["cursor"].fetchone()[0][0]["Plan"]))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        call()
    return plans


def insert_messages(count: int, *, published: bool = False) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO outbox_messages (message_id, topic, key, headers, payload, published_at,
                                         created_at)
            SELECT gen_random_uuid(), %s, gen_random_uuid(), '{"Version": "2"}', '{}', moment,
                   coalesce(moment, statement_timestamp())
            FROM generate_series(1, %s),
                 (SELECT CASE WHEN %s THEN statement_timestamp() - interval '8 days' END)
                 AS since (moment)
            """,
            [SESSION_ENDED, count, published],
        )


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE outbox_messages")


@pytest.mark.parametrize("analyzed", ["empty", "all published", "as it is", "never"])
def test_reading_stays_an_index_scan_whatever_the_statistics_say(
    publisher: Any, analyzed: str
) -> None:
    if analyzed == "empty":
        analyze()
    insert_messages(5_000, published=True)
    if analyzed == "all published":
        analyze()
    insert_messages(5_000)
    if analyzed == "as it is":
        analyze()

    plans = plans_of(relay(publisher, batch_size=50).run_once)
    plans |= plans_of(lambda: purge_published(OutboxOptions()))
    plans |= plans_of(outbox_snapshot)

    assert len(plans) >= 7
    scans = {node for nodes in plans.values() for node in nodes if "Scan" in node or node == "Sort"}
    assert scans <= {"Index Scan", "Index Only Scan", "CTE Scan"}, plans


def places_of(call: Callable[[], Any]) -> list[int]:
    """Return the ids behind which a relay reads, in order."""
    places: list[int] = []

    def note(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if '"outbox_messages"."id" > ' in sql:
            places.append(parameters[1])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(note):
        call()
    return places


def test_relay_reads_on_from_where_it_was(publisher: Any) -> None:
    """Under a held xmin the index keeps what was sent; the place spares the relay that part."""
    worker = relay(publisher, batch_size=50)
    insert_messages(400)

    places = places_of(worker.run)

    assert not OutboxMessage.objects.pending().exists()
    ids = list(OutboxMessage.objects.order_by("id").values_list("id", flat=True))
    assert len(places) == 9
    assert places == [0, 0, 0, *ids[49:300:50]]


def pages_read(worker: OutboxRelay) -> int:
    """Run a relay; return how many pages the reading statements of its first look read."""
    pages: list[int] = []

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if 'FROM "outbox_messages"' in sql:
            execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", parameters, many, context)
            plan = context["cursor"].fetchone()[0][0]["Plan"]
            pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        worker.run_once()
    worker.run()
    return sum(pages)


def test_relay_reads_no_more_while_a_snapshot_is_held_c47(publisher: Any) -> None:
    """PostgreSQL keeps every entry of what was sent since; the rate is `make bench NAME=relay`."""
    worker, other = relay(publisher), connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM outbox_messages")
            pages = []
            for _ in range(12):
                insert_messages(500)
                pages.append(pages_read(worker))
            insert_messages(500)
            from_the_first = pages_read(relay(publisher))
    finally:
        other.close()

    assert max(pages[-4:]) < 2 * max(pages[:4])
    assert from_the_first > 2 * max(pages), "nothing was held"
    assert not OutboxMessage.objects.pending().exists()


def test_purge_deletes_what_was_published_long_ago_and_nothing_else() -> None:
    insert_messages(12_000, published=True)
    enqueue_committed(*[session_ended() for _ in range(4)])
    long_ago = statement_time() - timedelta(days=8)
    old = list(OutboxMessage.objects.order_by("id")[:4])
    pending, parked, published_lately, _ = old
    of = OutboxMessage.objects.filter
    of(id__in=[message.id for message in old]).update(created_at=long_ago, published_at=None)
    of(id=parked.id).update(parked_at=long_ago)
    of(id=published_lately.id).update(published_at=statement_time() - timedelta(days=6))
    of(id=old[3].id).update(published_at=long_ago)

    assert purge_published(OutboxOptions()) == 11_997
    assert OutboxMessage.objects.count() == 7
    assert purge_published(OutboxOptions(published_kept=timedelta(days=5))) == 1
    kept = set(OutboxMessage.objects.values_list("id", flat=True))
    assert {pending.id, parked.id} < kept
    assert len(kept) == 6


def test_purge_keeps_no_relay_waiting() -> None:
    queues = {
        task: current_app.amqp.router.route({}, f"outbox.tasks.{task}")["queue"].name
        for task in ("relay", "purge_published")
    }
    assert queues == {"relay": "relay", "purge_published": "maintenance"}


# -- the wake-up ---------------------------------------------------------------------------


def waiting_ticks() -> int:
    with current_app.connection_for_read() as broker:
        channel: Any = broker.default_channel
        return int(channel.client.llen("relay"))


@pytest.fixture
def empty_queue() -> Iterator[None]:
    current_app.control.purge()
    yield
    current_app.control.purge()


def wake_ups(outcome: str) -> float:
    return float(metrics.OUTBOX_WAKE_UPS.labels(outcome)._value.get())


def test_commits_wake_the_relay_once_and_pile_nothing_up(
    empty_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic():
        enqueue([session_ended()])
        transaction.set_rollback(True)
    assert waiting_ticks() == 0

    for _ in range(20):
        monkeypatch.setattr("outbox.wakeup._bell", _Bell())  # as in another process
        with transaction.atomic():
            enqueue([session_ended()])
            enqueue([session_ended()])
            assert waiting_ticks() <= 1
    assert waiting_ticks() == 1


@pytest.mark.parametrize("answers", [False, True], ids=["refused", "hanging"])
def test_broker_of_celery_that_is_away_holds_up_one_commit_and_fails_none(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()  # it takes connections, and says nothing
        monkeypatch.setattr("outbox.wakeup._bell", _Bell())
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        monkeypatch.setattr(current_app.conf, "broker_write_url", url)
        failed = wake_ups("Failed")

        enqueue_committed(session_ended())
        enqueue_committed(session_ended())

    assert wake_ups("Failed") == failed + 1
    assert OutboxMessage.objects.count() == 2


# -- the trace -----------------------------------------------------------------------------


def test_trace_of_a_request_goes_through_the_row_into_the_header(
    publisher: Any, read_topic: Callable[[str], list[Any]], settings: Any
) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET
    trace_id, request_id = "4bf92f3577b34da6a3ce929d0e0e4736", new_id()
    session = make_session()
    response = Client(
        headers={
            "X-Anonymous-Id": str(session.anonymous_id),
            **bearer(development_token(new_id())),
            "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
            "X-Request-Id": str(request_id),
        }
    ).post("/api/user-activity/sessions/link")
    assert response.status_code == 200

    relay(publisher).run()

    (record,) = read_topic(SessionLinked.TOPIC)
    headers = {name: value.decode() for name, value in record.headers}
    assert headers["CorrelationId"] == str(request_id)
    assert headers["traceparent"].split("-")[1] == trace_id
