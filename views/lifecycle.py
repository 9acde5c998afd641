"""The sources of a view of a property object."""

from enum import StrEnum


class ViewSource(StrEnum):
    CATALOG = "Catalog"
    SEARCH = "Search"
    MAP = "Map"
    RECOMMENDATION = "Recommendation"
    FAVORITES = "Favorites"
    SHARE = "Share"
    DIRECT = "Direct"
    OTHER = "Other"


FILTER_SNAPSHOT_BYTES = 8 * 1024
"""The greatest size of a FilterSnapshot as compact JSON in UTF-8."""
