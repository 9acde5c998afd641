"""The tables of the view statistics, and the statements on them (design, sections 3 and 6).

Lock order of every writer: the seen table by view, then the statistics by property object.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, models
from django.db.models import Q


class PropertyObjectViewStatsQuerySet(models.QuerySet["PropertyObjectViewStats"]):
    def add(
        self,
        *,
        object_ids: Sequence[UUID],
        seconds: Sequence[int],
        viewed_at: Sequence[datetime],
    ) -> None:
        """Add views to their objects' totals; each sequence has one item for each view."""
        execute(_ADD, object_ids=object_ids, seconds=seconds, viewed_at=viewed_at)

    def lock(self, object_ids: Sequence[UUID]) -> None:
        """Lock the rows of some objects until the transaction ends; insert missing ones."""
        execute(_LOCK, object_ids=object_ids)


class PropertyObjectViewStats(models.Model):
    """The totals of the ended views of one property object."""

    property_object_id = models.UUIDField(primary_key=True)
    views_count = models.BigIntegerField(db_default=0)
    total_duration_seconds = models.BigIntegerField(
        db_default=0, help_text="The sum of the views' DurationSeconds, each rounded down."
    )
    last_viewed_at = models.DateTimeField(
        null=True, blank=True, help_text="When the newest of these views was opened."
    )
    purged_views_count = models.BigIntegerField(
        db_default=0, help_text="Of these views, those that retention has deleted."
    )
    purged_duration_seconds = models.BigIntegerField(
        db_default=0, help_text="The DurationSeconds of the views that retention has deleted."
    )

    objects = PropertyObjectViewStatsQuerySet.as_manager()

    class Meta:
        db_table = "property_object_view_stats"
        verbose_name = verbose_name_plural = "property object view stats"
        constraints = (
            models.CheckConstraint(
                name="chk_property_object_view_stats_nonneg",
                condition=Q(
                    views_count__gte=0,
                    total_duration_seconds__gte=0,
                    purged_views_count__gte=0,
                    purged_duration_seconds__gte=0,
                ),
            ),
        )

    def __str__(self) -> str:
        return str(self.property_object_id)


class PropertyObjectViewStatsSeenQuerySet(models.QuerySet["PropertyObjectViewStatsSeen"]):
    def add(self, view_ids: Sequence[UUID], *, now: datetime | None) -> set[UUID]:
        """Insert views as counted; return the ids that are new."""
        return {view_id for (view_id,) in fetch(_SEE, view_ids=view_ids, now=now)}

    def forget(self, *, kept: timedelta, limit: int) -> int:
        """Delete up to `limit` rows that are older than `kept`; return how many."""
        return execute(_FORGET, kept=kept, limit=limit)


class PropertyObjectViewStatsSeen(models.Model):
    """A view that the statistics contain (INV-LVS-003)."""

    property_object_view_id = models.UUIDField(primary_key=True)
    seen_at = models.DateTimeField()

    objects = PropertyObjectViewStatsSeenQuerySet.as_manager()

    class Meta:
        db_table = "property_object_view_stats_seen"
        indexes = (
            models.Index(fields=["seen_at"], name="ix_property_object_view_stats_seen_seen_at"),
        )

    def __str__(self) -> str:
        return str(self.property_object_view_id)


# Raw SQL: insert-if-new and increment are one atomic statement each for a whole batch. They sort
# by key, because two consumers that share views or objects would deadlock otherwise.
_SEE = """
    INSERT INTO property_object_view_stats_seen (property_object_view_id, seen_at)
    SELECT id, coalesce(%(now)s, statement_timestamp())
    FROM unnest(%(view_ids)s::uuid[]) AS view (id)
    ORDER BY id
    ON CONFLICT (property_object_view_id) DO NOTHING
    RETURNING property_object_view_id
"""

_ADD = """
    INSERT INTO property_object_view_stats AS stats
        (property_object_id, views_count, total_duration_seconds, last_viewed_at)
    SELECT object_id, count(*), sum(seconds), max(viewed_at)
    FROM unnest(%(object_ids)s::uuid[], %(seconds)s::bigint[], %(viewed_at)s::timestamptz[])
        AS view (object_id, seconds, viewed_at)
    GROUP BY object_id
    ORDER BY object_id
    ON CONFLICT (property_object_id) DO UPDATE SET
        views_count = stats.views_count + excluded.views_count,
        total_duration_seconds = stats.total_duration_seconds + excluded.total_duration_seconds,
        last_viewed_at = greatest(stats.last_viewed_at, excluded.last_viewed_at)
"""

# `WHERE false` updates nothing, but ON CONFLICT locks the existing row.
_LOCK = """
    INSERT INTO property_object_view_stats AS stats (property_object_id)
    SELECT id FROM unnest(%(object_ids)s::uuid[]) AS object (id)
    ORDER BY id
    ON CONFLICT (property_object_id) DO UPDATE SET views_count = stats.views_count WHERE false
"""

# PostgreSQL evaluates the array once. It may evaluate an IN (SELECT .. LIMIT) repeatedly.
_FORGET = """
    DELETE FROM property_object_view_stats_seen
    WHERE property_object_view_id = ANY(ARRAY(
        SELECT property_object_view_id FROM property_object_view_stats_seen
        WHERE seen_at < statement_timestamp() - %(kept)s
        ORDER BY seen_at
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
"""


def execute(statement: str, **parameters: Any) -> int:
    """Run a statement; return how many rows it wrote."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return int(cursor.rowcount)


def fetch(statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run a query; return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
