"""Whose a property object is, and the views that were stored before anybody knew."""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client

from devstats.clickhouse import translated_faults
from devstats.facts import UNKNOWN_DEVELOPER, PropertyObject, ViewFact, owned_by, owner_at
from devstats.writer import PROPERTY_OBJECTS, VIEW_FACTS, FactWriter

Versions = dict[UUID, list[PropertyObject]]

_OBJECTS_A_CHUNK = 1000
_VIEWS_A_CHUNK = 5000

_VERSIONS = """
    SELECT PropertyObjectId, DeveloperId, BrandId, UpdatedAt FROM property_objects
    WHERE PropertyObjectId IN {ids:Array(UUID)}
    ORDER BY PropertyObjectId, UpdatedAt, DeveloperId
"""


def find_versions(client: Client, object_ids: Iterable[UUID]) -> Versions:
    """Read what is known of objects, the oldest version first; unknown ones are left out.

    Raises:
        StorageUnavailable: ClickHouse is away.
    """
    versions: Versions = defaultdict(list)
    with translated_faults():
        rows = client.query(_VERSIONS, parameters={"ids": list(set(object_ids))}).result_rows
    for row in rows:
        version = PropertyObject(*row)
        versions[version.property_object_id].append(version)
    return versions


def store_objects(
    writer: FactWriter,
    objects: Sequence[PropertyObject],
    *,
    now: datetime | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> int:
    """Add versions of objects, except those that are known already.

    Args:
        now: Versions of this moment say whose an object is, not since when: one that tells
            nothing new is left out. Any other is left out only if it is there as it is; that its
            owner was the owner before does not do, since a change between the two may yet come.

    Returns:
        How many were added.

    Raises:
        RowRefused, StorageUnavailable: see `FactWriter.append`; what was added stays.
    """
    added = 0
    objects = sorted(objects, key=_moment)
    for start in range(0, len(objects), _OBJECTS_A_CHUNK):
        chunk = objects[start : start + _OBJECTS_A_CHUNK]
        known = find_versions(writer.client, (each.property_object_id for each in chunk))
        new = []
        for each in chunk:
            versions = known[each.property_object_id]
            if not _is_known(each, versions, now):
                new.append(each)
                insort(versions, each, key=_moment)
        if new:
            writer.append(
                PROPERTY_OBJECTS,
                {f"{each.property_object_id} {each.updated_at}": each for each in new},
            )
        added += len(new)
        advance(len(chunk))
    return added


def _moment(version: PropertyObject) -> datetime:
    return version.updated_at


def _is_known(
    version: PropertyObject, known: Sequence[PropertyObject], now: datetime | None
) -> bool:
    if version.updated_at != now:
        return version in known
    owner = owner_at(known, now)
    return owner is not None and owner[1:3] == version[1:3]


# -- views of objects that were unknown ----------------------------------------------------

# Repaired already, or of an object that is unknown still: left out, so that what this reads is
# what there is to do. GLOBAL, since in a cluster the inner tables are asked of all shards.
_REPAIRABLE = """
    FROM property_object_view_facts
    WHERE toYYYYMM(EventTime) = {month:UInt32} AND DeveloperId = {unknown:UUID}
      AND PropertyObjectId GLOBAL IN (SELECT PropertyObjectId FROM property_objects)
      AND FactId GLOBAL NOT IN (
          SELECT FactId FROM property_object_view_facts
          WHERE toYYYYMM(EventTime) = {month:UInt32} AND DeveloperId != {unknown:UUID}
      )
"""
_COLUMNS = ", ".join(VIEW_FACTS.columns)
_MONTHS = """
    SELECT DISTINCT toYYYYMM(EventTime) AS month FROM property_object_view_facts
    WHERE DeveloperId = {unknown:UUID} ORDER BY month
"""


class Enrichment:
    """Adds the owner to views whose object nobody knew when they ended.

    A view is added once more, with its FactId and its owner; the row without one stays, and no
    read counts it.
    """

    def __init__(self, writer: FactWriter) -> None:
        self._writer = writer

    def count(self) -> int:
        """Count the views that `run` would add.

        Raises:
            StorageUnavailable: ClickHouse is away.
        """
        with translated_faults():
            return sum(
                self._query(f"SELECT uniqExact(FactId) {_REPAIRABLE}", month=month)[0][0]
                for month in self._months()
            )

    def run(self, *, advance: Callable[[int], object] = lambda _: None) -> int:
        """Add them, a month at a time; another call does what an interrupted one left.

        Args:
            advance: Called with the views that were added since its last call.

        Returns:
            How many were added.

        Raises:
            RowRefused, StorageUnavailable: see `FactWriter.append`; what was added stays.
        """
        added = 0
        for month in self._months():
            for views in self._repairable(month):
                versions = find_versions(
                    self._writer.client, [view.property_object_id for view in views]
                )
                owned = [owned_by(view, versions[view.property_object_id]) for view in views]
                self._writer.append(VIEW_FACTS, {view.fact_id: view for view in owned})
                added += len(owned)
                advance(len(owned))
        return added

    def _months(self) -> list[int]:
        return [month for (month,) in self._query(_MONTHS)]

    def _repairable(self, month: int) -> Iterator[list[ViewFact]]:
        """Read one chunk after the other: each is gone from the next once it is repaired."""
        statement = f"SELECT {_COLUMNS} {_REPAIRABLE} LIMIT 1 BY FactId LIMIT {_VIEWS_A_CHUNK}"
        while rows := self._query(statement, month=month):
            yield [ViewFact(*row) for row in rows]

    def _query(self, statement: str, **parameters: object) -> Sequence[Sequence[Any]]:
        with translated_faults():
            return self._writer.client.query(
                statement, parameters={"unknown": UNKNOWN_DEVELOPER, **parameters}
            ).result_rows
