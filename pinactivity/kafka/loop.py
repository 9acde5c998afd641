"""One loop for every consumer: poll -> handle -> flush -> commit (design, section 10).

An app declares its consumers in `<app>/consumers.py`, and `manage.py consume NAME` runs them:

    register(ConsumerSpec(name="..", topics=(..,), group="..", handler=MyHandler))

Delivery is at least once: an offset is committed last, when everything before it was written
by the handler or acknowledged by the dead-letter topic. Handlers are therefore idempotent.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import structlog
from django.db import DataError, close_old_connections, connections
from django.utils.module_loading import autodiscover_modules
from kafka.errors import KafkaError
from opentelemetry.context import Context

from pinactivity import meanwhile
from pinactivity.core.error_info import describe_error
from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.batch import Batch, BatchLimits
from pinactivity.kafka.dead_letters import dead_letter
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.producer import Publisher
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.source import CommitRefused, Partition, RawRecord, Source
from pinactivity.telemetry import metrics, tracing

__all__ = [
    "BatchLimits",
    "Consumer",
    "ConsumerSpec",
    "Entry",
    "Handler",
    "Poison",
    "Record",
    "SinkUnavailable",
    "SlowDown",
    "register",
    "registered_consumers",
]

log = structlog.get_logger(__name__)

Row = TypeVar("Row")

CONTRACT_VERSION = b"1"
_OURS = frozenset(
    {
        "MessageId",
        "EventType",
        "AggregateType",
        "AggregateId",
        "ContractVersion",
        "Version",
        "CreatedAt",
        "CorrelationId",
        "traceparent",
    }
)
_POLL_SECONDS = 0.5
"""Of one poll: how late a stop, or a rebalance before which to flush, may be noticed."""
_WORK_SECONDS = 30.0
"""Of work between two polls: well below every sensible max_poll_interval."""


class SlowDown(Exception):
    """Not now: keep the batch, wait (1 s to 60 s), flush it again. No offset moves."""


class SinkUnavailable(SlowDown):
    """The storage that the handler writes to is away; not the messages' fault."""


class Entry(msgspec.Struct, Generic[Row], frozen=True):
    """A row and the message that it was made from."""

    record: Record
    row: Row


class Handler(Protocol[Row]):
    """What a consumer does. One instance a thread, so it may keep a client of its own."""

    def decode(self, record: Record) -> Row | None:
        """Make a row of a message, purely: no network, no database.

        Returns:
            The row; None skips the message (the handler counts why).

        Raises:
            Poison: the message breaks the contract. Any other exception counts as
                `Poison("handler-error")`.
        """

    def flush(self, entries: Sequence[Entry[Row]]) -> None:
        """Write rows durably, all or none or idempotently: they may come again.

        `entries` are in order within a partition, never empty, and exactly one when the
        consumer works `one_by_one` (then the message's correlation id and trace are in force).

        Of a batch it may call `meanwhile.do_offered` where it has sent and begins to wait: the
        loop then polls, and decodes the next batch by this handler.

        Raises:
            Poison: a row is at fault; what PostgreSQL refuses with DataError is so too. Of
                several rows the loop halves the batch until the one stands alone; it goes to
                the dead-letter topic, the others are written.
            SinkUnavailable: the storage is away. The batch is kept, no offset moves. Any
                other exception is treated so too, and logged as an error.
        """

    def close(self) -> None:
        """Give up what the handler holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A consumer as an app declares it.

    Args:
        name: What `manage.py consume` calls it: "signed-in".
        topics: Read with one group; each has its dead-letter topic `<topic>.<group>.dlq`.
        group: The consumer group.
        handler: Makes the handler, in the thread that will use it.
        limits: Of a batch; asked when the consumer is made, since they may be settings.
        one_by_one: `flush` gets one entry a call: one transaction a message. Offsets are still
            committed once a batch.
        extra_metrics: Fed besides the loop's own, for consumers whose specification names them.
    """

    name: str
    topics: tuple[str, ...]
    group: str
    handler: Callable[[], Handler[Any]]
    limits: Callable[[], BatchLimits] = BatchLimits
    one_by_one: bool = False
    extra_metrics: tuple[metrics.ConsumerMetrics, ...] = ()


