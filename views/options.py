"""Options of the view statistics, validated where they are built (design, section 3)."""

from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

COUNTED_FOR = timedelta(days=80)
"""The greatest age of an event that counts. The seen table may no longer contain an older one."""
SEEN_AT_LEAST = timedelta(days=90)
"""Longer than COUNTED_FOR: a margin for clocks, lags and long transactions."""
_MOST = timedelta(days=3650)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStatsOptions:
    """Options of the view statistics; `VIEW_STATS_<FIELD>` in the environment.

    Raises:
        InvalidOptions: a field is out of bounds.
    """

    seen_kept: timedelta = SEEN_AT_LEAST
    """How long the seen table keeps a view. Changing one valid value to another is safe, because
    events older than COUNTED_FOR never count."""

    def __post_init__(self) -> None:
        if not SEEN_AT_LEAST <= self.seen_kept <= _MOST:
            raise InvalidOptions({"seen_kept": "Must be from 90.00:00:00 to 3650.00:00:00."})
