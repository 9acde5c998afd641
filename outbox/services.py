"""The only door into the outbox."""

import json
from collections.abc import Iterable
from typing import Any, Protocol

import uuid_utils
from django.db import connection

from pinactivity import tracing
from pinactivity.ids import Id


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
    context in force, and the database's time.

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
        lines.append(f"{uuid_utils.uuid7()}\t{event.TOPIC}\t{key}\t{headers}\t{payload}\n")
    if not lines:
        return
    # Django's cursor wrapper does not translate the errors of copy().
    with (
        connection.cursor() as cursor,
        connection.wrap_database_errors,
        cursor.copy(
            "COPY outbox_messages (message_id, topic, key, headers, payload) FROM STDIN"
        ) as copy,
    ):
        copy.write("".join(lines))


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
