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

    By the reading rule (design, section 6): the views of his sessions, never those whose own
    user he is, which is a snapshot of the opening. So what a guest saw before signing in is in
    the user's history without any change of rows (AC7).

    Args:
        user_id: Whose history.
        page: Where it begins, and how many views it has.
        period: Of the openings.
        property_object_id: Only views of this object; None is any.

    Returns:
        Views with their sessions, read in two statements however many there are.
    """
    rows = PropertyObjectView.objects.filter(
        id__in=_newest_ids(user_id, page, period, property_object_id)
    )
    return take(rows.select_related("session"), page)


# What bounds nothing; PostgreSQL's words, which no datetime is.
_NEVER, _EVER = "-infinity", "infinity"
_LAST_ID = UUID(int=2**128 - 1)


def _newest_ids(
    user_id: UUID, page: Page, period: Period, property_object_id: UUID | None
) -> list[UUID]:
    """Find the ids of a page's views, and of one more where there is one."""
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

    The limit also keeps the planner from joining in another way than session by session.
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

# Raw SQL, because the obvious join sorts all that a user has ever viewed for each page, and Django
# has no LATERAL (adr/0007 has the figures). No index has both the user and the time of a view, but
# a view lies within its session:
#
# 1. Walk the user's sessions, the newest first, until they have given a page of views. Less than
#    a page is all there is.
# 2. A session that began earlier may have lasted into the page (another device): the oldest view
#    of step 1 bounds the page, and every session that was active after it may have a part in it.
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
    """Return those of some ids that there are views of, Active or not."""
    return set(PropertyObjectView.objects.filter(id__in=list(ids)).values_list("id", flat=True))


def ended_view_chunks(
    *, since: datetime, until: datetime, size: int = 1000
) -> Iterator[list[PropertyObjectView]]:
    """Yield the views that ended at `since` or later and before `until`, with their sessions.

    In no order, `size` at a time or less. No index has the end of a view, but a view ends before
    its session or with it: read are the views of the sessions that have ended since, in the order
    of the sessions' ends, and then those of the sessions that had not ended when this began.
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
    # One statement, hence one moment: a session that ends meanwhile is seen on one side only.
    still_open = Q(session__status=Status.ACTIVE.value) | Q(session__ended_at__gte=now)
    yield from _sliced(views.filter(still_open, session__created_at__lt=until), size)


def _sliced(views: "QuerySet[PropertyObjectView]", size: int) -> Iterator[list[PropertyObjectView]]:
    rows = views.iterator(chunk_size=size)
    while chunk := list(islice(rows, size)):
        yield chunk
