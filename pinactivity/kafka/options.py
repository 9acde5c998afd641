"""Options of every consumer, validated where they are built (design, section 10)."""

from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Options of the consumers' loop; `CONSUMER_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    poison_limit: int = 1000
    """More poison messages in a row stop the consumer: a bad deploy, not bad data. 0 = never."""
    first_wait: timedelta = _SECOND
    """Before the first retry of a batch; it doubles with each."""
    longest_wait: timedelta = timedelta(minutes=1)
    max_poll_interval: timedelta = timedelta(minutes=5)
    """How long one insert may take before the broker gives the partitions to another member."""
    session_timeout: timedelta = timedelta(seconds=45)
    """After how long a silence the broker considers a member dead. At least 6 s on Apache Kafka;
    the embedded broker lets a group's first member wait for half of it."""
    delivery_timeout: timedelta = timedelta(seconds=4)
    """How long an acknowledgement of dead-letter records may take: part of the 10 s of a stop."""

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        if not 0 <= self.poison_limit <= 1_000_000:
            errors["poison_limit"] = "Must be from 0 to 1000000."
        if not timedelta(milliseconds=10) <= self.first_wait <= timedelta(minutes=1):
            errors["first_wait"] = "Must be from 10 ms to 00:01:00."
        if not self.first_wait <= self.longest_wait <= timedelta(minutes=10):
            errors["longest_wait"] = "Must be from the first wait to 00:10:00."
        if not 2 * _SECOND <= self.max_poll_interval <= timedelta(hours=1):
            errors["max_poll_interval"] = "Must be from 00:00:02 to 01:00:00."
        if not 6 * _SECOND <= self.session_timeout <= timedelta(minutes=30):
            errors["session_timeout"] = "Must be from 00:00:06 to 00:30:00."
        if not _SECOND <= self.delivery_timeout <= timedelta(minutes=2):
            errors["delivery_timeout"] = "Must be from 00:00:01 to 00:02:00."
        if errors:
            raise InvalidOptions(errors)
