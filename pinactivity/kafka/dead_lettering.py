"""What a consumer does with poison: it dead-letters it, up to a limit in a row."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from pinactivity.kafka.dead_letter_topics import make_dead_letter
from pinactivity.kafka.entry import Entry, State
from pinactivity.kafka.producer import Publisher
from pinactivity.kafka.spec import ConsumerSpec, SlowDown
from pinactivity.telemetry import metrics

log = structlog.get_logger(__name__)


class PoisonLimitReached(Exception):
    """Too many poison messages in a row: a bad deploy, not bad data."""

    def __init__(self, spec: ConsumerSpec, limit: int) -> None:
        super().__init__(
            f"{spec.name}: more than {limit} poison messages in a row. Their offsets"
            f" are not all committed, so what follows is read again, and written once. See what"
            f" they are (manage.py dead_letters list), correct the producer or this consumer, then"
            f" start it again."
        )


class DeadLettersRefused(SlowDown):
    """The dead-letter topic did not acknowledge a record: the offsets do not move.

    Args:
        code: Of the broker's refusal.
    """

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


class DeadLettering:
    """Dead-letters the poison of one consumer.

    Args:
        limit: More poison messages in a row end the consumer; 0 is none.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        *,
        publisher: Publisher,
        limit: int,
        fed_metrics: Sequence[metrics.ConsumerMetrics],
    ) -> None:
        self._spec = spec
        self._publisher = publisher
        self._limit = limit
        self._metrics = fed_metrics
        self._in_a_row = 0

    def find_limit(self, entries: Iterable[Entry[Any]]) -> int | None:
        """Return the index of the first message past the limit; None while it is not reached."""
        return find_limit(entries, in_a_row=self._in_a_row, limit=self._limit)

    def publish(self, entries: Iterable[Entry[Any]]) -> None:
        """Dead-letter what is poison and not acknowledged yet.

        Raises:
            DeadLettersRefused: some were not acknowledged. They remain poison.
        """
        poison = [entry for entry in entries if entry.state is State.POISON]
        if not poison:
            return
        at = datetime.now(UTC)
        answers = self._publisher.publish(
            [
                make_dead_letter(entry.record, group=self._spec.group, reason=entry.reason, at=at)
                for entry in poison
            ]
        )
        for entry, refusal in zip(poison, answers, strict=True):
            if refusal is None:
                entry.state = State.DEAD_LETTERED
                self._report(entry)
        refused = [refusal for refusal in answers if refusal is not None]
        if refused:
            raise DeadLettersRefused(refused[0].code)

    def count_committed(self, entries: Sequence[Entry[Any]]) -> None:
        """Count on from a batch that is committed."""
        self._in_a_row = count_poison_at_end(entries, in_a_row=self._in_a_row)

    def make_limit_error(self) -> PoisonLimitReached:
        return PoisonLimitReached(self._spec, self._limit)

    def close(self) -> None:
        self._publisher.close()

    def _report(self, entry: Entry[Any]) -> None:
        for each in self._metrics:
            each.dead_lettered.labels(self._spec.group, entry.reason).inc()
        record = entry.record
        log.error(
            "skipped-poison",
            group=self._spec.group,
            reason=entry.reason,
            SourceEventId=str(record.message_id) if record.is_decoded else None,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
        )


def find_limit(entries: Iterable[Entry[Any]], *, in_a_row: int, limit: int) -> int | None:
    """Return the index of the first message past the limit.

    Args:
        in_a_row: Poison messages right before these.
        limit: Of poison messages in a row; 0 is none. A tombstone neither counts nor ends a row.
    """
    for index, entry in enumerate(entries):
        if entry.is_poison:
            in_a_row += 1
        elif not entry.record.is_tombstone:
            in_a_row = 0
        if 0 < limit < in_a_row:
            return index
    return None


def count_poison_at_end(entries: Sequence[Entry[Any]], *, in_a_row: int) -> int:
    """Return how many messages up to the last are poison, in a row; tombstones do not count."""
    at_end = 0
    for entry in reversed(entries):
        if entry.is_poison:
            at_end += 1
        elif not entry.record.is_tombstone:
            return at_end
    return in_a_row + at_end
