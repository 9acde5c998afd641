"""Writes events into the outbox, and redrives parked messages; nothing else writes there."""

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import structlog
import uuid_utils
from django.conf import settings
from django.db import connection, transaction
from django.db.models.functions import Now

from outbox.models import OutboxMessage, OutboxMessageQuerySet
from outbox.wakeup import wake_relay
from pinactivity.core.ids import Id
from pinactivity.telemetry import tracing

log = structlog.get_logger(__name__)


class Event(Protocol):
    """A fact for other services; the apps' `events.py` have them."""

    @property
    def TOPIC(self) -> str: ...
    @property
    def EVENT_TYPE(self) -> str: ...
    @property
    def AGGREGATE_TYPE(self) -> str: ...
    @property
    def CONTRACT_VERSION(self) -> int: ...
    @property
    def aggregate_id(self) -> Id: ...
    @property
    def version(self) -> int: ...
    def payload(self) -> dict[str, Any]:
        """Return a JSON object; ids and times are text."""


class NotInTransaction(RuntimeError):
    """Enqueue an event inside the transaction of the change that it reports."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def enqueue(events: Iterable[Event]) -> None:
    """Write events into the outbox, in order, within the caller's transaction.

    By COPY, since the closer enqueues 400 at a time. An event gets the current correlation id
    and trace context, and the database's time. The commit wakes the relay.

    Args:
        events: Of any type and any mix of keys.

    Raises:
        NotInTransaction: the caller has no transaction.
    """
    if not connection.in_atomic_block:
        raise NotInTransaction
    correlation_id = str(tracing.correlation_id())
    traceparent = tracing.traceparent()
    lines = []
    for event in events:
        key = str(event.aggregate_id)
        # Only ids, numbers and names from our code: JSON need not escape any of them.
        headers = (
            f'{{"EventType":"{event.EVENT_TYPE}","AggregateType":"{event.AGGREGATE_TYPE}",'
            f'"AggregateId":"{key}","ContractVersion":"{event.CONTRACT_VERSION}",'
            f'"Version":"{event.version}","CorrelationId":"{correlation_id}",'
            f'"traceparent":"{traceparent}"}}'
        )
        # JSON has escaped tabs and line ends. COPY would interpret only the backslashes.
        payload = _encode(event.payload()).decode().replace("\\", "\\\\")
        shard = settings.OUTBOX.shard_of(key)
        lines.append(f"{uuid_utils.uuid7()}\t{shard}\t{event.TOPIC}\t{key}\t{headers}\t{payload}\n")
    if not lines:
        return
    # Django's cursor wrapper does not translate the errors of copy().
    with (
        connection.cursor() as cursor,
        connection.wrap_database_errors,
        cursor.copy(
            "COPY outbox_messages (message_id, shard, topic, key, headers, payload) FROM STDIN"
        ) as copy,
    ):
        copy.write("".join(lines))
    transaction.on_commit(wake_relay)


def redrive(messages: OutboxMessageQuerySet, *, limit: int | None = None) -> int:
    """Send parked messages again. One that Kafka still refuses is parked again.

    A redriven message arrives after later messages of its key that were sent meanwhile.

    Args:
        messages: Any. Those that are not parked stay unchanged.
        limit: At most so many, the oldest first; None is all.

    Returns:
        How many were redriven.
    """
    parked = messages.parked().order_by("id")
    ids = list(parked.values_list("id", flat=True)[:limit])
    # With a retry time, because the relay reads messages without one only behind its watermark.
    count = (
        OutboxMessage.objects.parked()
        .filter(id__in=ids)
        .update(parked_at=None, next_attempt_at=Now())
    )
    log.info("parked messages redriven", messages=count)
    transaction.on_commit(wake_relay)
    return count


_encode = msgspec.json.Encoder().encode
