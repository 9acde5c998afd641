"""The only door into the outbox."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import uuid_utils
from django.db import connection

from pinactivity import tracing
from pinactivity.clock import iso_utc


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
    def aggregate_id(self) -> UUID: ...
    @property
    def version(self) -> int: ...
    def payload(self) -> dict[str, Any]: ...


class NotInTransaction(RuntimeError):
    """An event is true only with the change it tells of: enqueue inside that transaction."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def enqueue(events: Iterable[Event]) -> None:
    """Write events into the outbox, in order, within the caller's transaction.

    By COPY: a unit of the closer has 400 of them. They get the correlation and the trace
    context in force, and the database's time.

    Raises:
        NotInTransaction: there is no transaction to make them true.
    """
    if not connection.in_atomic_block:
        raise NotInTransaction
    correlation_id = str(tracing.correlation_id())
    traceparent = tracing.traceparent()
    rows = [
        (
            str(uuid_utils.uuid7()),
            event.TOPIC,
            str(event.aggregate_id),
            _encode(
                {
                    "EventType": event.EVENT_TYPE,
                    "AggregateType": event.AGGREGATE_TYPE,
                    "AggregateId": event.aggregate_id,
                    "ContractVersion": str(event.CONTRACT_VERSION),
                    "Version": str(event.version),
                    "CorrelationId": correlation_id,
                    "traceparent": traceparent,
                }
            ),
            _encode(event.payload()),
        )
        for event in events
    ]
    if not rows:
        return
    # Django's cursor wrapper does not translate the errors of copy().
    with (
        connection.cursor() as cursor,
        connection.wrap_database_errors,
        cursor.copy(
            "COPY outbox_messages (message_id, topic, key, headers, payload) FROM STDIN"
        ) as copy,
    ):
        for row in rows:
            copy.write_row(row)


def _plain(value: object) -> str:
    """Write what JSON has no type for: ids lower-case with dashes, times in UTC with Z."""
    if isinstance(value, datetime):
        return iso_utc(value)
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in an event.")


_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode
