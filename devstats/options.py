"""Options of dev-stats, validated where they are built (design, section 11)."""

import re
from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevStatsOptions:
    """Options of dev-stats; `DEV_STATS_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    batch_size: int = 1000
    """Rows of an insert at most (specification)."""
    flush_interval: timedelta = timedelta(seconds=5)
    """How long a row may wait for a batch to fill."""
    storage_timeout: timedelta = timedelta(seconds=10)
    """How long ClickHouse may take for an answer. Its client asks twice, and the loop polls only
    between two calls: a few of them must fit between the polls that keep a member in its group."""
    reconciled: timedelta = timedelta(days=1)
    """How far back every hour is reconciled: for how long a loss is reported."""
    cluster: str = ""
    """Name of a replicated cluster, whose tables then are replicated and distributed."""

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        if not 1 <= self.batch_size <= 1000:
            errors["batch_size"] = "Must be from 1 to 1000."
        if not timedelta(0) <= self.flush_interval <= timedelta(minutes=1):
            errors["flush_interval"] = "Must be from 00:00:00 to 00:01:00."
        if not timedelta(seconds=1) <= self.storage_timeout <= timedelta(minutes=1):
            errors["storage_timeout"] = "Must be from 00:00:01 to 00:01:00."
        if not timedelta(hours=1) <= self.reconciled <= timedelta(days=30):
            errors["reconciled"] = "Must be from 01:00:00 to 30.00:00:00."
        if self.cluster and not _NAME.fullmatch(self.cluster):
            errors["cluster"] = "Must be a name of letters, digits, _ and -."
        if errors:
            raise InvalidOptions(errors)
