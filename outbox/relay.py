"""The relay: the outbox to Kafka, at least once, in order within a key (design, section 9)."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import structlog
from django.db import connection, transaction
from django.db.models import Exists, F, Func, OuterRef, Q, TextField
from django.db.models.functions import Cast, Now

from outbox.models import INDEX_SCANS_ONLY, OutboxMessage, OutboxMessageQuerySet
from outbox.options import OutboxOptions
from pinactivity.core.error_info import describe_error
from pinactivity.kafka.producer import DeliveryFault, Message, ProbingPublisher
from pinactivity.telemetry import metrics

log = structlog.get_logger(__name__)

_LOCK = "Pin:lock:outbox-relay"
MOST_BATCHES = 4
"""Of a transaction. More would be faster by little, and more is sent again when a relay dies."""
_BEGIN_SECONDS = 1.0
"""A transaction begins no batch later: where Kafka is slow, one is all that it takes."""
_PAUSE_SECONDS = 0.05
"""Between two looks of a relay that lingers."""
_LONGEST_WAIT = 60.0
"""Seconds. A first wait is one second; each that follows is twice as long."""
_MOST_WAITING = 1000
"""Messages with a wait of their own, of a shard: beyond it nothing new is begun."""
_FULL_LOOK_SECONDS = 10.0
_FULL_LOOK_SHARE = 20
"""A full look may take one part in so many of the time: under a held xmin it is not cheap."""


@dataclass(frozen=True, slots=True)
class RelayResult:
    """What some batches came to."""

    claimed: int = 0
    published: int = 0
    parked: int = 0
    fault: str | None = None
    """The class of the last fault that was not a message's own."""
    is_held: bool = False
    """Messages wait out a fault, and hold others back."""

    @property
    def is_drained(self) -> bool:
        """Nothing to go on with at once: all is sent, another relay works, or Kafka is away."""
        return self.published + self.parked == 0

    def __add__(self, other: "RelayResult") -> "RelayResult":
        return RelayResult(
            self.claimed + other.claimed,
            self.published + other.published,
            self.parked + other.parked,
            other.fault or self.fault,
            other.is_held or self.is_held,
        )


class _Row(NamedTuple):
    id: int
    message_id: str
    age: float
    """Seconds, when it was read."""
    message: Message


# Made by PostgreSQL, which has time while Python, on one core, fills the producer.
_COLUMNS = (
    "id",
    Cast("message_id", TextField()),
    "topic",
    "key",
    "headers",
    "payload",
    Func(
        "created_at",
        template="to_char(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')",
        output_field=TextField(),
    ),
    Func(
        "created_at",
        template="extract(epoch FROM statement_timestamp() - %(expressions)s)::float8",
        output_field=TextField(),  # a number is what comes: FloatField would convert each again
    ),
)


