"""The only door into the outbox."""

import json
from collections.abc import Iterable
from typing import Any, Protocol

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
    """What an app's `events.py` gives: a fact for other services."""

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
        """Give what JSON has types for: ids and times as text."""


class NotInTransaction(RuntimeError):
    """An event is true only with the change it tells of: enqueue inside that transaction."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def enqueue(events: Iterable[Event]) -> None:
    """Write events into the outbox, in order, within the caller's transaction.

    By COPY: a unit of the closer has 400 of them. They get the correlation and the trace
    context in force, and the database's time. The relay is woken when they are committed.

    Raises:
        NotInTransaction: there is no transaction to make them true.
    """
    if not connection.in_atomic_block:
        raise NotInTransaction
    correlation_id = str(tracing.correlation_id())
    traceparent = tracing.traceparent()
    lines = []
    for event in events:
        key = str(event.aggregate_id)
        # Ids, numbers and names of ours: nothing that JSON would have to escape.
        headers = (
            f'{{"EventType":"{event.EVENT_TYPE}","AggregateType":"{event.AGGREGATE_TYPE}",'
            f'"AggregateId":"{key}","ContractVersion":"{event.CONTRACT_VERSION}",'
            f'"Version":"{event.version}","CorrelationId":"{correlation_id}",'
            f'"traceparent":"{traceparent}"}}'
        )
        # JSON has escaped tabs and line ends; its backslashes are all that COPY would read.
        payload = _encode(event.payload()).replace("\\", "\\\\")
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
    """Send parked messages again: what is still at fault is parked again.

    Such a message arrives after those of its key that have gone out meanwhile.

    Args:
        messages: Any; those that are not parked stay as they are.
        limit: At most so many, the oldest first.

    Returns:
        How many are on their way.
    """
    parked = messages.parked().order_by("id")
    ids = list(parked.values_list("id", flat=True)[:limit])
    # Due at once rather than fresh: the relay reads fresh ones from where it was.
    count = (
        OutboxMessage.objects.parked()
        .filter(id__in=ids)
        .update(parked_at=None, next_attempt_at=Now())
    )
    log.info("parked messages sent again", messages=count)
    transaction.on_commit(wake_relay)
    return count


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
