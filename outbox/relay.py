"""The relay: the outbox to Kafka, at least once, in order within a key (design, section 9)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from django.db import connection, transaction
from django.db.models import F

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from pinactivity import metrics
from pinactivity.clock import statement_time
from pinactivity.kafka.producer import DeliveryFault, Message, Publisher
from pinactivity.times import iso_utc

log = structlog.get_logger(__name__)

_LOCK = "Pin:lock:outbox-relay"


@dataclass(frozen=True, slots=True)
class RelayResult:
    """What one batch came to."""

    claimed: int = 0
    published: int = 0
    parked: int = 0
    fault: str | None = None
    """The class of the broker's fault, which ended the batch early."""

    @property
    def is_drained(self) -> bool:
        """Nothing to go on with at once: all is sent, another relay works, or Kafka is away."""
        return self.claimed == 0 or self.fault is not None


class OutboxRelay:
    """Publishes pending messages.

    Args:
        publisher: Where to.
        options: Validated at start.
    """

    def __init__(self, *, publisher: Publisher, options: OutboxOptions) -> None:
        self._publisher = publisher
        self._options = options

    def run(self, stop: Callable[[], bool] = lambda: False) -> RelayResult:
        """Publish batches until nothing is pending, Kafka faults, or `stop`; sum them up."""
        total = RelayResult()
        while not stop():
            batch = self.run_once()
            total = RelayResult(
                total.claimed + batch.claimed,
                total.published + batch.published,
                total.parked + batch.parked,
                batch.fault,
            )
            if batch.is_drained:
                break
        return total

    def run_once(self) -> RelayResult:
        """Publish one batch.

        1. Take the relay's advisory lock for the transaction, or leave: one relay at a time
           keeps the order within a key, where SKIP LOCKED would not.
        2. Read the oldest pending messages, in a statement of its own: after the lock, so
           that it sees what the relay before has marked.
        3. Publish, and mark exactly what Kafka acknowledged. A message that is itself at
           fault is parked with its reason.

        The network is called inside the transaction, which holds no row lock of sessions or
        views, only the relay's own advisory lock; the publisher bounds the time.
        """
        with transaction.atomic():
            if not _try_lock():
                return RelayResult()
            rows = list(
                OutboxMessage.objects.due(shard=0).only(
                    "message_id", "topic", "key", "headers", "payload", "created_at"
                )[: self._options.batch_size]
            )
            if not rows:
                return RelayResult()
            published: list[OutboxMessage] = []
            parked: list[tuple[OutboxMessage, DeliveryFault]] = []
            fault: str | None = None
            stuck: set[str] = set()
            for wave in _waves(rows):
                # What a key's later message would overtake must not stay behind.
                sendable = [row for row in wave if row.key not in stuck]
                faults = self._publisher.publish([_to_message(row) for row in sendable])
                for row, delivery in zip(sendable, faults, strict=True):
                    if delivery is None:
                        published.append(row)
                    elif delivery.message_at_fault:
                        parked.append((row, delivery))
                    else:
                        stuck.add(row.key)
                        fault = delivery.code
            answered_at = statement_time()
            OutboxMessage.objects.filter(id__in=[row.id for row in published]).update(
                published_at=answered_at
            )
            for row, delivery in parked:
                _park(row, delivery, answered_at)
        _report(published, fault, answered_at)
        return RelayResult(len(rows), len(published), len(parked), fault)


def _try_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [_LOCK])
        return bool(cursor.fetchone()[0])


def _waves(rows: Sequence[OutboxMessage]) -> Iterator[list[OutboxMessage]]:
    """Split a batch so that a message goes out only after its key's earlier one is answered for.

    Otherwise the first could fail and the second arrive, and the order of the key is lost.
    """
    rest = list(rows)
    while rest:
        keys: set[str] = set()
        wave: list[OutboxMessage] = []
        later: list[OutboxMessage] = []
        for row in rest:
            (later if row.key in keys else wave).append(row)
            keys.add(row.key)
        yield wave
        rest = later


def _to_message(row: OutboxMessage) -> Message:
    headers = {
        "MessageId": str(row.message_id),
        **json.loads(row.headers),
        "CreatedAt": iso_utc(row.created_at),
    }
    return Message(
        topic=row.topic,
        key=row.key.encode(),
        value=row.payload.encode(),
        headers=tuple((name, value.encode()) for name, value in headers.items()),
    )


def _park(row: OutboxMessage, fault: DeliveryFault, parked_at: datetime) -> None:
    OutboxMessage.objects.filter(id=row.id).update(
        parked_at=parked_at, attempts=F("attempts") + 1, last_error=fault.code
    )
    log.error(
        "message parked", messageId=str(row.message_id), topic=row.topic, errorClass=fault.code
    )


def _report(published: Sequence[OutboxMessage], fault: str | None, answered_at: datetime) -> None:
    metrics.OUTBOX_PUBLISHED.inc(len(published))
    for row in published:
        metrics.OUTBOX_PUBLISH_LATENCY.observe((answered_at - row.created_at).total_seconds())
    if fault:
        metrics.OUTBOX_ERRORS.labels(fault).inc()
        log.warning("broker fault", errorClass=fault, published=len(published))
