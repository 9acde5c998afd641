"""ClickHouse's tables as the writer sees them; their columns follow from the rows' types.

IngestionTime is in none of them: it is the server's.
"""

from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from uuid import UUID

from devstats.facts import SessionFact, ViewFact
from devstats.ownership import PropertyObject

_TIME = "DateTime64(6, 'UTC')"
_TYPES: dict[Any, str] = {
    str: "String",
    int: "UInt32",
    datetime: _TIME,
    UUID: "UUID",
    UUID | None: "Nullable(UUID)",
}


class Table:
    """A table to write to.

    Args:
        name: In the database of dev-stats.
        row: A NamedTuple with a field for each column. An annotation on a field is its type in
            ClickHouse, where that does not follow from Python's.
    """

    def __init__(self, name: str, row: type[tuple[Any, ...]]) -> None:
        self.name = name
        self.columns = {
            field.title().replace("_", ""): _column_type(kind)
            for field, kind in get_type_hints(row, include_extras=True).items()
        }

    @cached_property
    def month_column(self) -> int | None:
        """The index of the column whose month is the partition."""
        names = list(self.columns)
        return names.index("EventTime") if "EventTime" in names else None

    @cached_property
    def time_columns(self) -> list[int]:
        """The indexes of the columns that hold a time, which is never absent."""
        return [index for index, kind in enumerate(self.columns.values()) if kind == _TIME]


def _column_type(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        named: str = get_args(kind)[1]
        return named
    return _TYPES[kind]


SESSION_FACTS = Table("session_facts", SessionFact)
VIEW_FACTS = Table("property_object_view_facts", ViewFact)
PROPERTY_OBJECTS = Table("property_objects", PropertyObject)
