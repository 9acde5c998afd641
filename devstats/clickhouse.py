"""Connections to ClickHouse, and what its errors mean."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil

import clickhouse_connect
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError
from django.conf import settings
from urllib3.exceptions import HTTPError

from pinactivity.core.errors import ServiceError

DATABASE = "pin_dev_stats"

MOST_IDS = 1000
"""Of a statement: ClickHouse takes a parameter of up to 128 KiB (`http_max_field_value_size`), an
id has 39 bytes. Beyond 4 KiB the client sends parameters in the body, not in the address."""

# Of one row's values: to parse, to convert, in bounds, within the constraints. Not among them is
# what a changed table does to every row alike, such as TYPE_MISMATCH (53): that heals with the
# table, and must not dead-letter a whole topic.
_ROW_FAULTS = frozenset(
    {
        6,  # CANNOT_PARSE_TEXT
        26,  # CANNOT_PARSE_QUOTED_STRING
        27,  # CANNOT_PARSE_INPUT_ASSERTION_FAILED
        38,  # CANNOT_PARSE_DATE
        41,  # CANNOT_PARSE_DATETIME
        69,  # ARGUMENT_OUT_OF_BOUND
        70,  # CANNOT_CONVERT_TYPE
        72,  # CANNOT_PARSE_NUMBER
        117,  # INCORRECT_DATA
        131,  # TOO_LARGE_STRING_SIZE
        321,  # VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE
        349,  # CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN
        376,  # CANNOT_PARSE_UUID
        407,  # DECIMAL_OVERFLOW
        469,  # VIOLATED_CONSTRAINT
        691,  # UNKNOWN_ELEMENT_OF_ENUM
    }
)


# What the driver raises over an answer that is cut short, or not ClickHouse's at all.
_UNREADABLE = (ValueError, LookupError, ArithmeticError, EOFError, TypeError, struct.error)


class StorageUnavailable(ServiceError):
    """ClickHouse is away, or cannot do what it is asked: try again later."""

    code = "DEV_STATS_STORAGE_UNAVAILABLE"


class RowRefused(Exception):
    """At least one of the rows can never be stored."""


def connect_writer(*, database: str | None = DATABASE, timeout: timedelta | None = None) -> Client:
    """Connect as the consumers and the commands that write do.

    Args:
        database: None before there is one.
        timeout: Of an answer; None is the option's.

    Raises:
        StorageUnavailable: away, or without the database.
    """
    options: dict[str, int] = {
        # An insert that is acknowledged is stored: the server's profile may say otherwise.
        "async_insert": 0,
    }
    if settings.DEV_STATS.cluster:
        options["distributed_foreground_insert"] = 1
    return _connect(database, options, timeout)


def connect_reader() -> Client:
    """Connect as the API does: `readonly=1`; threads may share the client.

    ClickHouse itself gives a read up after the time that an answer may take. The client's timeout
    is of silence, which the headers of progress that it asks for break; a web thread would be held
    for as long as a query ran.

    Raises:
        StorageUnavailable: away, or without the database.
    """
    seconds = settings.DEV_STATS.storage_timeout.total_seconds()
    return _connect(DATABASE, {"readonly": 1, "max_execution_time": ceil(seconds)})


def _connect(
    database: str | None,
    options: dict[str, int],
    timeout: timedelta | None = None,
) -> Client:
    seconds = (timeout or settings.DEV_STATS.storage_timeout).total_seconds()
    with translated_errors():
        return clickhouse_connect.get_client(
            dsn=settings.CLICKHOUSE_URL,
            database=database,
            settings=options,
            autogenerate_session_id=False,  # a session admits one query at a time
            connect_timeout=min(seconds, 5),
            send_receive_timeout=seconds,
            tz_mode="aware",
            show_clickhouse_errors=False,  # their text quotes the row
        )


@contextmanager
def translated_errors() -> Iterator[None]:
    """Sort ClickHouse's faults.

    Raises:
        RowRefused: the driver could not encode a row, or ClickHouse names a fault of values.
        StorageUnavailable: everything else, known or not.
    """
    try:
        yield
    except DataError as exc:
        raise RowRefused from exc
    except (ClickHouseError, HTTPError, OSError) as exc:
        if getattr(exc, "code", None) in _ROW_FAULTS:
            raise RowRefused from exc
        raise StorageUnavailable from exc
    except _UNREADABLE as exc:
        raise StorageUnavailable from exc
