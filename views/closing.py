"""Ends views: the one way to Inactive for a view (INV-LV-004, INV-LV-008).

A caller locks its rows, then calls this module in the same transaction. A view that closes without
its session needs no lock on the session; `sessions/transitions.py` closes a session with its views.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from django.db import connection

from outbox.services import enqueue
from pinactivity.core.ids import Id, array_text
from pinactivity.postgres.clock import statement_time
from sessions.ended_rows import EVENT_FACTS, NOT_INACTIVE, SET_ENDED, Closed, EndedRows, end_rows
from sessions.lifecycle import CloseReason
from views.events import PropertyObjectViewEnded


def close_views(
    view_ids: Sequence[Id], *, reason: CloseReason, now: datetime | None = None
) -> Closed:
    """Close views that the caller has locked, and enqueue their events.

    Args:
        view_ids: Locked by this transaction. One that is no longer Active stays as it is.
        reason: Written into every row closed.
        now: None is the database's clock.
    """
    if not view_ids:
        return Closed()
    views = end_views(view_ids, reason=reason, ended_at=statement_time(now))
    enqueue(views.events)
    return Closed(views=len(views.events), lags=views.lags)


def lock_active_views(session_ids: Sequence[Id]) -> list[str]:
    """Lock the Active views of some sessions in the order of ids; return the ids."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [array_text(session_ids)])
        return [view_id for (view_id,) in cursor.fetchall()]


# Raw SQL: an array parameter. Django takes longer to build an IN of a hundred ids than it runs.
_LOCK = f"""
    SELECT id::text FROM property_object_views AS row
    WHERE session_id = ANY(%s::uuid[]) AND {NOT_INACTIVE}
    ORDER BY row.id
    FOR NO KEY UPDATE
"""

_END = f"""
    UPDATE property_object_views AS row SET {SET_ENDED}
    FROM sessions
    WHERE row.id = ANY(%(ids)s::uuid[]) AND {NOT_INACTIVE} AND sessions.id = row.session_id
    RETURNING row.id::text, row.property_object_id::text, row.session_id::text,
              sessions.anonymous_id::text, sessions.user_id::text, row.view_source,
              row.filter_snapshot, {EVENT_FACTS}
"""


def end_views(
    ids: Sequence[Id], *, reason: CloseReason, ended_at: datetime
) -> EndedRows[PropertyObjectViewEnded]:
    """End locked views and return their events, for the caller to enqueue.

    Args:
        ids: Locked by this transaction. One that is no longer Active stays as it is.
        reason: Written into every row.
        ended_at: Taken after the last lock.
    """
    rows = end_rows(_END, ids, reason=reason, ended_at=ended_at)
    events = [
        PropertyObjectViewEnded(
            property_object_view_id=view_id,
            property_object_id=property_object_id,
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            view_source=view_source,
            filter_snapshot=None
            if filter_snapshot is None
            else msgspec.json.decode(filter_snapshot),
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
    return EndedRows(events, [row[-1] for row in rows])
