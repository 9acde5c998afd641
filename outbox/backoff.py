"""When a message that failed is sent again, and what it blocks until then (docs/adr/0010)."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import structlog
from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Now

from outbox.models import OutboxMessage, OutboxMessageQuerySet
from outbox.pending_messages import PendingMessage
from pinactivity.kafka.producer import DeliveryError, ProbingPublisher

log = structlog.get_logger(__name__)

MAX_PENDING_RETRIES = 1000
"""Messages of a shard with a retry time. With so many the relay begins nothing new."""
_MAX_DELAY_SECONDS = 60.0
"""The first delay is one second; each that follows is twice as long."""


class Failure(NamedTuple):
    """A message that Kafka did not acknowledge, and why."""

    pending: PendingMessage
    error: DeliveryError


class Retry(NamedTuple):
    """A message with a retry time."""

    id: int
    topic: str
    key: str
    attempts: int
    """Failures of the message itself; 0 means that the whole topic failed."""
    is_due: bool
    """The retry time has come. Until then the message is backing off."""


# -- decisions -----------------------------------------------------------------------------


def retry_delay(failures: int) -> timedelta:
    """Return how long to back off after one more failure.

    Args:
        failures: In a row, before this one.
    """
    return timedelta(seconds=min(2.0 ** min(failures, 10), _MAX_DELAY_SECONDS))


def is_own_failure(failure: Failure, delivered_topics: Collection[str]) -> bool:
    """Decide whether the error is the message's own, not its topic's or the broker's.

    The broker refused it, and acknowledged others of its topic.
    """
    return failure.error.was_refused and failure.pending.topic in delivered_topics


def first_of_each_topic(failures: Sequence[Failure]) -> Iterator[Failure]:
    """Yield the first failure of each topic: that one message blocks the topic for all."""
    topics: set[str] = set()
    for failure in failures:
        if failure.pending.topic not in topics:
            topics.add(failure.pending.topic)
            yield failure


# -- effects, within the transaction of the relay ------------------------------------------


def find_retries(messages: OutboxMessageQuerySet, order: Sequence[str]) -> list[Retry]:
    """Return the messages with a retry time, at most MAX_PENDING_RETRIES."""
    rows = (
        messages.to_retry()
        .annotate(is_due=Q(next_attempt_at__lte=Now()))
        .order_by(*order)
        .values_list(*Retry._fields)[:MAX_PENDING_RETRIES]
    )
    return [Retry(*row) for row in rows]


def exclude_blocked(
    messages: OutboxMessageQuerySet, backing_off: Sequence[Retry]
) -> OutboxMessageQuerySet:
    """Leave out what messages that are backing off block.

    1. Each blocks its key.
    2. One without attempts blocks its topic.
    3. What is pending in a blocked topic blocks the later messages of its key in other topics.
    """
    if not backing_off:
        return messages
    messages = messages.exclude(key__in={retry.key for retry in backing_off})
    topics = {retry.topic for retry in backing_off if retry.attempts == 0}
    if topics:
        earlier = OutboxMessage.objects.pending().filter(
            key=OuterRef("key"), topic__in=topics, id__lt=OuterRef("id")
        )
        messages = messages.exclude(topic__in=topics).filter(~Exists(earlier))
    return messages


def park(failure: Failure) -> None:
    """Set a message aside that can never be sent, until a person redrives it."""
    pending, code = failure.pending, failure.error.code
    OutboxMessage.objects.filter(id=pending.id).update(
        parked_at=Now(),
        next_attempt_at=None,
        attempts=F("attempts") + 1,
        last_error=code,
    )
    log.error("message parked", messageId=pending.message_id, topic=pending.topic, errorClass=code)


class Backoff:
    """Writes retry times, which all relays keep to; counts the failures of topics in memory.

    Args:
        publisher: Answers whether the broker is reachable.
    """

    def __init__(self, publisher: ProbingPublisher) -> None:
        self._publisher = publisher
        self._failures_in_a_row: Counter[str] = Counter()
        """By topic."""
        self._was_unreachable = True  # not known yet: the first answer ends what is left over

    def back_off(self, failures: Sequence[Failure], delivered_topics: Collection[str]) -> None:
        """Set the retry times of failed messages.

        A message that fails by itself backs off alone, and that counts as an attempt. For
        everything else the first message of the topic backs off, and blocks the topic.

        Args:
            failures: Of one batch.
            delivered_topics: Those of which Kafka acknowledged a message of the same batch.
        """
        for topic in delivered_topics:
            self._failures_in_a_row.pop(topic, None)
        own = [each for each in failures if is_own_failure(each, delivered_topics)]
        for failure in own:
            self._back_off_message(failure)
        others = [each for each in failures if not is_own_failure(each, delivered_topics)]
        for failure in first_of_each_topic(others):
            self._back_off_topic(failure)

    def end_if_broker_is_back(self) -> bool:
        """Make what backs off for the broker due, if the broker is reachable again.

        Without this the relay would notice only at the retry time, up to a minute later.

        Returns:
            Whether the broker is back since the last call.
        """
        is_reachable = self._publisher.is_reachable()
        is_back = self._was_unreachable and is_reachable
        self._was_unreachable = not is_reachable
        if is_back:
            self._failures_in_a_row.clear()
            OutboxMessage.objects.to_retry().filter(attempts=0).retry_now()
        return is_back

    def _back_off_message(self, failure: Failure) -> None:
        row = OutboxMessage.objects.filter(id=failure.pending.id)
        attempts = row.values_list("attempts", flat=True).get()
        row.update(
            attempts=attempts + 1,
            next_attempt_at=Now() + retry_delay(attempts),
            last_error=failure.error.code,
        )

    def _back_off_topic(self, failure: Failure) -> None:
        topic = failure.pending.topic
        OutboxMessage.objects.filter(id=failure.pending.id).update(
            attempts=0,
            next_attempt_at=Now() + retry_delay(self._failures_in_a_row[topic]),
            last_error=failure.error.code,
        )
        self._failures_in_a_row[topic] += 1
