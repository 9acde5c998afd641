"""The relay: the outbox to Kafka, at least once, in order within a key (design, section 9).

`batch_reader.py` decides what is sent next, `sender.py` sends it, `backoff.py` deals with what
failed, `watermark.py` keeps scans short.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from django.db import connection, transaction

from outbox.backoff import Backoff, park
from outbox.batch_reader import BatchReader, RelayBatch, Scan
from outbox.models import INDEX_SCANS_ONLY
from outbox.options import OutboxOptions
from outbox.sender import Sender
from outbox.watermark import Watermark
from pinactivity.kafka.producer import ProbingPublisher

_LOCK = "Pin:lock:outbox-relay"
MAX_BATCHES = 4
"""Of a transaction. A relay that is killed resends at most so many; more were hardly faster."""
_BEGIN_SECONDS = 1.0
"""A transaction begins no batch later. On a slow broker it takes one batch only."""
_PAUSE_SECONDS = 0.05
"""Between two scans of a relay that lingers."""


@dataclass(frozen=True, slots=True)
class RelayResult:
    """Counts of some batches; `+` adds the counts of the batches that followed."""

    claimed: int = 0
    """Messages that were read to be sent."""
    published: int = 0
    parked: int = 0
    error: str | None = None
    """The class of the last error that was not a message's own."""
    is_blocked: bool = False
    """Messages are backing off, and block others."""

    @property
    def is_drained(self) -> bool:
        """Nothing to go on with: all is sent, another relay has the lock, or Kafka is away."""
        return self.published + self.parked == 0

    @property
    def is_complete(self) -> bool:
        """Every message of the batches was published or parked, and none was left out."""
        return not self.is_blocked and self.claimed == self.published + self.parked

    def __add__(self, other: "RelayResult") -> "RelayResult":
        return RelayResult(
            self.claimed + other.claimed,
            self.published + other.published,
            self.parked + other.parked,
            other.error or self.error,
            other.is_blocked or self.is_blocked,
        )


class OutboxRelay:
    """Publishes pending messages; keeps a watermark a shard, and belongs to one thread.

    Args:
        publisher: Where to.
        options: Validated at start.
    """

    def __init__(self, *, publisher: ProbingPublisher, options: OutboxOptions) -> None:
        self._options = options
        self._watermarks = {shard: Watermark() for shard in options.shard_numbers}
        self._reader = BatchReader(options)
        self._sender = Sender(publisher, delivery_timeout=options.delivery_timeout)
        self._backoff = Backoff(publisher)

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        *,
        linger: timedelta = timedelta(0),
        longest: timedelta = timedelta.max,
    ) -> RelayResult:
        """Publish batches until nothing can be sent; return the sum of their results.

        Args:
            stop: Called between transactions; True ends the run.
            linger: How long to go on scanning after nothing was found. A commit shortly after a
                wake-up sends none of its own, and another relay may have held the lock.
            longest: After so long the run ends, whatever is left.
        """
        total = RelayResult()
        began = time.monotonic()
        leave_at = began + linger.total_seconds()
        while not stop() and time.monotonic() - began < longest.total_seconds():
            result = self.run_once()
            total += result
            if not result.is_drained or (
                result.is_blocked and self._backoff.end_if_broker_is_back()
            ):
                leave_at = time.monotonic() + linger.total_seconds()
            elif time.monotonic() >= leave_at:
                break
            else:
                time.sleep(_PAUSE_SECONDS)
        return total

    def run_once(self) -> RelayResult:
        """Publish a few batches of each shard that no other relay works on."""
        return sum((self._relay(shard) for shard in self._options.shard_numbers), RelayResult())

    def _relay(self, shard: int) -> RelayResult:
        """Publish some batches of a shard in one transaction.

        1. Take the shard's advisory lock for the transaction, or leave. One relay at a time
           keeps the order within a key; SKIP LOCKED would not (docs/adr/0004).
        2. Scan for a batch, in statements after the lock: they see what the relay before has
           marked.
        3. If messages of another layout of shards are pending, relay all shards together.
        4. Send the batch and those that follow it, and mark what Kafka acknowledged.

        The transaction calls the network. It holds no row lock of sessions or views, only the
        relay's advisory lock and its own marks, and the publisher bounds the time of each call.
        """
        with transaction.atomic():
            if not _try_lock(shard):
                return RelayResult()
            scan = self._reader.scan(shard, self._watermarks[shard])
            if scan:
                result, watermark = self._publish_scans(shard, scan)
        if scan is None:
            return self._relay_all_shards()
        self._watermarks[shard] = watermark  # only now: the transaction may not commit
        return result

    def _relay_all_shards(self) -> RelayResult:
        """Publish one batch of all shards together, in the order of ids.

        After a change of the number of shards a key's messages may be in two shards. Then
        nobody may work on either alone.
        """
        with transaction.atomic():
            if not _try_lock(None):
                return RelayResult()
            return self._publish(self._reader.read(None, after=0), lambda: None)[0]

    def _publish_scans(self, shard: int, scan: Scan) -> tuple[RelayResult, Watermark]:
        """Publish the batch of a scan and the batches after it, MAX_BATCHES at most.

        While a full batch is sent, the next one is prefetched (docs/adr/0015).

        Returns:
            The sum of their results, and the watermark to keep when they are committed.
        """
        total = RelayResult()
        until = time.monotonic() + _BEGIN_SECONDS
        for left in reversed(range(MAX_BATCHES)):
            is_full = len(scan.batch.messages) == self._options.batch_size
            goes_on = left > 0 and is_full and time.monotonic() < until
            result, prefetched = self._publish(
                scan.batch,
                partial(self._reader.prefetch, shard, scan) if goes_on else lambda: None,
            )
            total += result
            if prefetched is None or time.monotonic() >= until:
                break
            scan = prefetched
        return total, scan.moved_watermark() if result.is_complete else scan.watermark

    def _publish(
        self, batch: RelayBatch, prefetch: Callable[[], Scan | None]
    ) -> tuple[RelayResult, Scan | None]:
        """Publish a batch within the transaction, park and back off what failed.

        Returns:
            Its result, and the prefetched scan; None if it may not follow.
        """
        if not batch.messages:
            return RelayResult(is_blocked=batch.is_blocked), None
        answers, prefetched = self._sender.send(batch, prefetch)
        for failure in answers.unsendable:
            park(failure)
        self._backoff.back_off(answers.failed, answers.delivered_topics)
        result = RelayResult(
            claimed=len(batch.messages),
            published=len(answers.published),
            parked=len(answers.unsendable),
            error=answers.error,
            is_blocked=batch.is_blocked or bool(answers.failed),
        )
        return result, prefetched


def _try_lock(shard: int | None) -> bool:
    """Lock a shard, or all of them for None; return False if another relay has the lock.

    The same statement restricts the transaction to index scans, except for all shards: their
    order by id needs a sort.
    """
    exclusive = "pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
    shared = "pg_try_advisory_xact_lock_shared(hashtextextended(%s, 0))"
    with connection.cursor() as cursor:
        if shard is None:
            cursor.execute(f"SELECT {exclusive}", [_LOCK])
        else:
            cursor.execute(
                f"SELECT {INDEX_SCANS_ONLY}, {shared} AND {exclusive}",
                [_LOCK, f"{_LOCK}:{shard}"],
            )
        return bool(cursor.fetchone()[-1])
