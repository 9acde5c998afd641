"""Options of the view statistics, validated where they are built (design, section 3)."""

from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

COUNTED_FOR = timedelta(days=80)
"""How old an event may be and still be counted; an older one may have been forgotten as seen."""
SEEN_AT_LEAST = timedelta(days=90)
"""Longer than COUNTED_FOR by what clocks, lags and long transactions may come to."""
_MOST = timedelta(days=3650)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStatsOptions:
    """Options of the view statistics; `VIEW_STATS_<FIELD>` in the environment.

    Raises:
        InvalidOptions: a field is out of bounds.
    """

    seen_kept: timedelta = SEEN_AT_LEAST
    """For how long a view is remembered as counted. Any valid value is safe to change to any
    other, because no event is counted that is older than COUNTED_FOR."""

    def __post_init__(self) -> None:
        if not SEEN_AT_LEAST <= self.seen_kept <= _MOST:
            raise InvalidOptions({"seen_kept": "Must be from 90.00:00:00 to 3650.00:00:00."})
