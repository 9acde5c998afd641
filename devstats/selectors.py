"""What developers may read of the facts: each read within one developer's scope (section 11).

The scope is the first condition of every query: the views of this developer's objects. A view of
an object whose owner nobody knows is in nobody's scope. No read uses FINAL: copies of a fact
collapse here, by the newest IngestionTime, whatever merges have done. GLOBAL is for a cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client
from django.conf import settings

from devstats.clickhouse import RowRefused, StorageUnavailable, connect_reader, translated_errors
from devstats.facts import TENANT, UNKNOWN_DEVELOPER
from pinactivity.http.periods import Period

LONGEST_PERIOD = timedelta(days=366)
MOST_OBJECTS = 100
_VIEWER_KINDS = ("Guest", "Investor", "Agent")
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Of some sessions; seconds, None where there is no session."""

    sessions: int
    average: float | None
    """To 0.1 s."""
    median: float | None
    percentile_95: float | None
    """Both as PostgreSQL's percentile_cont: between two sessions where it falls between them."""


@dataclass(frozen=True, slots=True)
class SessionsSummary:
    total: SessionStatistics
    by_viewer_kind: Sequence[tuple[str, SessionStatistics]]
    """Guest, User; those that there are."""
    by_day: Sequence[tuple[date, SessionStatistics]]
    """Days in UTC that have any, in order."""
    fresh_as_of: datetime | None
    """The newest IngestionTime of what is counted."""


@dataclass(frozen=True, slots=True)
class ViewStatistics:
    """Of some views; seconds."""

    views: int
    unique_viewers: int
    """Users, and devices of guests."""
    total: int
    average: float
    """To 0.1 s."""


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    property_object_id: UUID
    statistics: ViewStatistics
    by_viewer_kind: Sequence[tuple[str, ViewStatistics]]
    """Guest, Investor, Agent; those that there are."""


@dataclass(frozen=True, slots=True)
class ObjectsSummary:
    total: ViewStatistics | None = None
    """Of all objects, listed or not; None where there is no view."""
    objects: Sequence[ObjectSummary] = field(default_factory=tuple)
    fresh_as_of: datetime | None = None


# A view belongs to the developer of its newest fact, and to nobody else. An owner who is reported
# late gets a second fact of it, when its topic is read again. So views of objects that had other
# owners too are compared with those owners' facts of them, by the key. Where no object of this
# developer ever was another's, nothing is read for that.
_WITHIN = """
    EventTime >= {since:DateTime64(6, 'UTC')} AND EventTime < {until:DateTime64(6, 'UTC')}
"""
_SHARED_OBJECTS = """
    SELECT PropertyObjectId FROM property_objects
    WHERE DeveloperId != {developer:UUID} AND PropertyObjectId IN (
        SELECT PropertyObjectId FROM property_objects WHERE DeveloperId = {developer:UUID}
    )
"""
_VIEWS_OF_OTHERS = f"""
    SELECT PropertyObjectViewId FROM property_object_view_facts
    WHERE DeveloperId GLOBAL IN (
        SELECT DeveloperId FROM property_objects WHERE PropertyObjectId IN ({_SHARED_OBJECTS})
    )
      AND PropertyObjectViewId GLOBAL IN (
        SELECT PropertyObjectViewId FROM property_object_view_facts
        WHERE DeveloperId = {{developer:UUID}} AND {_WITHIN}
          AND PropertyObjectId GLOBAL IN ({_SHARED_OBJECTS})
    )
      AND {_WITHIN}
    GROUP BY PropertyObjectViewId
    HAVING argMax(DeveloperId, (IngestionTime, DeveloperId)) != {{developer:UUID}}
"""
_SCOPE = f"""
    DeveloperId = {{developer:UUID}} AND {_WITHIN}
      AND PropertyObjectViewId GLOBAL NOT IN ({_VIEWS_OF_OTHERS})
"""

# A session counts once, on the day of the developer's earliest view in it within the period. Copies
# of a view share its session and its time, so that they need no collapsing here. The join decides
# which sessions count: those of views that have gone to others are few, and may be looked up. What
# is viewed is activity of its session; a day is to spare for what other clocks may have written.
_SESSIONS = f"""
    WITH viewed AS (
        SELECT SessionId, min(EventTime) AS FirstViewedAt, max(IngestionTime) AS Ingested
        FROM property_object_view_facts
        WHERE {_SCOPE}
        GROUP BY SessionId
    )
    SELECT grouping(Kind) = 0 AS IsOfKind, grouping(Day) = 0 AS IsOfDay, Kind, Day, count(),
           round(avg(Seconds), 1), quantileExactInclusive(0.5)(Seconds),
           quantileExactInclusive(0.95)(Seconds), max(Ingested)
    FROM (
        SELECT toDate(viewed.FirstViewedAt, 'UTC') AS Day, ended.Newest.1 AS Seconds,
               toString(ended.Newest.2) AS Kind,
               greatest(viewed.Ingested, ended.Ingested) AS Ingested
        FROM viewed
        GLOBAL INNER JOIN (
            SELECT SessionId, max(IngestionTime) AS Ingested,
                   argMax(tuple(DurationSeconds, ViewerKind), IngestionTime) AS Newest
            FROM session_facts
            WHERE TenantId = {{tenant:String}} AND EventTime < {{until:DateTime64(6, 'UTC')}}
              AND LastActivityAt >= {{since:DateTime64(6, 'UTC')}} - INTERVAL 1 DAY
              AND SessionId GLOBAL IN (
                SELECT SessionId FROM property_object_view_facts
                WHERE DeveloperId = {{developer:UUID}} AND {_WITHIN}
              )
            GROUP BY SessionId
        ) AS ended ON ended.SessionId = viewed.SessionId
    )
    GROUP BY GROUPING SETS ((), (Kind), (Day))
    ORDER BY Kind, Day
"""


