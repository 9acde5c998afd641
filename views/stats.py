"""The totals of ended views by property object (design, section 6).

Each view counts once: one transaction inserts its id into the seen table and adds it to the
totals. The totals can be rebuilt from the views, because retention adds the views that it deletes
to `purged_*`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.db import transaction

from pinactivity.core.ids import NIL, earliest_id
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry.metrics import VIEW_STATS_EVENTS, VIEW_STATS_SEEN_PURGED
from views.options import COUNTED_FOR, ViewStatsOptions
from views.stats_models import (
    PropertyObjectViewStats,
    PropertyObjectViewStatsSeen,
    execute,
    fetch,
)

log = structlog.get_logger(__name__)

_PURGE_BATCH = 5000
_PURGE_SECONDS = 10.0
"""The longest run. It is shorter than a worker's grace period, so it needs no stop signal."""
_OBJECTS_A_CHUNK = 100
_SETTLED_AFTER = timedelta(days=85)
"""The age from which an ended view counts without a row in the seen table. It is more than
COUNTED_FOR, so its event can no longer count, and less than SEEN_AT_LEAST, until when its row is
kept. The margins absorb differences of clocks and long transactions."""


@dataclass(frozen=True, slots=True)
class EndedView:
    view_id: UUID
    property_object_id: UUID
    viewed_at: datetime
    duration_seconds: int
    recorded_at: datetime
    """When its event was written."""


def count_views(ended: Sequence[EndedView], *, now: datetime | None = None) -> None:
    """Add views to the totals of their objects, each view once (INV-LVS-003).

    An event older than COUNTED_FOR is skipped: the seen table may no longer contain its view.

    Args:
        ended: In any order, with any repetition.
        now: None is the database's clock.
    """
    with transaction.atomic():
        oldest = statement_time(now) - COUNTED_FOR
        views = {view.view_id: view for view in ended if view.recorded_at >= oldest}
        fresh_ids = PropertyObjectViewStatsSeen.objects.add(list(views), now=now)
        fresh = [views[view_id] for view_id in fresh_ids]
        PropertyObjectViewStats.objects.add(
            object_ids=[view.property_object_id for view in fresh],
            seconds=[view.duration_seconds for view in fresh],
            viewed_at=[view.viewed_at for view in fresh],
        )
    too_old = sum(view.recorded_at < oldest for view in ended)
    VIEW_STATS_EVENTS.labels("Counted").inc(len(fresh))
    VIEW_STATS_EVENTS.labels("Repeated").inc(len(ended) - too_old - len(fresh))
    VIEW_STATS_EVENTS.labels("TooOld").inc(too_old)


def stats_of(property_object_id: UUID) -> PropertyObjectViewStats:
    """Return an object's totals; an unsaved row of zeros for an object without views."""
    found = PropertyObjectViewStats.objects.filter(pk=property_object_id).first()
    return found or PropertyObjectViewStats(
        property_object_id=property_object_id, views_count=0, total_duration_seconds=0
    )


def purge_seen(options: ViewStatsOptions) -> int:
    """Delete rows of the seen table that are older than `seen_kept`, in batches.

    Ends after 10 s at the latest; the next run continues. Safe beside another run and beside
    consumers, because it skips locked rows.

    Returns:
        How many rows were deleted.
    """
    deadline = time.monotonic() + _PURGE_SECONDS
    purged = 0
    while time.monotonic() < deadline:
        batch = PropertyObjectViewStatsSeen.objects.forget(
            kept=options.seen_kept, limit=_PURGE_BATCH
        )
        purged += batch
        VIEW_STATS_SEEN_PURGED.inc(batch)
        if batch < _PURGE_BATCH:
            break
    if purged:
        log.info("seen views purged", rows=purged)
    return purged


