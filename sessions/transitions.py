"""Ends sessions with their views: the one way to Inactive for a session (INV-SES-005, INV-SES-006).

Every caller (the closer, the next heartbeat of an abandoned session, a switch, support staff)
locks the sessions, then calls this module in the same transaction. The lock order is the same
everywhere: the session, then its views by id.
"""

from collections.abc import Sequence
from datetime import datetime

from outbox.services import enqueue
from pinactivity.core.ids import Id
from pinactivity.postgres.clock import statement_time
from sessions.ended_rows import EVENT_FACTS, NOT_INACTIVE, SET_ENDED, Closed, EndedRows, end_rows
from sessions.events import SessionEnded
from sessions.lifecycle import CloseReason
from views.closing import end_views, lock_active_views


def close_sessions(
    session_ids: Sequence[Id], *, reason: CloseReason, now: datetime | None = None
) -> Closed:
    """Close sessions that the caller has locked, with their open views and all events.

    1. Lock the sessions' Active views by id; wait for transactions that extend or close them.
    2. Read EndedAt from the clock in a statement of its own, after the last lock.
    3. Close the views, then the sessions; enqueue the views' events, then the sessions'.

    These are several statements, never one data-modifying CTE: its single snapshot would miss
    a view that was opened while step 1 waited (INV-LV-007).

    Args:
        session_ids: Locked by this transaction. One that is no longer Active stays as it is.
        reason: Written into every row closed.
        now: None is the database's clock.
    """
    if not session_ids:
        return Closed()
    view_ids = lock_active_views(session_ids)
    ended_at = statement_time(now)
    views = end_views(view_ids, reason=reason, ended_at=ended_at)
    sessions = _end_sessions(session_ids, reason=reason, ended_at=ended_at)
    enqueue([*views.events, *sessions.events])
    return Closed(len(sessions.events), len(views.events), [*sessions.lags, *views.lags])


_END = f"""
    UPDATE sessions AS row SET {SET_ENDED}
    WHERE row.id = ANY(%(ids)s::uuid[]) AND {NOT_INACTIVE}
    RETURNING row.id::text, row.anonymous_id::text, row.user_id::text, {EVENT_FACTS}
"""


def _end_sessions(
    ids: Sequence[Id], *, reason: CloseReason, ended_at: datetime
) -> EndedRows[SessionEnded]:
    rows = end_rows(_END, ids, reason=reason, ended_at=ended_at)
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
    return EndedRows(events, [row[-1] for row in rows])
