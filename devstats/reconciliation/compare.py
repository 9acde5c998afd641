"""The ledger: what has ended, and what each store holds of it, by topic and hour (section 11).

A closed row, its outbox row, its offset and its fact name no common time: the event carries no
EndedAt, the fact only its begin and its last activity, and the broker stamps what it gets when it
gets it. What they have in common is the id, the key of the message. So stores are compared id by
id, and a message belongs to the hour of its row's EndedAt, wherever else it turns up. What has no
row any more goes by the event's CreatedAt, which its transaction set, and a fact that nothing else
is left of by its LastActivityAt.

Memory is bounded by a chunk of ids, an hour of facts, and a file for the keys of the offsets: 80
bytes each, without a name in TMPDIR, so that it goes with the process, however that ends.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

from django.conf import settings

from devstats.backfill import backfill_sessions, backfill_views
from devstats.clickhouse import MOST_IDS, translated_faults
from devstats.facts import TENANT
from devstats.writer import SESSION_FACTS, VIEW_FACTS, FactWriter, Table
from outbox.selectors import Delivery, deliveries, unpublished
from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.consumer import registered_consumers
from pinactivity.kafka.history import (
    committed_offsets,
    kept_since,
    opened_reader,
    partitions_of,
    read,
)
from pinactivity.kafka.source import RawRecord
from pinactivity.kafka.topics import dead_letter_topic
from pinactivity.postgres.clock import statement_time
from sessions.selectors import ended_session_chunks, existing_sessions
from views.selectors import ended_view_chunks, existing_views

HOUR = timedelta(hours=1)
_CLOCKS_DIFFER = timedelta(minutes=15)
"""Between PostgreSQL's clock and that of the relay's host, which stamps what it sends."""
_CHUNK = MOST_IDS


class Lost(StrEnum):
    """Why a message is in no fact and on no way to one."""

    PARKED = "parked"
    """In the outbox, refused by Kafka; it goes when a person sends it again."""
    DEAD_LETTERED = "dead-lettered"
    """A consumer put it aside as poison."""
    NOT_STORED = "not stored"
    """The consumer has read past it, and there is no fact."""
    NOT_IN_KAFKA = "not in Kafka"
    """Published, or purged as published, and gone before it was stored."""
    NEVER_ENQUEUED = "never enqueued"
    """The row has no message where the outbox would still have it."""


@dataclass(slots=True)
class Count:
    """Of the messages of one topic and hour. Each is at most one of lost, late, not comparable."""

    closed: int = 0
    """Rows in PostgreSQL."""
    outbox: int = 0
    kafka: int = 0
    """Offsets."""
    facts: int = 0
    """Distinct sessions or views in ClickHouse."""
    lost: Counter[Lost] = field(default_factory=Counter)
    unrepairable: int = 0
    """Of the lost: those without a row to make the fact of."""
    duplicated: int = 0
    """Offsets beyond one for each message."""
    late: int = 0
    """No fact yet, but pending in the outbox or unread by the group."""
    not_comparable: int = 0
    """Stored, and older than what PostgreSQL, the outbox or Kafka keeps."""

    def __iadd__(self, other: "Count") -> Self:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True)
class Ledger:
    since: datetime
    until: datetime
    counts: dict[tuple[str, datetime], Count] = field(default_factory=dict)
    """By topic and the begin of the hour in UTC; hours without any message are not there."""

    def total(self, topic: str | None = None) -> Count:
        """Add up one topic, or all."""
        total = Count()
        for (name, _), count in self.counts.items():
            if topic in (None, name):
                total += count
        return total

    def at(self, topic: str, moment: datetime) -> Count:
        """Return the count of a moment's hour."""
        return self.counts.setdefault((topic, hour_of(moment)), Count())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A kind of thing that ends.

    Args:
        topic: Of its events.
        group: The consumer group that stores them.
        table: Of its facts.
        id_column: What its facts are counted by.
        ended: Yields chunks of closed rows of a period, each with `id` and `ended_at`.
        existing: Returns those of some ids that have a row.
        backfill: Adds the facts of rows.
    """

    topic: str
    group: str
    table: Table
    id_column: str
    ended: Callable[..., Iterator[Sequence[Any]]]
    existing: Callable[[Iterable[UUID]], set[UUID]]
    backfill: Callable[[FactWriter, Sequence[Any]], None]


def all_streams() -> tuple[Stream, ...]:
    """Return what has facts: sessions and views."""
    sessions = registered_consumers()["dev-stats-session-ended"]
    views = registered_consumers()["dev-stats-property-object-view-ended"]
    return (
        Stream(
            topic=sessions.topics[0],
            group=sessions.group,
            table=SESSION_FACTS,
            id_column="SessionId",
            ended=ended_session_chunks,
            existing=existing_sessions,
            backfill=backfill_sessions,
        ),
        Stream(
            topic=views.topics[0],
            group=views.group,
            table=VIEW_FACTS,
            id_column="PropertyObjectViewId",
            ended=ended_view_chunks,
            existing=existing_views,
            backfill=backfill_views,
        ),
    )


class Stopped(Exception):
    """The caller wanted an end; what was repaired stays."""


def draw_up(
    writer: FactWriter,
    *,
    since: datetime,
    until: datetime,
    repair: bool = False,
    streams: Iterable[Stream] | None = None,
    advance: Callable[[int], object] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Ledger:
    """Compare what ended at `since` or later and before `until`.

    Args:
        repair: Add the facts of the lost rows on the way. The ledger tells what was found before.
        streams: All when None.
        advance: Called with the rows that were compared since its last call.
        stop: Asked between chunks.

    Raises:
        Error: PostgreSQL is away.
        KafkaError, OSError: Kafka is away.
        RowRefused, StorageUnavailable: ClickHouse is away, or refuses a repair.
        sqlite3.Error: the disk of TMPDIR is full.
        Stopped: `stop` said so.
    """
    ledger = Ledger(since, until)
    for stream in all_streams() if streams is None else streams:
        # Before what it is compared with: whatever goes on meanwhile is late, never lost.
        began = statement_time()
        with closing(_read_offsets(stream, since - _CLOCKS_DIFFER, stop)) as offsets:
            _Comparison(stream, ledger, writer, offsets, began).run(repair, advance, stop)
    return ledger


# -- Kafka ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """What Kafka holds of one key."""

    created_at: datetime | None
    copies: int
    unread: int
    """Of the copies: those that the group has not read."""
    is_dead_letter: bool


class _Offsets:
    """What a topic holds, by key, in a file of this process that goes with it."""

    def __init__(self, earliest: datetime | None) -> None:
        self.earliest = earliest
        """From when on the topic holds everything; None when it holds nothing."""
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute(
            "CREATE TABLE places (key TEXT PRIMARY KEY, created_at TEXT, copies INTEGER,"
            " unread INTEGER, dead INTEGER) WITHOUT ROWID"
        )
        self._file.execute("BEGIN")

    def add(
        self, key: str, created_at: datetime | None, *, copies: int, unread: int, dead: int
    ) -> None:
        self._file.execute(
            "INSERT INTO places VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " created_at = coalesce(created_at, excluded.created_at), dead = dead + excluded.dead,"
            " copies = copies + excluded.copies, unread = unread + excluded.unread",
            (key, created_at and created_at.isoformat(), copies, unread, dead),
        )

    def find(self, keys: Collection[str]) -> dict[str, _Place]:
        marks = ", ".join("?" * len(keys))
        return dict(self._select(f"WHERE key IN ({marks})", tuple(keys)))

    def chunks(self, since: datetime, until: datetime) -> Iterator[dict[str, datetime]]:
        """Yield keys whose events were created within a period, with those times."""
        after = ""
        while rows := list(self._select("WHERE key > ? ORDER BY key LIMIT ?", (after, _CHUNK))):
            after = rows[-1][0]
            yield {
                key: place.created_at
                for key, place in rows
                if place.created_at and place.copies and since <= place.created_at < until
            }

    def close(self) -> None:
        self._file.close()

    def _select(self, rest: str, values: tuple[object, ...]) -> Iterator[tuple[str, _Place]]:
        for key, created_at, copies, unread, dead in self._file.execute(
            f"SELECT key, created_at, copies, unread, dead FROM places {rest}", values
        ):
            moment = datetime.fromisoformat(created_at) if created_at else None
            yield key, _Place(moment, copies, unread, bool(dead))


def _read_offsets(stream: Stream, since: datetime, stop: Callable[[], bool]) -> _Offsets:
    """Read on to the end of the topic: an event may be published long after its row closed."""
    servers = settings.KAFKA_BOOTSTRAP_SERVERS
    with opened_reader(servers) as reader:
        offsets = _Offsets(kept_since(reader, stream.topic))
        parts = partitions_of(reader, stream.topic)
        # First: what the group commits while the topic is read was unread, which is right too.
        committed = committed_offsets(servers, stream.group, parts) if parts else {}
        letters = dead_letter_topic(stream.topic, stream.group)
        records = read(reader, stream.topic, letters, since=since) or ()
        for number, raw in enumerate(records):
            if number % _CHUNK == 0:
                _check(stop)
            if raw.topic == letters:
                offsets.add(_key(raw), None, copies=0, unread=0, dead=1)
            elif raw.value is not None:  # a tombstone is no message
                unread = raw.offset >= committed.get((raw.topic, raw.partition), 0)
                offsets.add(_key(raw), _created_at(raw), copies=1, unread=unread, dead=0)
    return offsets


def _key(raw: RawRecord) -> str:
    """Name the message: by its key, an AggregateId, as the outbox spells it."""
    if raw.key is None:
        return f"{raw.partition}/{raw.offset}"
    text = raw.key.decode(errors="backslashreplace")
    try:
        return str(parse_id(text))
    except ValueError:
        return text


def _created_at(raw: RawRecord) -> datetime:
    header = dict(raw.headers).get("CreatedAt")
    try:
        return parse_time((header or b"").decode())
    except ValueError:
        return datetime.fromtimestamp(raw.timestamp / 1000, UTC)


# -- the comparison ------------------------------------------------------------------------

_STORED = """
    SELECT DISTINCT {column} FROM {table}
    WHERE TenantId = {{tenant:String}} AND {column} IN {{ids:Array(UUID)}}
