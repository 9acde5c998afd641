"""What the commands that talk to ClickHouse share."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from django.core.management.base import CommandError

from devstats.clickhouse import RowRefused, StorageUnavailable
from devstats.writer import FactWriter
from pinactivity.core.error_info import describe_error


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn ClickHouse's errors into a command's, without their text.

    Raises:
        CommandError: ClickHouse is away or refuses.
    """
    try:
        yield
    except (StorageUnavailable, RowRefused) as exc:
        parts = describe_error(exc.__cause__ or exc)
        reason = ", ".join(f"{name} {value}" for name, value in parts.items())
        raise CommandError(
            f"ClickHouse is away or refuses ({reason}). What was written stays: run the command"
            " again."
        ) from exc


@contextmanager
def opened_writer() -> Iterator[FactWriter]:
    """Lend a writer.

    Raises:
        CommandError: ClickHouse is away or refuses.
    """
    with explained_errors(), closing(FactWriter()) as writer:
        yield writer