_registered: dict[str, ConsumerSpec] = {}


def register(spec: ConsumerSpec) -> ConsumerSpec:
    """Declare a consumer; called at the import of an app's `consumers.py`.

    Raises:
        ValueError: the name is taken by another declaration.
    """
    if _registered.setdefault(spec.name, spec) != spec:
        raise ValueError(f"There are two consumers {spec.name}.")
    return spec


def registered_consumers() -> Mapping[str, ConsumerSpec]:
    """Import every app's `consumers.py` and return what they declared, by name."""
    autodiscover_modules("consumers")
    return _registered


class PoisonLimitReached(Exception):
    """Too many poison messages in a row: a bad deploy, not bad data."""

    def __init__(self, spec: ConsumerSpec, limit: int) -> None:
        super().__init__(
            f"{spec.name}: more than {limit} poison messages in a row. Nothing after them was"
            f" touched. See what they are (manage.py dead_letters list), correct the producer or"
            f" this consumer, then start it again."
        )


class DeadLettersRefused(SlowDown):
    """The dead-letter topic did not acknowledge: the offsets wait for it.

    Args:
        code: Of the broker's refusal.
    """

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


class _Unfinished(SlowDown):
    """Time to poll: the rest of the batch follows at once."""


class _State(Enum):
    DECODED = "decoded"
    WRITTEN = "written"
    SKIPPED = "skipped"
    POISON = "poison"
    BURIED = "buried"


class _Taken(msgspec.Struct):
    """One message between poll and commit."""

    raw: RawRecord
    state: _State
    record: Record | None = None
    row: Any = None
    reason: str = ""
    context: Context | None = None

    @property
    def partition(self) -> Partition:
        return self.raw.topic, self.raw.partition

    @property
    def entry(self) -> Entry[Any]:
        assert self.record is not None  # it was decoded
        return Entry(self.record, self.row)

    @property
    def is_poison(self) -> bool:
        return self.state in (_State.POISON, _State.BURIED)

    def condemn(self, reason: str) -> None:
        self.state, self.reason = _State.POISON, reason


@dataclass(frozen=True, slots=True)
class Result:
    """What one turn of the loop came to."""

    polled: int = 0
    committed: int = 0
    """Messages whose offsets moved."""
    dropped: int = 0
    """Messages of partitions that went to another member: it reads them again."""
    fault: str | None = None
    """The class of the fault for which the batch waits."""


