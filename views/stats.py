"""What ended views add up to, by property object (design, section 6).

Each view counts once: its id is inserted into the seen table and its figures are added in one
transaction. The figures can be worked out again from the views themselves, because retention
leaves behind what it deletes (`purged_*`).
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
"""Of one run: shorter than the grace period of a worker, which then need not be told to stop."""
_OBJECTS_A_CHUNK = 100
_SETTLED_AFTER = timedelta(days=85)
"""From when on an ended view is as good as counted: its event would not count any more
(COUNTED_FOR), and until then its row in the seen table is kept (SEEN_AT_LEAST). In the middle,
so that neither clocks nor long transactions matter."""


@dataclass(frozen=True, slots=True)
class EndedView:
    view_id: UUID
    property_object_id: UUID
    viewed_at: datetime
    duration_seconds: int
    recorded_at: datetime
    """When its event was written."""


def count_views(ended: Sequence[EndedView], *, now: datetime | None = None) -> None:
    """Add views to the figures of their objects, each view once (INV-LVS-003).

    One whose event is older than COUNTED_FOR is skipped: it may have been forgotten as seen.

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
    """Return an object's figures: zeros, and not saved, for one that was never viewed."""
    found = PropertyObjectViewStats.objects.filter(pk=property_object_id).first()
    return found or PropertyObjectViewStats(
        property_object_id=property_object_id, views_count=0, total_duration_seconds=0
    )


def purge_seen(options: ViewStatsOptions) -> int:
    """Forget the views that were counted longer ago than `seen_kept`, in batches.

    Ends after 10 s at the latest; the next run goes on. Harmless beside another run and beside
    consumers: rows that somebody holds are skipped.

    Returns:
        How many were forgotten.
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
class Figures:
    views_count: int
    total_duration_seconds: int
    last_viewed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One object's figures as they are, and as its views make them, at one moment."""

    property_object_id: UUID
    stored: Figures
    expected: Figures
    """Of the views that are closed and counted, and of those that retention has deleted."""
    existing: int
    """Closed views in the table."""
    under_way: int
    """Of these, those whose event has not been counted yet; no part of `expected`."""

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
    """Work the figures out again from the views, and compare; safe beside consumers.

    An object is compared in one statement, so a batch of a consumer is in it as a whole or not
    at all. Where figures differ, or events are under way, `repair` rewrites them, 100 objects a
    transaction, in the lock order of the consumers:

    1. Remember every closed view as seen: its event, if it is still under way, or comes again,
       adds nothing.
    2. Lock the objects' rows: whoever has marked other views as seen adds them afterwards.
    3. In a new statement, write purged + closed and seen. A view that closed since step 1 is
       not seen, and is left to its event.

    Args:
        repair: False only reads.
        advance: Called with the closed views that were compared since its last call.

    Raises:
        OperationalError: a lock was not to be had in time, or the database is away. What was
            rewritten stays, and another call does the rest.
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
    """Yield the ids of all objects with views or figures, in their order."""
    after = NIL  # no object has this id
    while rows := fetch(_OBJECTS, after=after, limit=_OBJECTS_A_CHUNK):
        yield [object_id for (object_id,) in rows]
        (after,) = rows[-1]


def _compare(object_ids: list[UUID]) -> list[Comparison]:
    return [
        Comparison(object_id, Figures(*row[:3]), Figures(*row[3:6]), *row[6:])
        for object_id, *row in fetch(_COMPARE, object_ids=object_ids, **_settled())
    ]


def _repair(object_ids: list[UUID]) -> int:
    settled = _settled()
    with transaction.atomic():
        execute(_SEE_CLOSED, object_ids=object_ids, **settled)
        PropertyObjectViewStats.objects.lock(object_ids)
        return execute(_REWRITE, object_ids=object_ids, **settled)


def _settled() -> dict[str, object]:
    """Tell from when on views are settled, by EndedAt and by id.

    By id too, which is ordered by the time that it was made: a replay ends views in the past,
    but their events are of today.
    """
    moment = statement_time() - _SETTLED_AFTER
    return {"settled": moment, "settled_id": earliest_id(moment)}


# Raw SQL: views, seen views and figures are compared in one statement, that is in one snapshot.
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
