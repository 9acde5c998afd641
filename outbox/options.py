"""Options of the outbox relay, validated where they are built (design, section 9)."""

from dataclasses import dataclass
from datetime import timedelta

from pinactivity.errors import InvalidOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """Options of the relay; `OUTBOX_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    batch_size: int = 500
    polling_interval: timedelta = timedelta(seconds=1)
    delivery_timeout: timedelta = timedelta(seconds=8)
    """How long a batch may wait for its acknowledgements: shorter than the grace period,
    and than PostgreSQL's idle_in_transaction_session_timeout."""

    def __post_init__(self) -> None:
        faults: dict[str, str] = {}
        if not 1 <= self.batch_size <= 10_000:
            faults["batch_size"] = "Must be from 1 to 10000."
        if not timedelta(seconds=1) <= self.polling_interval <= timedelta(minutes=1):
            faults["polling_interval"] = "Must be from 00:00:01 to 00:01:00."
        if not timedelta(seconds=1) <= self.delivery_timeout <= timedelta(seconds=15):
            faults["delivery_timeout"] = "Must be from 00:00:01 to 00:00:15."
        if faults:
            raise InvalidOptions(faults)