class Consumer:
    """One member of one consumer's group.

    Args:
        spec: What to do.
        open_source: Joins the group; tried again while the broker is away.
        publisher: For dead letters. Closed with the loop.
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
        self._publisher = publisher
        self._options = options
        self._clock = clock
        self._handler: Handler[Any] | None = None
        self._source: Source | None = None
        self._batch: Batch[_Taken] = Batch(spec.limits(), clock=clock)
        self._ahead: Batch[_Taken] = Batch(spec.limits(), clock=clock)
        """What was read while the batch is being written: the next batch."""
        self._fault_ahead: Exception | None = None
        self._polled = self._dropped = 0
        self._poison_in_a_row = 0
        self._limit_reached = False
        self._failures = 0
        self._retry_at: float | None = None
        self._fault: str | None = None
        self._progress_at = clock()
        self._metrics = (metrics.CONSUMER, *spec.extra_metrics)
        for each in self._metrics:
            each.oldest_unstored.labels(spec.group).set_function(self._oldest_seconds)

    # -- what health and metrics ask, from other threads -----------------------------------

    @property
    def silent_seconds(self) -> float:
        """How long the loop has got nowhere: no poll came back, no batch was handled."""
        return self._clock() - self._progress_at

    @property
    def waits_for(self) -> str | None:
        """The class of the fault that the consumer waits out; None when it works."""
        return self._fault

    @property
    def unstored(self) -> int:
        """How many messages were read and are not committed yet."""
        return len(self._batch) + len(self._ahead)

    def _oldest_seconds(self) -> float:
        """The age by header CreatedAt of the oldest message read but not committed, else 0."""
        moments = [
            taken.record.created_at if taken.record else _moment(taken.raw.timestamp)
            for taken in (*self._batch, *self._ahead)
        ]
        if not moments:
            return 0.0
        return max((datetime.now(UTC) - min(moments)).total_seconds(), 0.0)

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
                    self._wait_out(exc, stop)
            if self._retry_at is None and not self._batch.is_empty:
                self._flush()
        finally:
            self.close()

    def run_once(self) -> Result:
        """Take one turn: poll, and flush if it is time.

        1. Flush first if the poll would give partitions up: what goes is read again by the
           member that gets it.
        2. Poll, also while a batch waits for a retry, with everything paused: the membership
           must survive. What comes all the same, of partitions just assigned, is kept.
        3. Drop what belongs to partitions that went, then take what the poll brought.
        4. Flush when the batch is ready, or due for its retry. A handler that waits meanwhile
           has 2 and 3 done for the next batch; if that fills it, the next turn begins here.

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
                self._go_on()
                self._end_at_limit()
            elif self._clock() >= self._retry_at:
                committed += self._flush()
        elif self._batch.is_ready:
            committed += self._flush(read_ahead=not self.spec.one_by_one)
            if self._fault_ahead is not None:
                fault, self._fault_ahead = self._fault_ahead, None
                raise fault
        return Result(self._polled, committed, self._dropped, self._fault)

    def close(self) -> None:
        """Leave the group and give up every connection; what was not committed comes again."""
        for each in self._metrics:
            each.oldest_unstored.remove(self.spec.group)
        for part in (self._source, self._handler, self._publisher):
            if part is not None:
                part.close()
        connections.close_all()

    def _open(self) -> Source:
        """Make the handler, in the thread that uses it, and join the group, where not done yet."""
        if self._handler is None:
            try:
                self._handler = self.spec.handler()
            except Exception as exc:  # its client may connect at once, and to nobody
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

    def _read(self, batch: Batch[_Taken], *, seconds: float) -> None:
        """Poll, drop what belongs to partitions that went, and add what the poll brought.

        Not once the poison limit is reached: the offsets must not pass what was let go.
        """
        source = self._opened_source
        raws = source.poll(seconds=seconds, most=max(batch.room, 1))
        self._progress_at = self._clock()
        self._drop(source.take_revoked())
        metrics.CONSUMER_CONSUMED.labels(self.spec.group).inc(len(raws))
        # Reading the trace takes as long as the decoding, and mostly serves nobody.
        traced = self.spec.one_by_one or tracing.are_spans_sent()
        for raw in raws if not self._limit_reached else ():
            batch.append(self._take(raw, traced=traced))
        self._polled += len(raws)
        metrics.CONSUMER_LAG.labels(self.spec.group).set(source.lag())

    def _drop(self, revoked: set[Partition]) -> None:
        if not revoked:
            return
        dropped = self._batch.keep(lambda taken: taken.partition not in revoked)
        log.info("partitions gone", group=self.spec.group, partitions=len(revoked), rows=dropped)
        self._dropped += dropped

    # -- handle ----------------------------------------------------------------------------

    def _take(self, raw: RawRecord, *, traced: bool) -> _Taken:
        if raw.value is None:
            metrics.CONSUMER_TOMBSTONES.labels(self.spec.group).inc()
            return _Taken(raw, _State.SKIPPED)
        taken = _Taken(raw, _State.DECODED)
        try:
            taken.record = record = _read_record(raw, raw.value)
            if traced:
                with tracing.continued_span(
                    "consume", record.headers, self._attributes(raw)
                ) as context:
                    taken.context = context
                    taken.row = self._made_handler.decode(record)
            else:
                taken.row = self._made_handler.decode(record)
        except Poison as exc:
            taken.condemn(exc.reason)
        except Exception as exc:  # a message must not end the loop, whatever it trips over
            log.error("failed", group=self.spec.group, **describe_error(exc), exc_info=exc)
            taken.condemn("handler-error")
        else:
            if taken.row is None:
                taken.state = _State.SKIPPED
        return taken

    @property
    def _opened_source(self) -> Source:
        assert self._source is not None  # it is opened at the beginning of a turn
        return self._source

    @property
    def _made_handler(self) -> Handler[Any]:
        assert self._handler is not None  # it was made before the first poll
        return self._handler

    def _attributes(self, raw: RawRecord) -> dict[str, str | int]:
        return {
            "messaging.destination.name": raw.topic,
            "messaging.destination.partition.id": raw.partition,
            "messaging.kafka.message.offset": raw.offset,
            "messaging.consumer.group.name": self.spec.group,
        }

    # -- flush: write, bury, commit --------------------------------------------------------

    def _flush(self, *, read_ahead: bool = False) -> int:
        """Do what is left to do with the batch; return how many messages were committed.

        Each step remembers what it has done, so that a retry does the rest only:
        1. write: the handler's rows; meanwhile the next batch is read, where that is wanted;
        2. bury: dead letters, up to the limit in a row; what follows the limit is let go;
        3. commit: last.

        Any fault keeps the batch for a later turn, which then has what was read ahead too.

        Raises:
            PoisonLimitReached: after what came before was committed.
        """
        try:
            with meanwhile.offered(self._read_ahead) if read_ahead else nullcontext():
                self._write()
            self._bury()
            self._commit()
        except _Unfinished:
            self._join_ahead()
            self._retry_at = self._clock()
            return 0
        except Exception as exc:  # sink, dead letters or broker: wait, whatever it is
            self._join_ahead()
            self._wait(exc)
            return 0
        finally:
            self._progress_at = self._clock()
        size = len(self._batch)
        self._batch.clear()
        self._batch, self._ahead = self._ahead, self._batch
        self._failures = 0
        self._go_on()
        self._end_at_limit()
        return size

    def _end_at_limit(self) -> None:
        if self._limit_reached:
            raise PoisonLimitReached(self.spec, self._options.poison_limit)

    def _read_ahead(self) -> None:
        """Read the next batch while the handler waits.

        The poll may give partitions up, as any poll may: what is being written of them is then
        not committed, and read again by the member that has them. When that is known to come,
        nothing is read ahead. A fault of the broker is no fault of the writing: the turn ends
        with it.
        """
        try:
            if not self._opened_source.is_rebalance_due():
                self._read(self._ahead, seconds=0)
        except Exception as exc:
            self._fault_ahead = exc

    def _join_ahead(self) -> None:
        """Make one batch of what waits and what was read behind it.

        A poll may bring more meanwhile, in spite of the pause: the offset must not pass this. Nor
        must it pass what was let go at the poison limit.
        """
        for taken in self._ahead if not self._limit_reached else ():
            self._batch.append(taken)
        self._ahead.clear()

    def _write(self) -> None:
        waiting = [taken for taken in self._batch if taken.state is _State.DECODED]
        if not waiting:
            return
        began = self._clock()
        written = 0
        units = [[taken] for taken in waiting] if self.spec.one_by_one else [waiting]
        units.reverse()
        try:
            while units:
                if self._clock() - began > _WORK_SECONDS:
                    raise _Unfinished
                unit = units.pop()
                reason = self._write_unit(unit)
                if reason is None:
                    written += len(unit)
                elif len(unit) == 1:
                    unit[0].condemn(reason)
                else:
                    half = len(unit) // 2
                    units += [unit[half:], unit[:half]]
        finally:
            seconds = self._clock() - began
            metrics.CONSUMER_FLUSH_SECONDS.labels(self.spec.group).observe(seconds)
            if written:
                for each in self._metrics:
                    each.batch_size.labels(self.spec.group).observe(written)
                log.info(
                    "flushed",
                    group=self.spec.group,
                    rows=written,
                    insertMs=round(seconds * 1000),
                )

    def _write_unit(self, unit: list[_Taken]) -> str | None:
        """Write rows; return the reason when one of them is at fault."""
        close_old_connections()
        try:
            with self._correlated(unit):
                self._made_handler.flush([taken.entry for taken in unit])
        except Poison as exc:
            return exc.reason
        except DataError:
            return "row-refused"
        for taken in unit:
            taken.state = _State.WRITTEN
        return None

    @contextmanager
    def _correlated(self, unit: list[_Taken]) -> Iterator[None]:
        """Join the messages' traces; and a single message's correlation, where it stands alone."""
        contexts = [taken.context for taken in unit if taken.context is not None]
        attributes: dict[str, str | int] = {
            "messaging.consumer.group.name": self.spec.group,
            "rows": len(unit),
        }
        record = unit[0].record
        alone = self.spec.one_by_one and record is not None
        with (
            tracing.gathering_span("insert", contexts, attributes),
            tracing.correlate(record.correlation_id) if record and alone else nullcontext(),
        ):
            yield

    def _bury(self) -> None:
        if not any(taken.state is _State.POISON for taken in self._batch):
            return
        self._stop_at_limit()
        letters = [taken for taken in self._batch if taken.state is _State.POISON]
        if not letters:
            return
        at = datetime.now(UTC)
        faults = self._publisher.publish(
            [
                dead_letter(taken.raw, group=self.spec.group, reason=taken.reason, at=at)
                for taken in letters
            ]
        )
        for taken, fault in zip(letters, faults, strict=True):
            if fault is None:
                taken.state = _State.BURIED
                self._report_poison(taken)
        refused = [fault for fault in faults if fault is not None]
        if refused:
            raise DeadLettersRefused(refused[0].code)

    def _stop_at_limit(self) -> None:
        """Let go of everything from the first message past the limit on: not handled by us."""
        count = self._poison_in_a_row
        for place, taken in enumerate(self._batch):
            count = _count_poison(count, taken)
            if 0 < self._options.poison_limit < count:
                self._batch.truncate(place)
                self._limit_reached = True
                return

    def _report_poison(self, taken: _Taken) -> None:
        for each in self._metrics:
            each.dead_lettered.labels(self.spec.group, taken.reason).inc()
        log.error(
            "skipped-poison",
            group=self.spec.group,
            reason=taken.reason,
            SourceEventId=_message_id_of(taken),
            topic=taken.raw.topic,
            partition=taken.raw.partition,
            offset=taken.raw.offset,
        )

    def _commit(self) -> None:
        if self._batch.is_empty:
            return
        raws = [taken.raw for taken in self._batch]
        first = {raw[:2]: raw.offset for raw in reversed(raws)}
        following = {raw[:2]: raw.offset + 1 for raw in raws}
        self._opened_source.commit(following)
        self._poison_in_a_row = _count_poison_at_end(self._poison_in_a_row, self._batch)
        log.info(
            "consumed",
            group=self.spec.group,
            batchSize=len(self._batch),
            offsets={
                f"{topic}/{number}": f"{first[topic, number]}-{end - 1}"
                for (topic, number), end in following.items()
            },
        )

    # -- waiting ---------------------------------------------------------------------------

    def _wait(self, fault: Exception) -> None:
        """Keep the batch and try again after a while that doubles with each failure."""
        seconds = min(
            self._options.first_wait.total_seconds() * 2 ** min(self._failures, 30),
            self._options.longest_wait.total_seconds(),
        )
        self._failures += 1
        self._retry_at = self._clock() + seconds
        self._fault = type(fault).__qualname__
        for each in self._metrics:
            each.retries.labels(self.spec.group).inc()
        expected = isinstance(fault, SlowDown | CommitRefused)
        (log.warning if expected else log.error)(
            "failed",
            group=self.spec.group,
            **_describe(fault),
            failures=self._failures,
            retryInSeconds=seconds,
            rows=len(self._batch),
        )

    def _go_on(self) -> None:
        if self._retry_at is not None and self._source is not None:
            self._source.resume()
        self._retry_at = self._fault = None

    def _wait_out(self, fault: Exception, stop: Callable[[], bool]) -> None:
        """Leave the group, sleep for 5 s at most, and start anew: the connection is worth nothing.

        What was read and not committed is read again.
        """
        self._fault = _describe(fault)["errorClass"]
        log.warning("failed", group=self.spec.group, **_describe(fault))
        if self._source is not None:
            self._source.close()
        self._source = None
        self._batch.clear()
        self._ahead.clear()
        self._limit_reached = False  # what was let go is read again, too
        until = self._clock() + min(self._options.longest_wait.total_seconds(), 5.0)
        while not stop() and self._clock() < until:
            time.sleep(0.1)
        self._progress_at = self._clock()
        self._retry_at = self._fault = None


