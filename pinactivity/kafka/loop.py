"""The loop of every consumer: poll -> decode -> flush -> commit (design, section 10).

Delivery is at least once: an offset is committed last, when everything before it was written
by the handler or acknowledged by the dead-letter topic. Handlers are therefore idempotent.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from django.db import connections
from kafka.errors import KafkaError

from pinactivity.core.error_info import describe_error
from pinactivity.kafka.buffer import Batch
from pinactivity.kafka.dead_lettering import DeadLettering, DeadLettersRefused
from pinactivity.kafka.entry import Entry, State
from pinactivity.kafka.envelope import read_envelope
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.producer import Publisher
from pinactivity.kafka.record import Partition, Poison, Record
from pinactivity.kafka.source import CommitRefused, Source
from pinactivity.kafka.spec import ConsumerSpec, Handler, SinkUnavailable, SlowDown
from pinactivity.kafka.writing import EntryWriter, Unfinished
from pinactivity.telemetry import metrics, tracing

log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.5
"""Of one poll: how late a stop, or a rebalance before which to flush, may be noticed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop came to."""

    polled: int = 0
    committed: int = 0
    """Messages whose offsets moved."""
    dropped: int = 0
    """Messages of partitions that went to another member: it reads them again."""
    error: str | None = None
    """The class of the exception for which the batch waits."""


class Consumer:
    """One member of one consumer's group.

    Args:
        spec: What to do.
        open_source: Joins the group; tried again while the broker is away.
        publisher: Of dead-letter records. Closed with the loop.
        options: Validated at start.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        *,
        open_source: Callable[[], Source],
        publisher: Publisher,
        options: ConsumerOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._open_source = open_source
        self._options = options
        self._clock = clock
        self._metrics = (metrics.CONSUMER, *spec.extra_metrics)
        self._dead_lettering = DeadLettering(
            spec, publisher=publisher, limit=options.poison_limit, fed_metrics=self._metrics
        )
        self._handler: Handler[Any] | None = None
        self._source: Source | None = None
        self._batch: Batch[Entry[Any]] = Batch(spec.limits(), clock=clock)
        self._prefetched: Batch[Entry[Any]] = Batch(spec.limits(), clock=clock)
        """The next batch, as far as it was read while the handler waited."""
        self._prefetch_error: Exception | None = None
        self._polled = self._dropped = 0
        self._limit_reached = False
        self._failures = 0
        self._retry_at: float | None = None
        self._error: str | None = None
        self._progress_at = clock()
        for each in self._metrics:
            each.oldest_unstored.labels(spec.group).set_function(self._oldest_seconds)

    # -- what health and metrics ask, from other threads -----------------------------------

    @property
    def silent_seconds(self) -> float:
        """How long ago a poll last came back or a batch was last flushed."""
        return self._clock() - self._progress_at

    @property
    def waits_for(self) -> str | None:
        """The class of the exception after which the consumer backs off; None while it works."""
        return self._error

    @property
    def unstored(self) -> int:
        """How many messages were read and are not committed yet."""
        return len(self._batch) + len(self._prefetched)

    def _oldest_seconds(self) -> float:
        """The age by header CreatedAt of the oldest message read but not committed, else 0."""
        records = [entry.record for entry in (*self._batch, *self._prefetched)]
        if not records:
            return 0.0
        oldest: datetime = min(
            record.created_at if record.is_decoded else record.broker_time for record in records
        )
        return max((datetime.now(UTC) - oldest).total_seconds(), 0.0)

    # -- the loop --------------------------------------------------------------------------

    def run(self, stop: Callable[[], bool]) -> None:
        """Consume until `stop`; then flush, commit and leave the group.

        Raises:
            PoisonLimitReached: see `ConsumerOptions.poison_limit`.
        """
        try:
            while not stop():
                try:
                    self.run_once()
                except (KafkaError, OSError, SinkUnavailable) as exc:
                    self._rejoin_later(exc, stop)
            if self._retry_at is None and not self._batch.is_empty:
                self._flush()
        finally:
            self.close()

    def run_once(self) -> Turn:
        """Take one turn: poll, and flush if it is time.

        1. Flush first if the poll would give partitions up. The member that gets them reads
           again what is not committed.
        2. Poll, also while a batch backs off, with everything paused: the membership must
           survive. A poll may bring messages of new partitions in spite of the pause; they stay.
        3. Drop what belongs to partitions that went, then add what the poll brought.
        4. Flush when the batch is ready, or at its retry. While the handler waits, 2 and 3
           happen for the next batch. If that fills it, the next turn begins with 4.

        Raises:
            KafkaError, OSError: the broker is away.
            SinkUnavailable: the handler could not be made.
            PoisonLimitReached: see `ConsumerOptions.poison_limit`.
        """
        source = self._open()
        committed = self._polled = self._dropped = 0
        if self._retry_at is None and not self._batch.is_empty and source.is_rebalance_due():
            committed += self._flush()
        if self._retry_at is not None:
            source.pause()
        if self._retry_at is not None or not self._batch.is_ready:
            self._read(self._batch, seconds=self._poll_seconds())
        if self._retry_at is not None:
            if self._batch.is_empty:
                self._end_backoff()
                self._end_at_limit()
            elif self._clock() >= self._retry_at:
                committed += self._flush()
        elif self._batch.is_ready:
            committed += self._flush(prefetch=not self.spec.one_by_one)
            if self._prefetch_error is not None:
                error, self._prefetch_error = self._prefetch_error, None
                raise error
        return Turn(self._polled, committed, self._dropped, self._error)

    def close(self) -> None:
        """Leave the group and close every connection; what is not committed comes again."""
        for each in self._metrics:
            each.oldest_unstored.remove(self.spec.group)
        for part in (self._source, self._handler, self._dead_lettering):
            if part is not None:
                part.close()
        connections.close_all()

    def _open(self) -> Source:
        """Make the handler, in the thread that uses it, and join the group, where not done yet."""
        if self._handler is None:
            try:
                self._handler = self.spec.handler()
            except Exception as exc:  # its client may connect at once, to a server that is away
                raise SinkUnavailable from exc
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _poll_seconds(self) -> float:
        if self._retry_at is not None:
            return min(_POLL_SECONDS, max(self._retry_at - self._clock(), 0.0))
        if self._batch.is_empty:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, self._batch.seconds_left)

    # -- poll and decode -------------------------------------------------------------------

    def _read(self, batch: Batch[Entry[Any]], *, seconds: float) -> None:
        """Poll, drop what belongs to partitions that went, and add what the poll brought.

        At the poison limit nothing is added: the offsets must not pass the limit.
        """
        source = self._opened_source
        records = source.poll(seconds=seconds, most=max(batch.room, 1))
        self._progress_at = self._clock()
        self._drop(source.take_revoked())
        metrics.CONSUMER_CONSUMED.labels(self.spec.group).inc(len(records))
        # Reading the trace takes as long as the decoding, and mostly nobody reads the spans.
        traced = self.spec.one_by_one or tracing.are_spans_sent()
        for record in records if not self._limit_reached else ():
            batch.append(self._decode(record, traced=traced))
        self._polled += len(records)
        metrics.CONSUMER_LAG.labels(self.spec.group).set(source.lag())

    def _drop(self, revoked: set[Partition]) -> None:
        if not revoked:
            return
        dropped = self._batch.keep(lambda entry: entry.record.topic_partition not in revoked)
        log.info("partitions gone", group=self.spec.group, partitions=len(revoked), rows=dropped)
        self._dropped += dropped

    def _decode(self, record: Record, *, traced: bool) -> Entry[Any]:
        entry: Entry[Any] = Entry(record, None)
        if record.is_tombstone:
            metrics.CONSUMER_TOMBSTONES.labels(self.spec.group).inc()
            entry.state = State.SKIPPED
            return entry
        try:
            read_envelope(record)
            if traced:
                with tracing.continued_span(
                    "consume", record.text_headers, self._span_attributes(record)
                ) as context:
                    entry.context = context
                    entry.row = self._made_handler.decode(record)
            else:
                entry.row = self._made_handler.decode(record)
        except Poison as exc:
            entry.mark_as_poison(exc.reason)
        except Exception as exc:  # a message must not end the loop, whatever the handler raises
            log.error("failed", group=self.spec.group, **describe_error(exc), exc_info=exc)
            entry.mark_as_poison("handler-error")
        else:
            if entry.row is None:
                entry.state = State.SKIPPED
        return entry

    @property
    def _opened_source(self) -> Source:
        assert self._source is not None  # each turn begins with `_open`
        return self._source

    @property
    def _made_handler(self) -> Handler[Any]:
        assert self._handler is not None  # each turn begins with `_open`
        return self._handler

    def _span_attributes(self, record: Record) -> dict[str, str | int]:
        return {
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": record.partition,
            "messaging.kafka.message.offset": record.offset,
            "messaging.consumer.group.name": self.spec.group,
        }

    # -- flush: write, dead-letter, commit -------------------------------------------------

    def _flush(self, *, prefetch: bool = False) -> int:
        """Do what is left to do with the batch; return how many messages were committed.

        Each step remembers what it has done, so that a retry does the rest only:
        1. write the rows by the handler, which may prefetch the next batch while it waits;
        2. dead-letter the poison, and drop what lies past the limit in a row;
        3. commit.

        After an exception the batch stays for a later turn, and grows by what was prefetched.

        Raises:
            PoisonLimitReached: after what came before was committed.
        """
        try:
            self._write(while_waiting=self._prefetch if prefetch else _do_nothing)
            self._dead_letter()
            self._commit()
        except Unfinished:
            self._join_prefetched()
            self._retry_at = self._clock()
            return 0
        except Exception as exc:  # of storage, dead-letter topic or broker: back off
            self._join_prefetched()
            self._back_off(exc)
            return 0
        finally:
            self._progress_at = self._clock()
        size = len(self._batch)
        self._batch.clear()
        self._batch, self._prefetched = self._prefetched, self._batch
        self._failures = 0
        self._end_backoff()
        self._end_at_limit()
        return size

    def _write(self, *, while_waiting: Callable[[], None]) -> None:
        writer = EntryWriter(
            self.spec, self._made_handler, clock=self._clock, fed_metrics=self._metrics
        )
        writer.write(tuple(self._batch), while_waiting)

    def _prefetch(self) -> None:
        """Read the next batch while the handler waits.

        The poll may give partitions up, as any poll may. What is being written of them is then
        not committed, and their next member reads it again. When a rebalance is known to come,
        nothing is prefetched. An exception of the broker must not fail the writing: the turn
        raises it at its end.
        """
        if self._prefetch_error is not None or not self._prefetched.is_empty:
            return
        try:
            if not self._opened_source.is_rebalance_due():
                self._read(self._prefetched, seconds=0)
        except Exception as exc:
            self._prefetch_error = exc

    def _join_prefetched(self) -> None:
        """Append what was prefetched to the batch that stays.

        A poll may bring more in spite of the pause, and the offsets must not pass what was
        prefetched. Nor must they pass the poison limit.
        """
        for entry in self._prefetched if not self._limit_reached else ():
            self._batch.append(entry)
        self._prefetched.clear()

    def _dead_letter(self) -> None:
        if not any(entry.state is State.POISON for entry in self._batch):
            return
        limit = self._dead_lettering.find_limit(self._batch)
        if limit is not None:
            self._batch.truncate(limit)
            self._limit_reached = True
        self._dead_lettering.publish(self._batch)

    def _end_at_limit(self) -> None:
        if self._limit_reached:
            raise self._dead_lettering.make_limit_error()

    def _commit(self) -> None:
        if self._batch.is_empty:
            return
        entries = tuple(self._batch)
        records = [entry.record for entry in entries]
        first = {record.topic_partition: record.offset for record in reversed(records)}
        following = {record.topic_partition: record.offset + 1 for record in records}
        self._opened_source.commit(following)
        self._dead_lettering.count_committed(entries)
        log.info(
            "consumed",
            group=self.spec.group,
            batchSize=len(entries),
            offsets={
                f"{topic}/{number}": f"{first[topic, number]}-{end - 1}"
                for (topic, number), end in following.items()
            },
        )

    # -- backing off -----------------------------------------------------------------------

    def _back_off(self, error: Exception) -> None:
        """Keep the batch, and retry it after a delay that doubles with each failure."""
        seconds = min(
            self._options.first_wait.total_seconds() * 2 ** min(self._failures, 30),
            self._options.longest_wait.total_seconds(),
        )
        self._failures += 1
        self._retry_at = self._clock() + seconds
        self._error = type(error).__qualname__
        for each in self._metrics:
            each.retries.labels(self.spec.group).inc()
        (log.warning if _is_expected(error) else log.error)(
            "failed",
            group=self.spec.group,
            **_describe(error),
            failures=self._failures,
            retryInSeconds=seconds,
            rows=len(self._batch),
        )

    def _end_backoff(self) -> None:
        if self._retry_at is not None and self._source is not None:
            self._source.resume()
        self._retry_at = self._error = None

    def _rejoin_later(self, error: Exception, stop: Callable[[], bool]) -> None:
        """Leave the group and sleep for 5 s at most; the next turn joins by a new connection.

        What was read and not committed is read again.
        """
        self._error = _describe(error)["errorClass"]
        log.warning("failed", group=self.spec.group, **_describe(error))
        if self._source is not None:
            self._source.close()
        self._source = None
        self._batch.clear()
        self._prefetched.clear()
        self._limit_reached = False  # what lies past the limit is read again, too
        until = self._clock() + min(self._options.longest_wait.total_seconds(), 5.0)
        while not stop() and self._clock() < until:
            time.sleep(0.1)
        self._progress_at = self._clock()
        self._retry_at = self._error = None


def _do_nothing() -> None:
    """Serve as `while_waiting` where nothing is prefetched."""


def _is_expected(error: Exception) -> bool:
    return isinstance(error, SlowDown | CommitRefused)


def _describe(error: Exception) -> dict[str, str]:
    """Describe why a batch backs off: of a SinkUnavailable, its cause."""
    if isinstance(error, DeadLettersRefused):
        return {"errorClass": type(error).__qualname__, "code": error.code}
    return describe_error(error.__cause__ if _is_expected(error) and error.__cause__ else error)
