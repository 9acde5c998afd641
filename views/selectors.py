"""Reads on views."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from uuid import UUID

from django.db import connection
from django.db.models import Q, QuerySet

from pinactivity.http.cursors import Page, take
from pinactivity.http.periods import Period
from pinactivity.postgres.clock import statement_time
from sessions.lifecycle import Status
from sessions.models import Session
from views.models import PropertyObjectView


def views_of_user(
    user_id: UUID, page: Page, period: Period, *, property_object_id: UUID | None = None
) -> tuple[list[PropertyObjectView], str | None]:
    """Return a page of a user's views, the newest first, and the next page's cursor.

    The history consists of the views of the user's sessions (design, section 6). A view's own
    user_id does not matter: it is a snapshot of the opening. So the history contains what a guest
    viewed before signing in, without a change of rows (AC7).

    Args:
        user_id: Whose history.
        page: Its cursor and the number of views.
        period: Only views that were opened within it.
        property_object_id: Only views of this object; None is any.

    Returns:
        Views with their sessions, always by two statements.
    """
    rows = PropertyObjectView.objects.filter(
        id__in=_newest_ids(user_id, page, period, property_object_id)
    )
    return take(rows.select_related("session"), page)


# PostgreSQL's timestamps for no bound; a datetime has none.
_NEVER, _EVER = "-infinity", "infinity"
_LAST_ID = UUID(int=2**128 - 1)


def _newest_ids(
    user_id: UUID, page: Page, period: Period, property_object_id: UUID | None
) -> list[UUID]:
    """Find the ids of a page's views, and the next one if it exists."""
    opened_at, view_id = page.after or (_EVER, _LAST_ID)
    parameters = {
        "user_id": user_id,
        "property_object_id": property_object_id,
        "since": period.since or _NEVER,
        "until": period.until or _EVER,
        "after_opened_at": opened_at,
        "after_id": view_id,
        "rows": page.limit + 1,
    }
    with connection.cursor() as cursor:
        cursor.execute(_NEWEST_IDS, parameters)
        return [row_id for (row_id,) in cursor.fetchall()]


def _newest_in_session(since: str) -> str:
    """Select the newest matching views of `session`, opened at `since` or later.

    The limit also forces the planner to join session by session.
    """
    return f"""
        CROSS JOIN LATERAL (
            SELECT id, created_at FROM property_object_views
            WHERE session_id = session.id AND created_at >= {since}
              AND created_at < %(until)s
              AND (created_at, id) < (%(after_opened_at)s, %(after_id)s)
              AND (%(property_object_id)s::uuid IS NULL
                   OR property_object_id = %(property_object_id)s)
            ORDER BY created_at DESC, id DESC
            LIMIT %(rows)s
        ) AS view
    """


_OF_USER = """
    session.user_id = %(user_id)s
    AND session.created_at < %(until)s AND session.created_at <= %(after_opened_at)s
"""

# Raw SQL: Django has no LATERAL, and a plain join sorts all views of the user for each page
# (docs/adr/0007). No index contains both the user and the time of a view, but a view lies within
# its session:
#
# 1. Walk the user's sessions, the newest first, until they yield a page of views. If they yield
#    less than a page, these are all.
# 2. The oldest view of step 1 bounds the page. A session that began earlier, on another device, may
#    also have views in it. So read all sessions that were active after that bound.
_NEWEST_IDS = f"""
    WITH walked AS MATERIALIZED (
        SELECT view.id, view.created_at FROM sessions AS session
        {_newest_in_session("%(since)s")}
        WHERE {_OF_USER} AND session.last_activity_at >= %(since)s
        ORDER BY session.created_at DESC
        LIMIT %(rows)s
    ), bound AS MATERIALIZED (
        SELECT min(created_at) AS since FROM walked HAVING count(*) = %(rows)s
    )
    SELECT id FROM walked WHERE NOT EXISTS (SELECT FROM bound)
    UNION ALL
    (
        SELECT view.id FROM bound CROSS JOIN sessions AS session
        {_newest_in_session("bound.since")}
        WHERE {_OF_USER} AND session.last_activity_at >= bound.since
        ORDER BY view.created_at DESC, view.id DESC
        LIMIT %(rows)s
    )
"""


def existing_views(ids: Iterable[UUID]) -> set[UUID]:
    """Return the given ids that belong to a view, Active or not."""
    return set(PropertyObjectView.objects.filter(id__in=list(ids)).values_list("id", flat=True))


def ended_view_chunks(
    *, since: datetime, until: datetime, size: int = 1000
) -> Iterator[list[PropertyObjectView]]:
    """Yield the views that ended at `since` or later and before `until`, with their sessions.

    They come in no order, at most `size` at a time. No index contains the end of a view, but a
    view ends with its session or earlier. So this reads the views of all sessions that ended at
    `since` or later, then the views of the sessions that had not ended when this began.
    """
    now = statement_time()
    views = PropertyObjectView.objects.filter(
        status=Status.INACTIVE.value, ended_at__gte=since, ended_at__lt=until
    ).select_related("session")
    sessions = Session.objects.filter(created_at__lt=until)
    ended = sessions.filter(
        status=Status.INACTIVE.value, ended_at__gte=since, ended_at__lt=now
    ).order_by("ended_at", "id")
    after = Q()
    while chunk := list(ended.filter(after).values_list("ended_at", "id")[:size]):
        last_end, last_id = chunk[-1]
        after = Q(ended_at__gte=last_end) & (Q(ended_at__gt=last_end) | Q(id__gt=last_id))
        yield from _sliced(views.filter(session_id__in=[row_id for _, row_id in chunk]), size)
    # One statement has one snapshot, so a session that ends now matches one of the two conditions.
    still_open = Q(session__status=Status.ACTIVE.value) | Q(session__ended_at__gte=now)
    yield from _sliced(views.filter(still_open, session__created_at__lt=until), size)


def _sliced(views: "QuerySet[PropertyObjectView]", size: int) -> Iterator[list[PropertyObjectView]]:
    rows = views.iterator(chunk_size=size)
    while chunk := list(islice(rows, size)):
        yield chunk
