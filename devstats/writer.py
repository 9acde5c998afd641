"""The one way into ClickHouse's tables: rows are added, never changed or deleted."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from clickhouse_connect.driver.client import Client

from devstats.clickhouse import connect_writer, translated_faults
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

    def append(self, table: Table, rows: Mapping[str, Row]) -> None:
        """Add rows in one insert, or in as few as the number of their months allows.

        Repeated with the same rows it adds nothing: by a deduplication token, since ClickHouse's
        client sends an insert again by itself when the answer is lost. The token is of this
        writer: what another one adds on purpose, such as a topic read anew after a correction,
        must never be dropped as seen; those copies collapse by their key.

        Args:
            table: Where to.
            rows: Each by where it came from, such as topic, partition and offset.

        Raises:
            RowRefused: ClickHouse takes none of an insert's rows for the sake of some.
            StorageUnavailable: nothing is known of the rows; add them again.
        """
        for part in _split(table, rows):
            columns = [list(column) for column in zip(*part.values(), strict=True)]
            for index in table.time_columns:
                # As ClickHouse keeps them; the driver would take five times as long.
                columns[index] = [(moment - EPOCH) // _TICK for moment in columns[index]]
            with translated_faults():
                self.client.insert(
                    table.name,
                    columns,
                    column_oriented=True,
                    column_names=list(table.columns),
                    column_type_names=list(table.columns.values()),
                    settings={"insert_deduplication_token": self._token(table, part)},
                    transport_settings={"traceparent": traceparent()},
                )

    def is_past(self, moment: datetime) -> bool:
        """Return whether a moment has come, by ClickHouse's clock; the host's may be wrong.

        It is asked only for moments later than the latest that it is known to have shown.

        Raises:
            StorageUnavailable: it does not answer.
        """
        if moment > self._known_time:
            with translated_faults():
                self._known_time = self.client.query("SELECT now64(6, 'UTC')").result_rows[0][0]
        return moment <= self._known_time

    def close(self) -> None:
        """Give up the connection; idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _token(self, table: Table, rows: Mapping[str, Row]) -> str:
        """Name these rows. By their ids too: a topic made anew counts from the same offsets."""
        named = "\n".join([f"{origin} {row[0]}" for origin, row in rows.items()])
        return sha256(self._id + f"{table.name}\n{named}".encode()).hexdigest()


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