def _read_record(raw: RawRecord, value: bytes) -> Record:
    """Decode a message's envelope, strictly.

    Headers of ours must be UTF-8; those of others that are not are left out. Of a repeated
    header the last counts. A ContractVersion other than 1 is a warning (specification).

    Raises:
        Poison: `header-not-text`, `message-id-missing` or `message-id-invalid`.
    """
    headers = dict(raw.headers)
    try:
        # All of them at once. Of a repeated header each has to be looked at.
        is_plain = b"".join(headers.values()).isascii() and len(headers) == len(raw.headers)  # type: ignore[arg-type]  # see below
    except TypeError:  # one has no content
        is_plain = False
    if not is_plain:
        headers = _read_odd_headers(raw)
    message_id = headers.get("MessageId")
    if message_id is None:
        raise Poison("message-id-missing")
    try:
        made_id = parse_id(message_id.decode())
    except ValueError:
        raise Poison("message-id-invalid") from None
    try:
        created_at = parse_time((headers.get("CreatedAt") or b"").decode())
    except ValueError:
        created_at = _moment(raw.timestamp)
    if headers.get("ContractVersion", CONTRACT_VERSION) != CONTRACT_VERSION:
        log.warning(
            "contract version differs",
            SourceEventId=str(made_id),
            topic=raw.topic,
            partition=raw.partition,
            offset=raw.offset,
        )
    return Record(
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        key=raw.key,
        value=value,
        message_id=made_id,
        created_at=created_at,
        raw_headers=raw.headers,
    )


