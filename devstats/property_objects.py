"""Whose a property object is, and the views that were stored before anybody knew."""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client

from devstats.clickhouse import MOST_IDS, translated_faults
from devstats.facts import UNKNOWN_DEVELOPER, PropertyObject, ViewFact, owned_by, owner_at
from devstats.writer import PROPERTY_OBJECTS, VIEW_FACTS, FactWriter

Versions = dict[UUID, list[PropertyObject]]

_VERSIONS = """
    SELECT PropertyObjectId, DeveloperId, BrandId, UpdatedAt, Revision FROM property_objects
    WHERE PropertyObjectId IN {ids:Array(UUID)}
    ORDER BY PropertyObjectId, UpdatedAt, Revision DESC, DeveloperId
    LIMIT 1 BY PropertyObjectId, UpdatedAt
"""


def find_versions(client: Client, object_ids: Iterable[UUID]) -> Versions:
    """Read what is known of objects, the oldest version first; unknown ones are left out.

    Of several versions from one moment on only the last told is there.

    Raises:
        StorageUnavailable: ClickHouse is away.
    """
    versions: Versions = defaultdict(list)
    wanted = list(set(object_ids))
    for start in range(0, len(wanted), MOST_IDS):
        with translated_faults():
            rows = client.query(
                _VERSIONS, parameters={"ids": wanted[start : start + MOST_IDS]}
            ).result_rows
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

    Of two owners from the same moment on, the one that is told later is the owner, whether in one
    call, in a later one, or again after the other.

    Args:
        objects: In the order in which they were told.
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
    for start in range(0, len(objects), MOST_IDS):
        chunk = objects[start : start + MOST_IDS]
        known = find_versions(writer.client, (each.property_object_id for each in chunk))
        new = []
        for each in chunk:
            versions = known[each.property_object_id]
            if not _is_known(each, versions, now):
                revised = _revised(each, versions)
                new.append(revised)
                insort(versions, revised, key=_moment)
        if new:
            writer.append(
                PROPERTY_OBJECTS,
                # By the owner too: where a lagging replica hides the first owner of a moment, the
                # next one gets the same revision, and is no repetition.
                {
                    f"{each.updated_at} {each.revision} {each.developer_id} {each.brand_id}"
                    f" {each.property_object_id}": each
                    for each in new
                },
            )
        added += len(new)
        advance(len(chunk))
    return added


def _moment(version: PropertyObject) -> datetime:
    return version.updated_at


def _is_known(
    version: PropertyObject, known: Sequence[PropertyObject], now: datetime | None
) -> bool:
    owner = owner_at(known, version.updated_at)
    if owner is None or owner[1:3] != version[1:3]:
        return False
    return version.updated_at in (now, owner.updated_at)


def _revised(version: PropertyObject, known: Sequence[PropertyObject]) -> PropertyObject:
    """Let a version win over the one that is known from its moment on, if there is any."""
    before = owner_at(known, version.updated_at)
    if before is None or before.updated_at != version.updated_at:
        return version
    return version._replace(revision=before.revision + 1)


# -- views of objects that were unknown ----------------------------------------------------

# Views without an owner whose object has one: worked out once a month of views, in time that grows
# as they do, and streamed, so that what is added on the way does not matter. A view that got its
# owner in an earlier run is none. The objects come first since there are few of them that anybody
# was late to tell of: memory is for their views only, and beyond the bounds ClickHouse takes disk.
_UNOWNED = """
    SELECT PropertyObjectViewId FROM property_object_view_facts
    WHERE toYYYYMM(EventTime) = {month:UInt32}
      AND PropertyObjectId GLOBAL IN (
          SELECT PropertyObjectId FROM property_object_view_facts
          WHERE toYYYYMM(EventTime) = {month:UInt32} AND DeveloperId = {unknown:UUID}
            AND PropertyObjectId IN (SELECT PropertyObjectId FROM property_objects)
      )
    GROUP BY PropertyObjectViewId HAVING max(DeveloperId) = {unknown:UUID}
"""
_BOUNDS = {
    "max_bytes_before_external_group_by": 256 * 1024**2,
    "max_bytes_before_external_sort": 256 * 1024**2,
}
_COLUMNS = ", ".join(VIEW_FACTS.columns)
_FACTS = f"""
    SELECT {_COLUMNS} FROM property_object_view_facts
    WHERE toYYYYMM(EventTime) = {{month:UInt32}} AND DeveloperId = {{unknown:UUID}}
      AND PropertyObjectViewId IN {{ids:Array(UUID)}}
    ORDER BY PropertyObjectViewId, IngestionTime DESC LIMIT 1 BY PropertyObjectViewId
"""
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
        return sum(
            self._query(f"SELECT count() FROM ({_UNOWNED})", month=month, settings=_BOUNDS)[0][0]
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
            for ids in self._unowned(month):
                views = [ViewFact(*row) for row in self._query(_FACTS, month=month, ids=ids)]
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

    def _unowned(self, month: int) -> Iterator[list[UUID]]:
        """Yield ids of views in the order of the key, so that those of neighbours are together."""
        with (
            translated_faults(),
            self._writer.client.query_row_block_stream(
                f"{_UNOWNED} ORDER BY PropertyObjectViewId",
                parameters={"unknown": UNKNOWN_DEVELOPER, "month": month},
                settings=_BOUNDS,
            ) as blocks,
        ):
            for block in blocks:
                ids = [row[0] for row in block]
                for start in range(0, len(ids), MOST_IDS):
                    yield ids[start : start + MOST_IDS]

    def _query(
        self, statement: str, settings: dict[str, int] | None = None, **parameters: object
    ) -> Sequence[Sequence[Any]]:
        with translated_faults():
            return self._writer.client.query(
                statement,
                parameters={"unknown": UNKNOWN_DEVELOPER, **parameters},
                settings=settings,
            ).result_rows
