"""Options of the activity lifecycle, validated where they are built (design, section 7)."""

from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

_MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityCloserOptions:
    """Options of the ActivityCloserJob; `ACTIVITY_CLOSER_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    inactivity_threshold: timedelta = timedelta(minutes=12)
    polling_interval: timedelta = timedelta(minutes=1)
    batch_size: int = 500
    max_run_duration: timedelta = timedelta(minutes=5)
    sessions_per_transaction: int | None = None
    """None means min(100, batch_size); read `unit_size`."""
    single_instance: bool = False

    def __post_init__(self) -> None:
        reasons: dict[str, str] = {}
        if not 10 * _MINUTE <= self.inactivity_threshold <= 15 * _MINUTE:
            reasons["inactivity_threshold"] = "Must be from 00:10:00 to 00:15:00."
        if not timedelta(seconds=1) <= self.polling_interval <= 10 * _MINUTE:
            reasons["polling_interval"] = "Must be from 00:00:01 to 00:10:00."
        if self.batch_size <= 0:
            reasons["batch_size"] = "Must be greater than 0."
        if self.max_run_duration <= timedelta(0):
            reasons["max_run_duration"] = "Must be longer than 00:00:00."
        if self.sessions_per_transaction is not None and not (
            1 <= self.sessions_per_transaction <= max(self.batch_size, 1)
        ):
            reasons["sessions_per_transaction"] = "Must be from 1 to the batch size."
        if reasons:
            raise InvalidOptions(reasons)

    @property
    def unit_size(self) -> int:
        """How many sessions one transaction of phase B closes."""
        return self.sessions_per_transaction or min(100, self.batch_size)

    @property
    def abandoned_after(self) -> timedelta:
        """Silence after which a row is never revived (design, section 5, Abandoned rows)."""
        return 2 * self.inactivity_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityRetentionOptions:
    """Options of the ActivityRetentionJob; `ACTIVITY_RETENTION_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    age: timedelta = 365 * _DAY
    """How long ago a session must have ended. At least 90 days: until then the statistics may
    not have counted all events of its views (docs/adr/0008)."""
    max_run_duration: timedelta = 5 * _MINUTE

    def __post_init__(self) -> None:
        reasons: dict[str, str] = {}
        if not 90 * _DAY <= self.age <= 3650 * _DAY:
            reasons["age"] = "Must be from 90.00:00:00 to 3650.00:00:00."
        if not timedelta(0) < self.max_run_duration <= 60 * _MINUTE:
            reasons["max_run_duration"] = "Must be longer than 00:00:00, at most 01:00:00."
        if reasons:
            raise InvalidOptions(reasons)