def _read_odd_headers(raw: RawRecord) -> dict[str, bytes | None]:
    """Pick the headers that are UTF-8, of a name the last.

    Raises:
        Poison: `header-not-text`: one of ours is not.
    """
    headers: dict[str, bytes | None] = {}
    for name, content in raw.headers:
        if content is None:
            continue
        try:
            content.decode()
        except UnicodeDecodeError:
            if name in _OURS:
                raise Poison("header-not-text") from None
        else:
            headers[name] = content
    return headers


def _moment(milliseconds: int) -> datetime:
    """Read a broker's timestamp; an absurd one is as good as none, which is now."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.now(UTC)


def _message_id_of(taken: _Taken) -> str | None:
    """The SourceEventId for the log, if there is one."""
    return str(taken.record.message_id) if taken.record else None


def _count_poison(count: int, taken: _Taken) -> int:
    """Go on counting poison messages in a row; a message without a value says nothing."""
    if taken.is_poison:
        return count + 1
    return count if taken.raw.value is None else 0


def _count_poison_at_end(count: int, batch: Batch[_Taken]) -> int:
    """Count as `_count_poison` does from the first to the last: only the end matters."""
    in_a_row = 0
    for taken in reversed(tuple(batch)):
        if taken.is_poison:
            in_a_row += 1
        elif taken.raw.value is not None:
            return in_a_row
    return count + in_a_row


def _describe(fault: Exception) -> dict[str, str]:
    """Describe why a batch waits: of a SinkUnavailable, what it came from."""
    if isinstance(fault, DeadLettersRefused):
        return {"errorClass": type(fault).__qualname__, "code": fault.code}
    expected = isinstance(fault, SlowDown | CommitRefused)
    return describe_error(fault.__cause__ if expected and fault.__cause__ else fault)