def summarise_sessions(developer_id: UUID, period: Period) -> SessionsSummary:
    """Summarise the sessions in which objects of a developer were viewed within a period.

    The whole Duration of a session counts, wherever in it the views were.

    Raises:
        StorageUnavailable: ClickHouse does not answer.
    """
    total = SessionStatistics(0, None, None, None)
    by_kind: list[tuple[str, SessionStatistics]] = []
    by_day: list[tuple[date, SessionStatistics]] = []
    fresh_as_of = None
    rows = _query(_SESSIONS, developer_id, period, tenant=TENANT)
    for is_of_kind, is_of_day, kind, day, sessions, average, median, late, ingested in rows:
        if not sessions:  # the total of nothing
            continue
        # 0.95 of the way between whole seconds has two digits; the rest is the float's.
        statistics = SessionStatistics(sessions, average, round(median, 2), round(late, 2))
        if is_of_kind:
            by_kind.append((kind, statistics))
        elif is_of_day:
            by_day.append((day, statistics))
        else:
            total, fresh_as_of = statistics, ingested
    return SessionsSummary(total, by_kind, by_day, fresh_as_of)


# The first row is of all objects: a viewer of two of them is one there.
_OBJECTS = f"""
    SELECT ObjectId, max(Ingested), count(), uniqExact(Newest.2), sum(Newest.3),
           round(avg(Newest.3), 1),
           {
    ", ".join(
        f"countIf(Newest.4 = '{kind}'), uniqExactIf(Newest.2, Newest.4 = '{kind}'),"
        f" sumIf(Newest.3, Newest.4 = '{kind}'), round(avgIf(Newest.3, Newest.4 = '{kind}'), 1)"
        for kind in _VIEWER_KINDS
    )
}
    FROM (
        SELECT max(IngestionTime) AS Ingested,
               argMax(
                   (PropertyObjectId, ifNull(UserId, AnonymousId), DurationSeconds, ViewerKind),
                   IngestionTime
               ) AS Newest,
               Newest.1 AS ObjectId
        FROM property_object_view_facts
        WHERE {_SCOPE}
        GROUP BY PropertyObjectViewId
    )
    GROUP BY GROUPING SETS ((), (ObjectId))
    ORDER BY grouping(ObjectId) DESC, count() DESC, ObjectId
    LIMIT 1 + {MOST_OBJECTS}
"""


def summarise_objects(developer_id: UUID, period: Period) -> ObjectsSummary:
    """Summarise the views of a developer's objects that were opened within a period.

    Returns:
        The most viewed objects first, MOST_OBJECTS at most.

    Raises:
        StorageUnavailable: ClickHouse does not answer.
    """
    rows = _query(_OBJECTS, developer_id, period)
    if len(rows) <= 1:  # nobody's, or the total of nothing
        return ObjectsSummary()
    summaries = []
    for property_object_id, _, *statistics in rows:
        whole, *kinds = (
            ViewStatistics(*statistics[at : at + 4]) for at in range(0, len(statistics), 4)
        )
        named = zip(_VIEWER_KINDS, kinds, strict=True)
        summaries.append(
            ObjectSummary(property_object_id, whole, [each for each in named if each[1].views])
        )
    total, *objects = summaries
    return ObjectsSummary(total.statistics, objects, rows[0][1])


def _query(
    statement: str, developer_id: UUID, period: Period, **parameters: str
) -> Sequence[Sequence[Any]]:
    if developer_id == UNKNOWN_DEVELOPER:
        return []  # whatever came of a caller's check: unknown owners are nobody's
    bounds = {"since": period.since or _FIRST, "until": period.until or _LAST}
    try:
        with translated_errors():
            rows = (
                reader(settings.CLICKHOUSE_URL)
                .query(
                    statement,
                    parameters={
                        "developer": developer_id,
                        **{name: _moment(moment) for name, moment in bounds.items()},
                        **parameters,
                    },
                )
                .result_rows
            )
    except RowRefused as exc:  # nothing is written here, so it is not of a row
        raise StorageUnavailable from exc
    if not rows:  # there is always a total, of nothing too: this was no answer
        raise StorageUnavailable
    return rows


def _moment(moment: datetime) -> str:
    """Write a time as ClickHouse reads it, within what it can hold; whole, with microseconds."""
    return min(max(moment, _FIRST), _LAST).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


@cache
def reader(url: str) -> Client:
    """One client a process: threads share it, and it connects again by itself."""
    return connect_reader()
