"""The one writer of Inactive, for sessions and for views (INV-SES-005, INV-SES-006, INV-LV-008).

Whoever closes (the closer, an abandoned row's next beat, a switch, support staff) locks its
rows, then calls this module in the same transaction. Lock order everywhere: session, then its
views by id. A view closed alone needs no lock on its session.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.db import connection

from outbox.services import enqueue
from pinactivity.core.ids import Id, array_text
from pinactivity.core.times import iso_utc_sql
from pinactivity.postgres.clock import statement_time
from sessions.events import SessionEnded
from sessions.lifecycle import CloseReason
from views.events import PropertyObjectViewEnded
from views.models import NOT_INACTIVE, PropertyObjectView

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Closed:
    """What one call closed."""

    sessions: int = 0
    views: int = 0
    lags: list[float] = field(default_factory=list)
    """EndedAt - LastActivityAt of every row, in seconds."""


def close_sessions(
    session_ids: Sequence[Id], *, reason: CloseReason, now: datetime | None = None
) -> Closed:
    """Close sessions that the caller has locked, with their open views and all events.

    1. Lock the sessions' Active views by id, waiting for whoever beats or closes one.
    2. Take EndedAt, in a statement of its own, now that every lock is held.
    3. Close the views, then the sessions; enqueue the views' events, then the sessions'.

    Two statements, never one data-modifying CTE: its snapshot would miss a view that was
    opened while step 1 waited (INV-LV-007).

    Args:
        session_ids: Locked by this transaction. One that is no longer Active is left alone.
        reason: Written into every row closed.
        now: None is the database's clock.
    """
    if not session_ids:
        return Closed()
    view_ids = PropertyObjectView.objects.lock_active(session_ids=session_ids)
    ended_at = statement_time(now)
    views = _end_views(view_ids, reason=reason, ended_at=ended_at)
    sessions = _end_sessions(session_ids, reason=reason, ended_at=ended_at)
    return _record(sessions, views)


def close_views(
    view_ids: Sequence[Id], *, reason: CloseReason, now: datetime | None = None
) -> Closed:
    """Close views that the caller has locked, alone (INV-LV-004), with their events.

    Arguments as in `close_sessions`.
    """
    if not view_ids:
        return Closed()
    ended_at = statement_time(now)
    return _record(_Ended(), _end_views(view_ids, reason=reason, ended_at=ended_at))


def _record(sessions: "_Ended[SessionEnded]", views: "_Ended[PropertyObjectViewEnded]") -> Closed:
    enqueue([*views.events, *sessions.events])
    return Closed(len(sessions.events), len(views.events), [*sessions.lags, *views.lags])


@dataclass(frozen=True, slots=True)
class _Ended(Generic[E]):
    """What one statement ended."""

    events: list[E] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


# Raw SQL: UPDATE .. RETURNING gives the events' facts in the statement that makes them true, as
# the text that the events want: Python spent half of its time on making that of objects.
# bench/closer.py has the figures, also against one set-based statement.
_END = """
    status = 'Inactive', ended_at = greatest(%(ended_at)s, row.last_activity_at),
    duration = row.last_activity_at - row.created_at, close_reason = %(reason)s,
    version = row.version + 1
"""
_FACTS = f"""
    {iso_utc_sql("row.created_at")}, {iso_utc_sql("row.last_activity_at")},
    floor(extract(epoch FROM row.duration))::bigint, row.version,
    extract(epoch FROM row.ended_at - row.last_activity_at)::float8
"""

_END_SESSIONS = f"""
    UPDATE sessions AS row SET {_END}
    WHERE row.id = ANY(%(ids)s::uuid[]) AND {NOT_INACTIVE}
    RETURNING row.id::text, row.anonymous_id::text, row.user_id::text, {_FACTS}
"""

_END_VIEWS = f"""
    UPDATE property_object_views AS row SET {_END}
    FROM sessions
    WHERE row.id = ANY(%(ids)s::uuid[]) AND {NOT_INACTIVE} AND sessions.id = row.session_id
    RETURNING row.id::text, row.property_object_id::text, row.session_id::text,
              sessions.anonymous_id::text, sessions.user_id::text, row.view_source,
              row.filter_snapshot, {_FACTS}
"""


def _end_sessions(
    ids: Sequence[Id], *, reason: CloseReason, ended_at: datetime
) -> _Ended[SessionEnded]:
    rows = _end(_END_SESSIONS, ids, reason, ended_at)
    events = [
        SessionEnded(
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            created_at=created_at,
            last_activity_at=last_activity_at,
            duration_seconds=duration_seconds,
            version=version,
        )
        for (
            session_id,
            anonymous_id,
            user_id,
            created_at,
            last_activity_at,
            duration_seconds,
            version,
            _,
        ) in rows
    ]
    return _Ended(events, [row[-1] for row in rows])


def _end_views(
    ids: Sequence[Id], *, reason: CloseReason, ended_at: datetime
) -> _Ended[PropertyObjectViewEnded]:
    rows = _end(_END_VIEWS, ids, reason, ended_at)
    events = [
        PropertyObjectViewEnded(
            property_object_view_id=view_id,
            property_object_id=property_object_id,
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            view_source=view_source,
            filter_snapshot=None if filter_snapshot is None else json.loads(filter_snapshot),
            created_at=created_at,
            last_activity_at=last_activity_at,
            duration_seconds=duration_seconds,
            version=version,
        )
        for (
            view_id,
            property_object_id,
            session_id,
            anonymous_id,
            user_id,
            view_source,
            filter_snapshot,
            created_at,
            last_activity_at,
            duration_seconds,
            version,
            _,
        ) in rows
    ]
    return _Ended(events, [row[-1] for row in rows])


def _end(
    statement: str, ids: Sequence[Id], reason: CloseReason, ended_at: datetime
) -> list[tuple[Any, ...]]:
    if not ids:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            statement, {"ids": array_text(ids), "reason": reason.value, "ended_at": ended_at}
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
