"""Options of the outbox, validated where they are built (design, section 9)."""

import zlib
from dataclasses import dataclass
from datetime import timedelta

from pinactivity.core.errors import InvalidOptions

_SHARDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """Options of the outbox; `OUTBOX_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    batch_size: int = 2000
    """Messages that are sent and acknowledged together. The relay commits after four batches at
    the latest, so a relay that is killed resends at most four."""
    polling_interval: timedelta = timedelta(seconds=1)
    delivery_timeout: timedelta = timedelta(seconds=8)
    """How long the relay waits for the acknowledgements of a batch. Shorter than a worker's grace
    period and than PostgreSQL's idle_in_transaction_session_timeout."""
    shards: int = 1
    """How many relays can work at once, each on keys of its own."""
    published_kept: timedelta = timedelta(days=7)
    """How long published messages are kept for support staff."""

    def __post_init__(self) -> None:
        reasons: dict[str, str] = {}
        if not 1 <= self.batch_size <= 10_000:
            reasons["batch_size"] = "Must be from 1 to 10000."
        if not timedelta(seconds=1) <= self.polling_interval <= timedelta(minutes=1):
            reasons["polling_interval"] = "Must be from 00:00:01 to 00:01:00."
        if not timedelta(seconds=1) <= self.delivery_timeout <= timedelta(seconds=15):
            reasons["delivery_timeout"] = "Must be from 00:00:01 to 00:00:15."
        if self.shards not in _SHARDS:
            reasons["shards"] = f"Must be one of {', '.join(map(str, _SHARDS))}."
        if not timedelta(hours=1) <= self.published_kept <= timedelta(days=3650):
            reasons["published_kept"] = "Must be from 01:00:00 to 3650.00:00:00."
        if reasons:
            raise InvalidOptions(reasons)

    @property
    def shard_numbers(self) -> range:
        """The shards of this layout: no two layouts have a number in common.

        One shard is 0, two are 1 and 2, four are 3 to 6. So the number shows which layout wrote
        a row.
        """
        return range(self.shards - 1, 2 * self.shards - 1)

    def shard_of(self, key: str) -> int:
        """Return the shard of all messages of a key."""
        if self.shards == 1:
            return 0
        return self.shard_numbers[zlib.crc32(key.encode()) % self.shards]