class _Waiting(NamedTuple):
    id: int
    topic: str
    key: str
    attempts: int
    is_due: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: list[_Row]
    """In the order of ids."""
    read_to: int | None
    """Id of the last of them that is new, not tried again."""
    alone: frozenset[int]
    """Ids of those that Kafka refused before: each is sent by itself, because it refuses a whole
    request's worth of a partition for the one that is at fault."""
    is_held: bool
    read_at: float
    """By the monotonic clock, just before."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """What Kafka said of a batch; of the rest nothing is known, and it stays as it is."""

    published: list[_Row] = field(default_factory=list)
    parked: list[tuple[_Row, DeliveryFault]] = field(default_factory=list)
    faulty: list[tuple[_Row, DeliveryFault]] = field(default_factory=list)

    def add(self, rows: Sequence[_Row], faults: Sequence[DeliveryFault | None]) -> None:
        """Take the answers to what was sent."""
        if not any(faults):
            self.published.extend(rows)
            return
        for row, delivery in zip(rows, faults, strict=True):
            if delivery is None:
                self.published.append(row)
            elif delivery.message_at_fault:
                self.parked.append((row, delivery))
            else:
                self.faulty.append((row, delivery))


@dataclass(slots=True)
class _Place:
    """Up to which id everything of a shard has been seen, so that reading begins behind it.

    Under a held xmin the index keeps an entry of every message ever sent; reading from the
    first one would pass them all. But an id is given before its row is committed, so a lower
    one may still come. Whoever writes into the table locks it before he gets an id, and until
    he has committed. Hence, in three looks:

    1. The first reads up to an id.
    2. Then the second takes note of who has the table locked: the only ones that may still
       commit a lower id.
    3. The third finds that all of them have ended, then reads: what they committed is in it.
       The place moves up to that id.
    """

    after: int = 0
    _read_to: int = 0
    _watched: tuple[int, frozenset[str]] | None = None
    _moves_to: int | None = None
    _full_look_at: float = field(default_factory=time.monotonic)

    def begin(self, writers: frozenset[str]) -> int:
        """Begin a look: return the id behind which to read.

        Args:
            writers: The transactions that have the table locked, as of before the reading.
        """
        self._moves_to = None
        if self._watched and not self._watched[1] & writers:
            self._moves_to, self._watched = self._watched[0], None
        if self._watched is None and self._read_to > (self._moves_to or self.after):
            self._watched = self._read_to, writers
        # Nothing should lie behind; a failover that set the ids back, or a person with SQL,
        # would be a reason.
        return self.after if time.monotonic() < self._full_look_at else 0

    def end(self, read_to: int | None, *, took: float, was_full: bool) -> None:
        """End a look that left nothing behind up to `read_to`, once it is committed.

        Args:
            read_to: None when there was nothing new.
            took: Seconds.
            was_full: It began at the first message.
        """
        if self._moves_to is not None:
            self.after = self._moves_to
        if was_full:
            pause = max(_FULL_LOOK_SECONDS, _FULL_LOOK_SHARE * took)
            self._full_look_at = time.monotonic() + pause
        if read_to is not None:
            if read_to <= self.after:  # found behind: there may be more
                self.after, self._watched = 0, None
            self._read_to = read_to


@dataclass(frozen=True, slots=True)
class _Look:
    batch: _Batch
    place: _Place
    """Begun with this look, not ended."""
    was_full: bool
    took: float
    """Seconds."""

    def end(self, place: _Place) -> None:
        place.end(self.batch.read_to, took=self.took, was_full=self.was_full)


class OutboxRelay:
    """Publishes pending messages; keeps its place between runs, and belongs to one thread.

    Args:
        publisher: Where to.
        options: Validated at start.
    """

    def __init__(self, *, publisher: ProbingPublisher, options: OutboxOptions) -> None:
        self._publisher = publisher
        self._options = options
        self._places = {shard: _Place() for shard in options.shard_numbers}
        self._faults_in_a_row: Counter[str] = Counter()
        self._was_away = True  # for all that this relay knows
        # It sends, one batch at a time, while the relay's thread works with PostgreSQL.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="outbox-send")

    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        *,
        linger: timedelta = timedelta(0),
        longest: timedelta = timedelta.max,
    ) -> RelayResult:
        """Publish batches until nothing can be sent, or `stop`; sum them up.

        Args:
            stop: Asked between transactions, which begin no batch after a second.
            linger: For how long to go on looking after nothing was found: what is committed
                soon after a wake-up sends none of its own, and another relay may hold the lock
                of a look that came too early.
            longest: After so long the run ends, whatever is left.
        """
        total = RelayResult()
        began = time.monotonic()
        leave_at = began + linger.total_seconds()
        while not stop() and time.monotonic() - began < longest.total_seconds():
            result = self.run_once()
            total += result
            if not result.is_drained or (result.is_held and self._end_waits()):
                leave_at = time.monotonic() + linger.total_seconds()
            elif time.monotonic() >= leave_at:
                break
            else:
                time.sleep(_PAUSE_SECONDS)
        return total

    def run_once(self) -> RelayResult:
        """Publish a few batches of each shard that no other relay is at."""
        return sum((self._work(shard) for shard in self._options.shard_numbers), RelayResult())

    def _work(self, shard: int) -> RelayResult:
        """Publish some batches of a shard in one transaction.

        1. Take the shard's advisory lock for the transaction, or leave: one relay at a time
           keeps the order within a key, where SKIP LOCKED would not.
        2. Read the oldest messages that may go out, in statements of their own: after the
           lock, so that they see what the relay before has marked.
        3. If messages of another layout of shards are pending, do nothing: they come first.
        4. Publish, and mark exactly what Kafka acknowledged. Where a batch is full, the next
           one is read meanwhile, and follows in the same transaction.

        The network is called inside the transaction, which holds no row lock of sessions or
        views, only the relay's own advisory lock and the marks of its batches; the publisher
        bounds the time of each.
        """
        with transaction.atomic():
            if not _try_lock(shard):
                return RelayResult()
            look = self._look(shard, copy(self._places[shard]))
            if look:
                result, place = self._publish_all(shard, look)
        if look is None:
            return self._work_all()
        self._places[shard] = place
        return result

    def _work_all(self) -> RelayResult:
        """Publish one batch of all shards together, in the order of ids.

        For as long as the number of shards has just changed: a key's messages are in two
        shards then, and nobody may work at either alone.
        """
        with transaction.atomic():
            if not _try_lock(None):
                return RelayResult()
            return self._publish(self._read(None, 0), lambda: None)[0]

    def _look(self, shard: int, place: _Place) -> _Look | None:
        """Read a batch of a shard; None: messages of another layout of shards come first.

        They are looked for in a statement that follows: it sees whatever precedes what was read.
        """
        began = time.monotonic()
        after = place.begin(_writers())
        batch = self._read(shard, after)
        others = OutboxMessage.objects.outside(self._options.shard_numbers)
        if any(messages.exists() for messages in others):
            return None
        return _Look(batch, place, was_full=after == 0, took=time.monotonic() - began)

    def _look_ahead(self, shard: int, look: _Look) -> _Look | None:
        """Take a look as after another one, of which Kafka's word is awaited.

        A fault must not undo what was sent before: the look that begins a transaction meets it
        again, with nothing sent.
        """
        place = copy(look.place)
        if not look.batch.is_held:
            look.end(place)
        try:
            with transaction.atomic():
                return self._look(shard, place)
        except Exception as exc:
            log.warning("look ahead failed", **describe_error(exc))
            return None

    def _read(self, shard: int | None, after: int) -> _Batch:
        """Read a batch of a shard, or of all, in the order of ids.

        A wait ends by time, and is in the row: all relays keep to it. Until then it holds back
        the messages of its key, or of its whole topic where the fault was not the message's.
        """
        read_at = time.monotonic()
        messages, order = OutboxMessage.objects.all(), ["id"]
        if shard is not None:  # the order of the indexes
            messages, order = messages.filter(shard=shard), ["shard", "id"]
        waiting = [
            _Waiting(*row)
            for row in messages.waiting()
            .annotate(is_due=Q(next_attempt_at__lte=Now()))
            .order_by(*order)
            .values_list(*_Waiting._fields)[:_MOST_WAITING]
        ]
        held = [row for row in waiting if not row.is_due]
        if held:
            messages = _without_held(messages, held)
        due = [row.id for row in waiting if row.is_due][: self._options.batch_size]
        room = self._options.batch_size - len(due) if len(waiting) < _MOST_WAITING else 0
        new = _fetch(messages.fresh().filter(id__gt=after).order_by(*order), room)
        again = _fetch(messages.filter(id__in=due), len(due))
        return _Batch(
            # Sorted, so that a message that is due again precedes what is new of its key.
            rows=sorted(again + new) if again else new,
            read_to=new[-1].id if new else None,
            alone=frozenset(row.id for row in waiting if row.is_due and row.attempts),
            is_held=bool(held) or not room,
            read_at=read_at,
        )

    def _publish_all(self, shard: int, look: _Look) -> tuple[RelayResult, _Place]:
        """Publish what was read, and what follows it, a few batches at most.

        Returns:
            What they came to, and the place once they are committed.
        """
        total = RelayResult()
        until = time.monotonic() + _BEGIN_SECONDS
        for left in reversed(range(MOST_BATCHES)):
            is_full = len(look.batch.rows) == self._options.batch_size
            goes_on = left > 0 and is_full and time.monotonic() < until
            result, ahead = self._publish(
                look.batch, partial(self._look_ahead, shard, look) if goes_on else lambda: None
            )
            total += result
            if ahead is None or time.monotonic() >= until:
                break
            look = ahead
        if not result.is_held and result.claimed == result.published + result.parked:
            look.end(look.place)
        return total, look.place

    def _publish(
        self, batch: _Batch, look_ahead: Callable[[], _Look | None]
    ) -> tuple[RelayResult, _Look | None]:
        """Publish a batch, within the transaction, and mark what Kafka acknowledged.

        1. While a thread sends, and Kafka answers, PostgreSQL marks the whole batch, which
           nobody sees before the commit, and a relay that dies has marked nothing. Then it
           reads ahead.
        2. Unless all of it was acknowledged, that is undone, exactly the acknowledged messages
           are marked, and what was read ahead counts for nothing.

        Returns:
            What it came to, and what was read ahead.
        """
        if not batch.rows:
            return RelayResult(is_held=batch.is_held), None
        with transaction.atomic():
            sending = self._beside.submit(self._send, batch)
            try:
                _mark_published(batch.rows)
                ahead = look_ahead()
            finally:
                wait([sending])  # nothing may be under way when the lock is gone
            answers = sending.result()
            is_marked = len(answers.published) == len(batch.rows)
            transaction.set_rollback(not is_marked)
        took = time.monotonic() - batch.read_at
        if not is_marked:
            ahead = None
            _mark_published(answers.published)
        for row, delivery in answers.parked:
            _park(row, delivery)
        self._make_wait(answers.faulty, {row.message.topic for row in answers.published})
        _report(answers.published, answers.faulty, took)
        result = RelayResult(
            len(batch.rows),
            len(answers.published),
            len(answers.parked),
            answers.faulty[-1][1].code if answers.faulty else None,
            batch.is_held or bool(answers.faulty),
        )
        return result, ahead

    def _send(self, batch: _Batch) -> _Answers:
        """Send a batch to Kafka, wave by wave. In a thread, which has no connection of its own."""
        answers = _Answers()
        end = time.monotonic() + self._options.delivery_timeout.total_seconds()
        for wave in _waves(batch.rows, batch.alone):
            # What a key's later message would overtake must not stay behind.
            stuck = {row.message.key for row, _ in answers.faulty}
            sendable = [row for row in wave if row.message.key not in stuck] if stuck else wave
            if not sendable:
                continue
            answers.add(sendable, self._publisher.publish([row.message for row in sendable]))
            if time.monotonic() > end or (answers.faulty and not answers.published):
                break  # the rest stays as it is, and is read again
        return answers

    def _make_wait(self, faulty: Sequence[tuple[_Row, DeliveryFault]], working: set[str]) -> None:
        """Write down until when messages wait.

        A message that Kafka refused while others of its topic got through waits by itself, and
        that counts as an attempt. Everything else is the broker's fault: the first message of
        the topic waits for all.
        """
        for topic in working:
            self._faults_in_a_row.pop(topic, None)
        met: set[str] = set()
        for row, delivery in faulty:
            topic = row.message.topic
            if delivery.was_refused and topic in working:
                _make_message_wait(row, delivery)
            elif topic not in met:
                met.add(topic)
                seconds = _wait_after(self._faults_in_a_row[topic])
                self._faults_in_a_row[topic] += 1
                OutboxMessage.objects.filter(id=row.id).update(
                    attempts=0,
                    next_attempt_at=Now() + timedelta(seconds=seconds),
                    last_error=delivery.code,
                )

    def _end_waits(self) -> bool:
        """End the waits for the broker if it is back; tell whether they were ended.

        So the return is noticed at the next look, and not at the end of a minute.
        """
        is_away = not self._publisher.is_reachable()
        is_back = self._was_away and not is_away
        self._was_away = is_away
        if is_back:
            self._faults_in_a_row.clear()
            OutboxMessage.objects.waiting().filter(attempts=0).end_waits()
        return is_back


def _try_lock(shard: int | None) -> bool:
    """Lock a shard, and plan as its reading needs it; None locks all shards."""
    lock_all = "pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
    lock_one = "pg_try_advisory_xact_lock_shared(hashtextextended(%s, 0))"
    with connection.cursor() as cursor:
        if shard is None:  # in the order of ids, which a sort has to make
            cursor.execute(f"SELECT {lock_all}", [_LOCK])
        else:
            cursor.execute(
                f"SELECT {INDEX_SCANS_ONLY}, {lock_one} AND {lock_all}", [_LOCK, f"{_LOCK}:{shard}"]
            )
        return bool(cursor.fetchone()[-1])


def _writers() -> frozenset[str]:
    """Name the others' transactions that have written, or are about to write, into the outbox."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT virtualtransaction FROM pg_locks
            WHERE locktype = 'relation' AND relation = 'outbox_messages'::regclass
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND mode = 'RowExclusiveLock' AND pid <> pg_backend_pid()
            """
        )
        return frozenset(name for (name,) in cursor.fetchall())


def _without_held(
    messages: OutboxMessageQuerySet, held: Sequence[_Waiting]
) -> OutboxMessageQuerySet:
    """Leave out the keys of messages that wait, and the topics of those that wait for the broker.

    And what such a topic holds back of other keys holds those keys back in other topics.
    """
    messages = messages.exclude(key__in={row.key for row in held})
    topics = {row.topic for row in held if row.attempts == 0}
    if topics:
        earlier = OutboxMessage.objects.pending().filter(
            key=OuterRef("key"), topic__in=topics, id__lt=OuterRef("id")
        )
        messages = messages.exclude(topic__in=topics).filter(~Exists(earlier))
    return messages


def _fetch(messages: OutboxMessageQuerySet, most: int) -> list[_Row]:
    if not most:
        return []
    return _to_rows(list(messages.values_list(*_COLUMNS)[:most]))


def _to_rows(found: Sequence[tuple[int, str, str, str, str, str, str, float]]) -> list[_Row]:
    """Make rows of _COLUMNS."""
    # As one text: a call of the parser a message would cost as much as the parsing itself.
    headers = json.loads(f"[{','.join([row[4] for row in found])}]")
    return [
        _Row(
            id_,
            message_id,
            age,
            Message(
                topic,
                key.encode(),
                payload.encode(),
                (
                    ("MessageId", message_id.encode()),
                    *[(name, value.encode()) for name, value in own.items()],
                    ("CreatedAt", created_at.encode()),
                ),
            ),
        )
        for (id_, message_id, topic, key, _, payload, created_at, age), own in zip(
            found, headers, strict=True
        )
    ]


def _waves(rows: list[_Row], alone: frozenset[int]) -> Iterator[list[_Row]]:
    """Split a batch so that a message goes out only after its key's earlier one is answered for.

    Otherwise the first could fail and the second arrive, and the order of the key is lost.
    """
    if not alone and len({row.message.key for row in rows}) == len(rows):
        yield rows
        return
    rest = rows
    while rest:
        keys: set[bytes | None] = set()
        wave: list[_Row] = []
        single: list[_Row] = []
        later: list[_Row] = []
        for row in rest:
            if row.message.key in keys:
                later.append(row)
            else:
                (single if row.id in alone else wave).append(row)
                keys.add(row.message.key)
        yield wave
        yield from ([row] for row in single)
        rest = later


def _mark_published(rows: Sequence[_Row]) -> None:
    # Raw SQL, and the ids as one text: a thousand values cost Python, which has messages to send.
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE outbox_messages SET published_at = statement_timestamp(),"
            " next_attempt_at = NULL WHERE id = ANY(%s::bigint[])",
            [f"{{{','.join([str(row.id) for row in rows])}}}"],
        )


def _make_message_wait(row: _Row, fault: DeliveryFault) -> None:
    attempts = OutboxMessage.objects.values_list("attempts", flat=True).get(id=row.id)
    OutboxMessage.objects.filter(id=row.id).update(
        attempts=attempts + 1,
        next_attempt_at=Now() + timedelta(seconds=_wait_after(attempts)),
        last_error=fault.code,
    )


def _wait_after(faults: int) -> float:
    """Return the seconds to wait after one more fault."""
    return min(2.0 ** min(faults, 10), _LONGEST_WAIT)


def _park(row: _Row, fault: DeliveryFault) -> None:
    OutboxMessage.objects.filter(id=row.id).update(
        parked_at=Now(),
        next_attempt_at=None,
        attempts=F("attempts") + 1,
        last_error=fault.code,
    )
    log.error(
        "message parked", messageId=row.message_id, topic=row.message.topic, errorClass=fault.code
    )


def _report(
    published: Sequence[_Row], faulty: Sequence[tuple[_Row, DeliveryFault]], took: float
) -> None:
    metrics.OUTBOX_PUBLISHED.inc(len(published))
    metrics.OUTBOX_PUBLISH_LATENCY.observe_all([row.age + took for row in published])
    for code in {delivery.code for _, delivery in faulty}:
        metrics.OUTBOX_ERRORS.labels(code).inc()
        log.warning("delivery fault", errorClass=code, published=len(published))
