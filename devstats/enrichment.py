"""Adds owners to views that were stored before their object's owner was known."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

from devstats.clickhouse import MOST_IDS, translated_errors
from devstats.facts import UNKNOWN_DEVELOPER, ViewFact
from devstats.ownership import with_owner
from devstats.property_objects import find_versions
from devstats.tables import VIEW_FACTS
from devstats.writer import FactWriter

# Views without an owner whose object has one. They are found once for each month of views, in time
# proportional to their number, and streamed, so that rows added meanwhile do not matter. Views that
# got their owner in an earlier run are excluded. The objects are selected first, since few of them
# were reported late. Memory is for their views only; beyond the bounds ClickHouse uses disk.
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
    """Adds the owner to views that ended before their object's owner was known.

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
        """Add them, a month at a time; another call continues an interrupted one.

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
                owned = [with_owner(view, versions[view.property_object_id]) for view in views]
                self._writer.append(VIEW_FACTS, {view.fact_id: view for view in owned})
                added += len(owned)
                advance(len(owned))
        return added

    def _months(self) -> list[int]:
        return [month for (month,) in self._query(_MONTHS)]

    def _unowned(self, month: int) -> Iterator[list[UUID]]:
        """Yield ids of views in the order of the key, so that those of neighbours are together."""
        with (
            translated_errors(),
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
        with translated_errors():
            return self._writer.client.query(
                statement,
                parameters={"unknown": UNKNOWN_DEVELOPER, **parameters},
                settings=settings,
            ).result_rows