@dataclass(frozen=True, slots=True)
class Totals:
    views_count: int
    total_duration_seconds: int
    last_viewed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The stored and the recomputed totals of an object, in one snapshot."""

    property_object_id: UUID
    stored: Totals
    expected: Totals
    """Of closed and counted views, plus those that retention has deleted."""
    existing: int
    """Closed views in the table."""
    under_way: int
    """Closed views whose event has not been counted yet; `expected` leaves them out."""

    @property
    def drifts(self) -> bool:
        return self.stored != self.expected


@dataclass(slots=True)
class RebuildResult:
    objects: int = 0
    views: int = 0
    """Closed views in the table."""
    under_way: int = 0
    drifting: list[Comparison] = field(default_factory=list)
    rewritten: int = 0
    """Objects whose row was written."""


def rebuild_stats(
    *, repair: bool, advance: Callable[[int], object] = lambda _: None
) -> RebuildResult:
    """Compare the stored totals with the views, and repair them; safe beside consumers.

    One statement compares an object, so it sees either all of a consumer's batch or nothing of
    it. Where totals differ, or events are in flight, `repair` rewrites the totals, 100 objects a
    transaction, in the lock order of the consumers:

    1. Insert every closed view into the seen table. Its event, in flight or repeated, then adds
       nothing.
    2. Lock the objects' rows. A consumer that marked other views as seen adds them afterwards.
    3. In a new statement, write the sum of purged views and of closed views that are seen. A
       view that closed after step 1 is not seen: its event will add it.

    Args:
        repair: False only reads.
        advance: Called with the number of closed views compared since its last call.

    Raises:
        OperationalError: a lock timed out, or the database is unavailable. Rewritten totals
            stay, and another call does the rest.
    """
    result = RebuildResult()
    for object_ids in _object_chunks():
        comparisons = _compare(object_ids)
        result.objects += len(comparisons)
        result.views += (views := sum(each.existing for each in comparisons))
        result.under_way += sum(each.under_way for each in comparisons)
        result.drifting += [each for each in comparisons if each.drifts]
        wrong = [each.property_object_id for each in comparisons if each.drifts or each.under_way]
        if repair and wrong:
            result.rewritten += _repair(wrong)
        advance(views)
    return result


def _object_chunks() -> Iterator[list[UUID]]:
    """Yield the ids of all objects with views or totals, in order."""
    after = NIL  # no object has this id
    while rows := fetch(_OBJECTS, after=after, limit=_OBJECTS_A_CHUNK):
        yield [object_id for (object_id,) in rows]
        (after,) = rows[-1]


def _compare(object_ids: list[UUID]) -> list[Comparison]:
    return [
        Comparison(object_id, Totals(*row[:3]), Totals(*row[3:6]), *row[6:])
        for object_id, *row in fetch(_COMPARE, object_ids=object_ids, **_settled())
    ]


def _repair(object_ids: list[UUID]) -> int:
    settled = _settled()
    with transaction.atomic():
        execute(_SEE_CLOSED, object_ids=object_ids, **settled)
        PropertyObjectViewStats.objects.lock(object_ids)
        return execute(_REWRITE, object_ids=object_ids, **settled)


def _settled() -> dict[str, object]:
    """Return the bounds before which a view is settled, for EndedAt and for the id.

    An id contains the time of its creation. It matters for a replay, which ends views in the past
    by its own clock while their events are written today.
    """
    moment = statement_time() - _SETTLED_AFTER
    return {"settled": moment, "settled_id": earliest_id(moment)}


# Raw SQL: one statement, and so one snapshot, compares views, seen views and totals.
_OBJECTS = """
    (SELECT DISTINCT property_object_id FROM property_object_views
     WHERE property_object_id > %(after)s ORDER BY property_object_id LIMIT %(limit)s)
    UNION
    (SELECT property_object_id FROM property_object_view_stats
     WHERE property_object_id > %(after)s ORDER BY property_object_id LIMIT %(limit)s)
    ORDER BY property_object_id LIMIT %(limit)s
"""

_IS_SETTLED = "(view.ended_at < %(settled)s AND view.id < %(settled_id)s)"

_FROM_VIEWS = f"""
    SELECT
        object.id AS property_object_id,
        coalesce(stats.views_count, 0) AS stored_views_count,
        coalesce(stats.total_duration_seconds, 0) AS stored_total_duration_seconds,
        stats.last_viewed_at AS stored_last_viewed_at,
        coalesce(stats.purged_views_count, 0) + closed.counted AS views_count,
        coalesce(stats.purged_duration_seconds, 0) + closed.seconds AS total_duration_seconds,
        CASE WHEN stats.purged_views_count > 0
            THEN greatest(stats.last_viewed_at, closed.last_viewed_at)
            ELSE closed.last_viewed_at
        END AS last_viewed_at,
        closed.existing,
        closed.existing - closed.counted AS under_way
    FROM unnest(%(object_ids)s::uuid[]) AS object (id)
    LEFT JOIN property_object_view_stats AS stats ON stats.property_object_id = object.id
    CROSS JOIN LATERAL (
        SELECT
            count(*) AS existing,
            count(*) FILTER (WHERE is_counted) AS counted,
            coalesce(sum(seconds) FILTER (WHERE is_counted), 0)::bigint AS seconds,
            max(created_at) FILTER (WHERE is_counted) AS last_viewed_at
        FROM (
            SELECT
                view.created_at,
                floor(extract(epoch FROM view.duration))::bigint AS seconds,
                seen.property_object_view_id IS NOT NULL OR {_IS_SETTLED} AS is_counted
            FROM property_object_views AS view
            LEFT JOIN property_object_view_stats_seen AS seen
                ON seen.property_object_view_id = view.id
            WHERE view.property_object_id = object.id AND view.status = 'Inactive'
        ) AS view
    ) AS closed
"""

_COMPARE = f"{_FROM_VIEWS} ORDER BY object.id"

_SEE_CLOSED = f"""
    INSERT INTO property_object_view_stats_seen (property_object_view_id, seen_at)
    SELECT view.id, statement_timestamp() FROM property_object_views AS view
    WHERE view.property_object_id = ANY(%(object_ids)s::uuid[]) AND view.status = 'Inactive'
      AND NOT {_IS_SETTLED}
    ORDER BY view.id
    ON CONFLICT (property_object_view_id) DO NOTHING
"""

_REWRITE = f"""
    UPDATE property_object_view_stats AS stats SET
        views_count = views.views_count,
        total_duration_seconds = views.total_duration_seconds,
        last_viewed_at = views.last_viewed_at
    FROM ({_FROM_VIEWS}) AS views
    WHERE stats.property_object_id = views.property_object_id
      AND (views.views_count, views.total_duration_seconds, views.last_viewed_at)
          IS DISTINCT FROM
          (stats.views_count, stats.total_duration_seconds, stats.last_viewed_at)
"""
