"""Events in the outbox, relays over them, and what arrived of them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.db import connection, transaction

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.relay import OutboxRelay
from outbox.services import enqueue
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import DeliveryError, Message, Publisher
from pinactivity.kafka.topics import SESSION_ENDED
from pinactivity.postgres.clock import statement_time
from sessions.events import SessionEnded


def session_ended(**fields: Any) -> SessionEnded:
    """Return an event of a session of its own; `fields` replace the defaults."""
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


def enqueue_versions(keys: Sequence[Any], versions: range) -> None:
    for version in versions:
        enqueue_committed(*[session_ended(session_id=key, version=version) for key in keys])


def insert_messages(count: int, *, published: bool = False, payload: str = "{}") -> None:
    """Write messages with keys of their own; published ones are eight days old."""
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")  # a million takes a while
        cursor.execute(
            """
            INSERT INTO outbox_messages (message_id, topic, key, headers, payload, published_at,
                                         created_at)
            SELECT gen_random_uuid(), %s, gen_random_uuid(), '{"Version": "2"}', %s, moment,
                   coalesce(moment, statement_timestamp())
            FROM generate_series(1, %s),
                 (SELECT CASE WHEN %s THEN statement_timestamp() - interval '8 days' END)
                 AS since (moment)
            """,
            [SESSION_ENDED, payload, count, published],
        )
        cursor.execute("RESET statement_timeout")


def make_relay(publisher: Any, **options: Any) -> OutboxRelay:
    return OutboxRelay(publisher=publisher, options=OutboxOptions(**options))


def end_backoffs() -> None:
    """Make every message due that is backing off."""
    OutboxMessage.objects.to_retry().retry_now()


def scan_starts(call: Callable[[], Any]) -> list[int]:
    """Run a call; return the ids behind which the scans of its relay start, in order."""
    starts: list[int] = []

    def note(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if '"outbox_messages"."id" > ' in sql:
            starts.append(parameters[1])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(note):
        call()
    return starts


class RefusingPublisher:
    """Answers for some messages that the broker refused them, and publishes the others."""

    def __init__(self, publisher: Publisher, fails: Callable[[Message], bool]) -> None:
        self._publisher, self._fails = publisher, fails

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        failing = [self._fails(message) for message in messages]
        pairs = zip(messages, failing, strict=True)
        answers = iter(self._publisher.publish([each for each, fails in pairs if not fails]))
        refused = DeliveryError("CorruptRecordError", is_permanent=False, was_refused=True)
        return [refused if fails else next(answers) for fails in failing]

    def is_reachable(self) -> bool:
        return True

    def close(self) -> None:
        self._publisher.close()


class PublisherWithHook:
    """Publishes; calls `then` with a connection before its publish of a number, from 1 on."""

    def __init__(self, publisher: Publisher, number: int, then: Callable[[Any], None]) -> None:
        self._publisher, self._number, self._then = publisher, number, then
        self._begun = 0

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
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
    """End all connections to the database but `other`."""
    with other.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def versions_by_key(records: Sequence[Any]) -> dict[bytes, list[int]]:
    """Return the versions of each key in the order of arrival, without repeated messages."""
    seen: set[bytes] = set()
    versions: dict[bytes, list[int]] = {}
    for record in records:
        headers = dict(record.headers)
        if headers["MessageId"] not in seen:
            seen.add(headers["MessageId"])
            versions.setdefault(record.key, []).append(int(headers["Version"]))
    return versions
