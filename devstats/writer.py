"""The one way into ClickHouse's tables: rows are added, never changed or deleted."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import Any

from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.transform import NativeTransform

from devstats.clickhouse import connect_writer, translated_errors
from devstats.tables import Table
from pinactivity.core.ids import new_id
from pinactivity.core.times import EPOCH
from pinactivity.telemetry.tracing import traceparent

Row = tuple[Any, ...]

MOST_MONTHS = 100
"""ClickHouse refuses an insert into more partitions, which one bad clock makes of a batch."""

_TICK = timedelta(microseconds=1)


class FactWriter:
    """Adds rows; connects when it first has to, so that it can be made while ClickHouse is away.

    For one thread.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._id = new_id().bytes
        self._known_time = EPOCH

    @property
    def client(self) -> Client:
        """The connection, for what has to be read before rows are made.

        Raises:
            StorageUnavailable: see `connect_writer`.
        """
        if self._client is None:
            self._client = connect_writer()
        return self._client

    def append(
        self,
        table: Table,
        rows: Mapping[str, Row],
        *,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Add rows in one insert, or in as few as the number of their months allows.

        Repeated with the same rows it adds nothing: by a deduplication token, since ClickHouse's
        client sends an insert again by itself when the answer is lost. The token is of this
        writer: what another one adds on purpose, such as a topic read anew after a correction,
        must never be dropped as seen; those copies collapse by their key.

        Args:
            table: Where to.
            rows: Each by where it came from, such as topic, partition and offset.
            while_waiting: Called in this thread, once an insert, while ClickHouse works.

        Raises:
            RowRefused: ClickHouse takes none of an insert's rows for the sake of some.
            StorageUnavailable: nothing is known of the rows; add them again.
        """
        for part in _split(table, rows):
            columns = [list(column) for column in zip(*part.values(), strict=True)]
            for index in table.time_columns:
                # As ClickHouse keeps them; the driver would take five times as long.
                columns[index] = [(moment - EPOCH) // _TICK for moment in columns[index]]
            with translated_errors():
                insert = self._make_insert(table, columns, self._token(table, part))
                if while_waiting is None:
                    insert()
                else:
                    answer = _call_in_thread(insert)
                    while_waiting()
                    answer.result()

    def is_past(self, moment: datetime) -> bool:
        """Return whether a moment has come, by ClickHouse's clock; the host's may be wrong.

        It is asked only for moments later than the latest that it is known to have shown.

        Raises:
            StorageUnavailable: it does not answer.
        """
        if moment > self._known_time:
            with translated_errors():
                self._known_time = self.client.query("SELECT now64(6, 'UTC')").result_rows[0][0]
        return moment <= self._known_time

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _make_insert(
        self, table: Table, columns: list[list[Any]], token: str
    ) -> Callable[[], object]:
        """Encode an insert; return what sends it and waits for the answer.

        A thread that sends bytes needs the interpreter for moments only. One that encoded them
        too would compete for it with the caller.
        """
        context = self.client.create_insert_context(
            table.name,
            column_names=list(table.columns),
            column_type_names=list(table.columns.values()),
            data=columns,
            column_oriented=True,
        )
        context.compression = self.client.write_compression
        body = b"".join(NativeTransform.build_insert(context))
        if context.insert_exception is not None:
            raise context.insert_exception
        return partial(
            self.client.raw_insert,
            insert_block=body,  # with the statement, which the driver writes before the rows
            settings={"insert_deduplication_token": token},
            compression=context.compression or None,
            transport_settings={"traceparent": traceparent()},
        )

    def _token(self, table: Table, rows: Mapping[str, Row]) -> str:
        """Name these rows. By their ids too: a topic made anew counts from the same offsets."""
        named = "\n".join([f"{origin} {row[0]}" for origin, row in rows.items()])
        return sha256(self._id + f"{table.name}\n{named}".encode()).hexdigest()


def _call_in_thread(call: Callable[[], object]) -> Future[object]:
    """Call in a daemon thread, which a process that stops need not wait for."""
    answer: Future[object] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as exc:
            answer.set_exception(exc)

    threading.Thread(target=run, name="insert", daemon=True).start()
    return answer


def _split(table: Table, rows: Mapping[str, Row]) -> Iterator[Mapping[str, Row]]:
    column = table.month_column
    if column is None or not rows:
        yield rows
        return
    times = [row[column] for row in rows.values()]
    first, last = min(times), max(times)
    if (last.year - first.year) * 12 + last.month - first.month < MOST_MONTHS:
        yield rows
        return
    months = sorted({(time.year, time.month) for time in times})
    for start in range(0, len(months), MOST_MONTHS):
        chosen = set(months[start : start + MOST_MONTHS])
        yield {
            origin: row
            for origin, row in rows.items()
            if (row[column].year, row[column].month) in chosen
        }
