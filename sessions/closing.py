"""The one writer of Inactive, for sessions and for views (INV-SES-005, INV-SES-006, INV-LV-008).

Whoever closes (the closer, an abandoned row's next beat, a switch, support staff) locks its
rows, then calls this module in the same transaction. Lock order everywhere: session, then its
views by id. A view closed alone needs no lock on its session.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.string import TextLoader

from outbox.services import enqueue
from pinactivity.clock import statement_time
from sessions.events import SessionEnded
from sessions.lifecycle import CloseReason
from views.events import PropertyObjectViewEnded
from views.models import PropertyObjectView


@dataclass(frozen=True, slots=True)
class Closed:
    """What one call closed."""

    sessions: int = 0
    views: int = 0
    lags: list[float] = field(default_factory=list)
    """EndedAt - LastActivityAt of every row, in seconds."""


def close_sessions(
    session_ids: Sequence[UUID], *, reason: CloseReason, now: datetime | None = None
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
    view_events = _end_views(view_ids, reason=reason, ended_at=ended_at)
    session_events = _end_sessions(session_ids, reason=reason, ended_at=ended_at)
    return _record(session_events, view_events, ended_at=ended_at)


def close_views(
    view_ids: Sequence[UUID], *, reason: CloseReason, now: datetime | None = None
) -> Closed:
    """Close views that the caller has locked, alone (INV-LV-004), with their events.

    Arguments as in `close_sessions`.
    """
    if not view_ids:
        return Closed()
    ended_at = statement_time(now)
    return _record([], _end_views(view_ids, reason=reason, ended_at=ended_at), ended_at=ended_at)


def _record(
    sessions: list[SessionEnded], views: list[PropertyObjectViewEnded], *, ended_at: datetime
) -> Closed:
    enqueue([*views, *sessions])
    lags = [
        max((ended_at - event.last_activity_at).total_seconds(), 0.0)
        for events in (sessions, views)
        for event in events
    ]
    return Closed(len(sessions), len(views), lags)


# Raw SQL: UPDATE .. RETURNING gives the events' facts in the statement that makes them true;
# bench/closer.py has the figures against ORM objects and against one set-based statement.
_END = """
    status = 'Inactive', ended_at = greatest(%(ended_at)s, row.last_activity_at),
    duration = row.last_activity_at - row.created_at, close_reason = %(reason)s,
    version = row.version + 1
"""

_END_SESSIONS = f"""
    UPDATE sessions AS row SET {_END}
    WHERE row.id = ANY(%(ids)s::uuid[]) AND row.status = 'Active'
    RETURNING row.id, row.anonymous_id, row.user_id, row.created_at, row.last_activity_at,
              row.version
"""

_END_VIEWS = f"""
    UPDATE property_object_views AS row SET {_END}
    FROM sessions
    WHERE row.id = ANY(%(ids)s::uuid[]) AND row.status = 'Active' AND sessions.id = row.session_id
    RETURNING row.id, row.property_object_id, row.session_id, sessions.anonymous_id,
              sessions.user_id, row.view_source, row.created_at, row.last_activity_at,
              row.filter_snapshot, row.version
"""


def _end_sessions(
    ids: Sequence[UUID], *, reason: CloseReason, ended_at: datetime
) -> list[SessionEnded]:
    return [
        SessionEnded(
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            created_at=created_at,
            last_activity_at=last_activity_at,
            version=version,
        )
        for session_id, anonymous_id, user_id, created_at, last_activity_at, version in _end(
            _END_SESSIONS, ids, reason, ended_at
        )
    ]


def _end_views(
    ids: Sequence[UUID], *, reason: CloseReason, ended_at: datetime
) -> list[PropertyObjectViewEnded]:
    return [
        PropertyObjectViewEnded(
            property_object_view_id=view_id,
            property_object_id=property_object_id,
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            view_source=view_source,
            created_at=created_at,
            last_activity_at=last_activity_at,
            filter_snapshot=None if filter_snapshot is None else json.loads(filter_snapshot),
            version=version,
        )
        for (
            view_id,
            property_object_id,
            session_id,
            anonymous_id,
            user_id,
            view_source,
            created_at,
            last_activity_at,
            filter_snapshot,
            version,
        ) in _end(_END_VIEWS, ids, reason, ended_at)
    ]


def _end(
    statement: str, ids: Sequence[UUID], reason: CloseReason, ended_at: datetime
) -> list[tuple[Any, ...]]:
    if not ids:
        return []
    with connection.cursor() as cursor:
        # Of 400 events a unit: psycopg's own loader of times, since Django's is Python and takes
        # ten times as long, and ids as the text that the events want.
        cursor.cursor.adapters.register_loader("timestamptz", TimestamptzLoader)
        cursor.cursor.adapters.register_loader("uuid", TextLoader)
        cursor.execute(statement, {"ids": list(ids), "reason": reason.value, "ended_at": ended_at})
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
