"""What the relay sends next: it scans a shard for a batch, and prefetches the one after it."""

import time
from dataclasses import dataclass

import structlog
from django.db import transaction

from outbox.backoff import MAX_PENDING_RETRIES, Retry, exclude_blocked, find_retries
from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.pending_messages import PendingMessage, fetch_messages
from outbox.watermark import Watermark, find_writers
from pinactivity.core.error_info import describe_error

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RelayBatch:
    """Messages to send together."""

    messages: list[PendingMessage]
    """In the order of ids."""
    last_new_id: int | None
    """The highest id of a message that was not tried before; None if there is none."""
    sent_singly: frozenset[int]
    """Ids of messages that Kafka refused before. For one bad message Kafka refuses all of its
    partition in a request, so each of these is sent in a request of its own."""
    is_blocked: bool
    """Messages were left out: others are backing off, or there are too many retries."""
    read_at: float
    """Seconds by the monotonic clock, just before the read."""


@dataclass(frozen=True, slots=True)
class Scan:
    """A batch, and what it does to the watermark."""

    batch: RelayBatch
    watermark: Watermark
    """As of the beginning of this scan."""
    was_full: bool
    """It started at the first message, not at the watermark."""
    seconds: float
    """How long it took."""

    def moved_watermark(self) -> Watermark:
        """Return the watermark once every message of the batch was sent or parked."""
        return self.watermark.end_scan(
            self.batch.last_new_id,
            seconds=self.seconds,
            was_full=self.was_full,
            now=time.monotonic(),
        )


class BatchReader:
    """Reads batches, each in the relay's transaction and behind its advisory lock."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options

    def scan(self, shard: int, watermark: Watermark) -> Scan | None:
        """Read the batch behind a shard's watermark.

        The check for another layout follows the read, so that it sees whatever was committed
        before what the read returned.

        Returns:
            None if messages of another layout of shards are pending: these are sent first.
        """
        began = time.monotonic()
        begun = watermark.begin_scan(find_writers())
        after = begun.scan_start(began)
        batch = self.read(shard, after)
        others = OutboxMessage.objects.outside(self._options.shard_numbers)
        if any(messages.exists() for messages in others):
            return None
        return Scan(batch, begun, was_full=after == 0, seconds=time.monotonic() - began)

    def prefetch(self, shard: int, previous: Scan) -> Scan | None:
        """Read the batch after `previous`, whose acknowledgements are still awaited.

        Returns:
            None also if the read fails, so that the error does not undo what was sent. The next
            transaction meets the error again, before it sends anything.
        """
        is_blocked = previous.batch.is_blocked
        watermark = previous.watermark if is_blocked else previous.moved_watermark()
        try:
            with transaction.atomic():
                return self.scan(shard, watermark)
        except Exception as exc:  # of any kind: the cause may be in a row
            log.warning("prefetch failed", **describe_error(exc))
            return None

    def read(self, shard: int | None, after: int) -> RelayBatch:
        """Read the oldest messages that nothing blocks.

        1. Retry times are in the rows, so that all relays keep to them. A message whose retry
           time has not come blocks its key, or its topic (docs/adr/0010).
        2. Messages whose retry time has come go first into the batch, then new ones.
        3. The batch is sorted by id, so that a retried message precedes what is new of its key.

        Args:
            shard: None reads all shards.
            after: New messages have a higher id.
        """
        read_at = time.monotonic()
        messages, order = OutboxMessage.objects.all(), ["id"]
        if shard is not None:  # the order of the indexes
            messages, order = messages.filter(shard=shard), ["shard", "id"]
        retries = find_retries(messages, order)
        backing_off = [retry for retry in retries if not retry.is_due]
        due, room = _divide_batch(retries, self._options.batch_size)
        sendable = exclude_blocked(messages, backing_off)
        new = fetch_messages(sendable.fresh().filter(id__gt=after).order_by(*order), room)
        retried = fetch_messages(sendable.filter(id__in=due), len(due))
        return RelayBatch(
            messages=sorted(retried + new) if retried else new,
            last_new_id=new[-1].id if new else None,
            sent_singly=frozenset(each.id for each in retries if each.is_due and each.attempts),
            is_blocked=bool(backing_off) or not room,
            read_at=read_at,
        )


def _divide_batch(retries: list[Retry], batch_size: int) -> tuple[list[int], int]:
    """Return the ids of the retries that a batch takes, and how many new messages it takes."""
    due = [retry.id for retry in retries if retry.is_due][:batch_size]
    return due, batch_size - len(due) if len(retries) < MAX_PENDING_RETRIES else 0
