"""Sends a batch to Kafka, and marks as published what Kafka acknowledged."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import structlog
from django.db import connection, transaction

from outbox.backoff import Failure
from outbox.batch_reader import RelayBatch
from outbox.pending_messages import PendingMessage
from pinactivity.kafka.producer import DeliveryError, Publisher
from pinactivity.telemetry import metrics

log = structlog.get_logger(__name__)

Prefetched = TypeVar("Prefetched")


@dataclass(frozen=True, slots=True)
class Acknowledgements:
    """How Kafka answered a batch. A message that is in no list was not sent: it stays pending."""

    published: list[PendingMessage] = field(default_factory=list)
    unsendable: list[Failure] = field(default_factory=list)
    """Sending these again cannot help."""
    failed: list[Failure] = field(default_factory=list)
    """Of these it can."""

    def add(
        self, messages: Sequence[PendingMessage], errors: Sequence[DeliveryError | None]
    ) -> None:
        """Add the answer to each message of a request."""
        if not any(errors):
            self.published.extend(messages)
            return
        for message, error in zip(messages, errors, strict=True):
            if error is None:
                self.published.append(message)
            elif error.is_permanent:
                self.unsendable.append(Failure(message, error))
            else:
                self.failed.append(Failure(message, error))

    @property
    def error(self) -> str | None:
        """The class of the last error that was not a message's own."""
        return self.failed[-1].error.code if self.failed else None

    @property
    def delivered_topics(self) -> set[str]:
        return {message.topic for message in self.published}


class Sender:
    """Sends batches, one at a time, on a thread of its own.

    Args:
        publisher: Where to.
        delivery_timeout: After so long a batch sends nothing more.
    """

    def __init__(self, publisher: Publisher, *, delivery_timeout: timedelta) -> None:
        self._publisher = publisher
        self._seconds = delivery_timeout.total_seconds()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox-send")

    def send(
        self, batch: RelayBatch, while_waiting: Callable[[], Prefetched | None]
    ) -> tuple[Acknowledgements, Prefetched | None]:
        """Send a batch and mark what Kafka acknowledged, within the caller's transaction.

        1. A thread sends the batch. Meanwhile this one marks all of it as published, in a
           savepoint, then calls `while_waiting`. Nobody sees a mark before the commit.
        2. Unless Kafka acknowledged the whole batch, the savepoint is rolled back, exactly the
           acknowledged messages are marked, and the result of `while_waiting` is dropped.

        Args:
            batch: One message at least.
            while_waiting: Uses the same connection, and sees the marks.

        Returns:
            Kafka's answers, and what `while_waiting` returned.
        """
        with transaction.atomic():
            sending = self._thread.submit(self._publish, batch)
            try:
                _mark_published(batch.messages)
                prefetched = while_waiting()
            finally:
                wait([sending])  # nothing may be in flight when the transaction ends its lock
            answers = sending.result()
            is_marked = len(answers.published) == len(batch.messages)
            transaction.set_rollback(not is_marked)
        seconds = time.monotonic() - batch.read_at
        if not is_marked:
            prefetched = None
            _mark_published(answers.published)
        _record(answers, seconds)
        return answers, prefetched

    def _publish(self, batch: RelayBatch) -> Acknowledgements:
        """Send a batch in waves. Runs in the thread, which uses no database connection."""
        answers = Acknowledgements()
        end = time.monotonic() + self._seconds
        for wave in split_waves(batch.messages, batch.sent_singly):
            # A key's later message stays behind when an earlier one has failed.
            failed = {failure.pending.key for failure in answers.failed}
            sendable = [each for each in wave if each.key not in failed] if failed else wave
            if not sendable:
                continue
            answers.add(sendable, self._publisher.publish([each.message for each in sendable]))
            if time.monotonic() > end or (answers.failed and not answers.published):
                break  # the rest stays pending, and the next scan reads it again
        return answers


def split_waves(
    messages: list[PendingMessage], sent_singly: frozenset[int]
) -> Iterator[list[PendingMessage]]:
    """Split a batch into waves, each of which has a key at most once.

    A wave is sent when the one before is answered. In one request the first message of a key
    could fail while the second arrives, and the order within the key would be lost.

    Args:
        messages: In the order of ids.
        sent_singly: Ids of messages that get a wave of their own.
    """
    if not sent_singly and len({each.key for each in messages}) == len(messages):
        yield messages
        return
    rest = messages
    while rest:
        keys: set[bytes | None] = set()
        wave: list[PendingMessage] = []
        single: list[PendingMessage] = []
        later: list[PendingMessage] = []
        for each in rest:
            if each.key in keys:
                later.append(each)
            else:
                (single if each.id in sent_singly else wave).append(each)
                keys.add(each.key)
        yield wave
        yield from ([each] for each in single)
        rest = later


def _mark_published(messages: Sequence[PendingMessage]) -> None:
    # Raw SQL with the ids as one text: binding a thousand parameters takes time from Python,
    # whose other thread is sending.
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE outbox_messages SET published_at = statement_timestamp(),"
            " next_attempt_at = NULL WHERE id = ANY(%s::bigint[])",
            [f"{{{','.join([str(message.id) for message in messages])}}}"],
        )


def _record(answers: Acknowledgements, seconds: float) -> None:
    """Feed the metrics, and log the errors.

    Args:
        seconds: From the read of the batch to its answers.
    """
    published = answers.published
    metrics.OUTBOX_PUBLISHED.inc(len(published))
    metrics.OUTBOX_PUBLISH_LATENCY.observe_all([message.age + seconds for message in published])
    for code in {failure.error.code for failure in answers.failed}:
        metrics.OUTBOX_ERRORS.labels(code).inc()
        log.warning("delivery failed", errorClass=code, published=len(published))
