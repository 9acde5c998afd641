"""The SQL that ends a row, for sessions and for views (INV-SES-005, INV-LV-004).

Only `sessions/transitions.py` and `views/closing.py` use it, and only they write Inactive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.db import connection

from pinactivity.core.ids import Id, array_text
from pinactivity.core.times import iso_utc_sql
from sessions.lifecycle import CloseReason

Event = TypeVar("Event")

NOT_INACTIVE = "row.status <> 'Inactive'"
"""True for an Active row; there are only two states. PostgreSQL cannot use the partial indexes on
activity for this predicate. With outdated statistics it would otherwise choose such an index, and
read all Active rows for each unit instead of the rows that the ids name."""

# Raw SQL: UPDATE .. RETURNING returns the events' facts from the statement that makes them true.
# PostgreSQL formats them as the text of the events, because formatting in Python took half of the
# closer's time (docs/adr/0002).
SET_ENDED = """
    status = 'Inactive', ended_at = greatest(%(ended_at)s, row.last_activity_at),
    duration = row.last_activity_at - row.created_at, close_reason = %(reason)s,
    version = row.version + 1
"""
EVENT_FACTS = f"""
    {iso_utc_sql("row.created_at")}, {iso_utc_sql("row.last_activity_at")},
    floor(extract(epoch FROM row.duration))::bigint, row.version,
    extract(epoch FROM row.ended_at - row.last_activity_at)::float8
"""
"""CreatedAt, LastActivityAt, DurationSeconds, Version, and the lag in seconds."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The totals of one call."""

    sessions: int = 0
    views: int = 0
    lags: list[float] = field(default_factory=list)
    """EndedAt - LastActivityAt of every row, in seconds."""


@dataclass(frozen=True, slots=True)
class EndedRows(Generic[Event]):
    """The events of the rows that one statement ended, and their lags in seconds."""

    events: list[Event] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


def end_rows(
    statement: str, ids: Sequence[Id], *, reason: CloseReason, ended_at: datetime
) -> list[tuple[Any, ...]]:
    """Run a statement that ends rows by their ids; return the rows of its RETURNING."""
    if not ids:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            statement, {"ids": array_text(ids), "reason": reason.value, "ended_at": ended_at}
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