"""
# A fact begins before its last activity, which spares the months after it.
_ACTIVE_WITHIN = """
    SELECT {column}, max(LastActivityAt) FROM {table}
    WHERE LastActivityAt >= fromUnixTimestamp64Micro({{since:Int64}}, 'UTC')
      AND LastActivityAt < fromUnixTimestamp64Micro({{until:Int64}}, 'UTC')
      AND EventTime < fromUnixTimestamp64Micro({{until:Int64}}, 'UTC')
    GROUP BY {column}
"""


class _Comparison:
    """Of one stream.

    Args:
        began: PostgreSQL's time before Kafka was read.
    """

    def __init__(
        self,
        stream: Stream,
        ledger: Ledger,
        writer: FactWriter,
        offsets: _Offsets,
        began: datetime,
    ) -> None:
        self._stream = stream
        self._ledger = ledger
        self._writer = writer
        self._offsets = offsets
        self._began = began
        self._outbox_since = began - settings.OUTBOX.published_kept

    def run(self, repair: bool, advance: Callable[[int], object], stop: Callable[[], bool]) -> None:
        since, until = self._ledger.since, self._ledger.until
        for rows in self._stream.ended(since=since, until=until, size=_CHUNK):
            _check(stop)
            lost = self._weigh({str(row.id): row.ended_at for row in rows}, has_row=True)
            if repair and lost:
                self._stream.backfill(self._writer, [row for row in rows if str(row.id) in lost])
            advance(len(rows))
        for moments in self._without_row(since, until):
            _check(stop)
            if moments:
                self._weigh(moments, has_row=False)
                advance(len(moments))

    def _without_row(self, since: datetime, until: datetime) -> Iterator[dict[str, datetime]]:
        """Yield what other stores hold of the period and PostgreSQL has no row of, each once."""
        for moments in self._offsets.chunks(since, until):
            yield self._rowless(moments)
        waiting = unpublished(self._stream.topic, since=since, until=until)
        for moments in _chunks(waiting):
            yield self._beyond_kafka(self._rowless(moments))
        begin = since
        while begin < until:
            end = min(hour_of(begin) + HOUR, until)
            for moments in _chunks(self._facts_within(begin, end)):
                alone = self._beyond_kafka(self._rowless(moments))
                sent = deliveries(self._stream.topic, alone)
                counted = {key for key in sent if sent[key].pending or sent[key].parked}
                yield {key: alone[key] for key in alone.keys() - counted}
            begin = end

    def _rowless(self, moments: Mapping[str, datetime]) -> dict[str, datetime]:
        existing = {str(row_id) for row_id in self._stream.existing(_ids(moments))}
        return {key: moment for key, moment in moments.items() if key not in existing}

    def _beyond_kafka(self, moments: Mapping[str, datetime]) -> dict[str, datetime]:
        found = self._offsets.find(moments)
        return {key: moment for key, moment in moments.items() if key not in found}

    def _weigh(self, moments: Mapping[str, datetime], *, has_row: bool) -> set[str]:
        """Count some messages, each in its moment's hour; return the lost ones."""
        sent = deliveries(self._stream.topic, moments)
        places = self._offsets.find(moments)
        stored = self._stored(_ids(moments))
        lost = set()
        for key, moment in moments.items():
            delivery = sent.get(key, Delivery())
            place = places.get(key) or _Place(None, 0, 0, is_dead_letter=False)
            count = self._ledger.at(self._stream.topic, moment)
            count.closed += has_row
            count.outbox += delivery.messages
            count.kafka += place.copies
            count.duplicated += max(place.copies - 1, 0)
            if key in stored:
                count.facts += 1
                count.not_comparable += not has_row or self._is_beyond(delivery, place, moment)
            elif self._is_under_way(delivery, place):
                count.late += 1
            else:
                count.lost[self._reason(delivery, place, moment)] += 1
                count.unrepairable += not has_row
                lost.add(key)
        return lost

    def _is_under_way(self, delivery: Delivery, place: _Place) -> bool:
        published_at = delivery.published_at
        published_since = published_at is not None and published_at >= self._began
        return bool(delivery.pending or place.unread or published_since)

    def _is_beyond(self, delivery: Delivery, place: _Place, moment: datetime) -> bool:
        """Tell whether the outbox or Kafka is without a message for the sake of its age alone."""
        if not delivery.messages and moment < self._outbox_since:
            return True
        if place.copies or delivery.pending or delivery.parked:
            return False
        sent_at = delivery.published_at or moment
        earliest = self._offsets.earliest
        return earliest is None or sent_at < earliest or sent_at >= self._began

    def _reason(self, delivery: Delivery, place: _Place, moment: datetime) -> Lost:
        if place.is_dead_letter:
            return Lost.DEAD_LETTERED
        if place.copies:
            return Lost.NOT_STORED
        if delivery.parked:
            return Lost.PARKED
        if not delivery.messages and moment >= self._outbox_since:
            return Lost.NEVER_ENQUEUED
        return Lost.NOT_IN_KAFKA

    # -- ClickHouse --

    def _stored(self, ids: Sequence[UUID]) -> set[str]:
        if not ids:
            return set()
        return {str(row[0]) for row in self._query(_STORED, tenant=TENANT, ids=list(ids))}

    def _facts_within(self, since: datetime, until: datetime) -> Iterator[tuple[str, datetime]]:
        bounds = {"since": _microseconds(since), "until": _microseconds(until)}
        for row_id, moment in self._query(_ACTIVE_WITHIN, **bounds):
            yield str(row_id), moment

    def _query(self, statement: str, **parameters: object) -> Sequence[Sequence[Any]]:
        stream = self._stream
        text = statement.format(column=stream.id_column, table=stream.table.name)
        with translated_faults():
            return self._writer.client.query(text, parameters=parameters).result_rows


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        raise Stopped


def _ids(keys: Iterable[str]) -> list[UUID]:
    """Return the keys that are ids; whatever else stands in a topic has no row and no fact."""
    found = []
    for key in keys:
        try:
            found.append(parse_id(key))
        except ValueError:
            continue
    return found


def _chunks(pairs: Iterable[tuple[str, datetime]]) -> Iterator[dict[str, datetime]]:
    chunk: dict[str, datetime] = {}
    for key, moment in pairs:
        chunk[key] = moment
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk


def hour_of(moment: datetime) -> datetime:
    """Return the begin of a moment's hour, in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _microseconds(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
