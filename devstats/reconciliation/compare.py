"""What has ended, compared with what each store holds of it, by topic and hour (section 11).

A closed row, its outbox row, its offset and its fact have no time in common. The event carries no
EndedAt, the fact only its begin and its last activity, and the broker's timestamp is that of its
own arrival. They share the id, which is the key of the message, so stores are compared id by id.

A message belongs to the hour of its row's EndedAt. Without a row it belongs to the hour of the
event's CreatedAt, which its transaction set. A fact of which nothing else is left belongs to the
hour of its LastActivityAt.

Memory is bounded by a chunk of ids, an hour of facts, and the file of `KafkaIndex`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings

from devstats.clickhouse import MOST_IDS, translated_errors
from devstats.facts import TENANT
from devstats.reconciliation.kafka_index import KafkaIndex, KeyInKafka, index_topic
from devstats.reconciliation.report import HOUR, Lost, Report, hour_of
from devstats.reconciliation.topics import ReconciledTopic, reconciled_topics
from devstats.writer import FactWriter
from outbox.selectors import Delivery, deliveries, unpublished
from pinactivity.core.ids import parse_id
from pinactivity.postgres.clock import statement_time

_CLOCKS_DIFFER = timedelta(minutes=15)
"""Between PostgreSQL's clock and that of the relay's host, which stamps what it sends."""


class Stopped(Exception):
    """The caller asked for an end; what was repaired stays."""


def reconcile(
    writer: FactWriter,
    *,
    since: datetime,
    until: datetime,
    repair: bool = False,
    topics: Iterable[ReconciledTopic] | None = None,
    advance: Callable[[int], object] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Compare what ended at `since` or later and before `until`.

    Args:
        repair: Add the facts of the lost rows on the way. The report has what was found before.
        topics: All when None.
        advance: Called with the rows that were compared since its last call.
        stop: Asked between chunks.

    Raises:
        Error: PostgreSQL is away.
        KafkaError, OSError: Kafka is away.
        RowRefused, StorageUnavailable: ClickHouse is away, or refuses a repair.
        sqlite3.Error: the disk of TMPDIR is full.
        Stopped: `stop` returned True.
    """

    def check() -> None:
        if stop():
            raise Stopped

    report = Report(since, until)
    for topic in reconciled_topics() if topics is None else topics:
        # Kafka is read before the other stores: what moves meanwhile counts as late, never as lost.
        began = statement_time()
        with closing(
            index_topic(topic.topic, topic.group, since=since - _CLOCKS_DIFFER, check=check)
        ) as index:
            _Comparison(topic, report, writer, index, began).run(repair, advance, check)
    return report


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
    """Of one topic.

    Args:
        began: PostgreSQL's time before Kafka was read.
    """

    def __init__(
        self,
        topic: ReconciledTopic,
        report: Report,
        writer: FactWriter,
        index: KafkaIndex,
        began: datetime,
    ) -> None:
        self._topic = topic
        self._report = report
        self._writer = writer
        self._index = index
        self._began = began
        self._outbox_since = began - settings.OUTBOX.published_kept

    def run(
        self, repair: bool, advance: Callable[[int], object], check: Callable[[], None]
    ) -> None:
        since, until = self._report.since, self._report.until
        for rows in self._topic.ended(since=since, until=until, size=MOST_IDS):
            check()
            lost = self._classify({str(row.id): row.ended_at for row in rows}, has_row=True)
            if repair and lost:
                self._topic.backfill(self._writer, [row for row in rows if str(row.id) in lost])
            advance(len(rows))
        for moments in self._without_row(since, until):
            check()
            if moments:
                self._classify(moments, has_row=False)
                advance(len(moments))

    def _without_row(self, since: datetime, until: datetime) -> Iterator[dict[str, datetime]]:
        """Yield the messages of the period that have no row in PostgreSQL, each once."""
        for moments in self._index.chunks(since, until):
            yield self._rowless(moments)
        waiting = unpublished(self._topic.topic, since=since, until=until)
        for moments in _chunks(waiting):
            yield self._beyond_kafka(self._rowless(moments))
        begin = since
        while begin < until:
            end = min(hour_of(begin) + HOUR, until)
            for moments in _chunks(self._facts_within(begin, end)):
                only_facts = self._beyond_kafka(self._rowless(moments))
                sent = deliveries(self._topic.topic, only_facts)
                counted = {key for key in sent if sent[key].pending or sent[key].parked}
                yield {key: only_facts[key] for key in only_facts.keys() - counted}
            begin = end

    def _rowless(self, moments: Mapping[str, datetime]) -> dict[str, datetime]:
        existing = {str(row_id) for row_id in self._topic.existing(_ids(moments))}
        return {key: moment for key, moment in moments.items() if key not in existing}

    def _beyond_kafka(self, moments: Mapping[str, datetime]) -> dict[str, datetime]:
        found = self._index.find(moments)
        return {key: moment for key, moment in moments.items() if key not in found}

    def _classify(self, moments: Mapping[str, datetime], *, has_row: bool) -> set[str]:
        """Count some messages, each in the hour of its moment; return the lost ones."""
        sent = deliveries(self._topic.topic, moments)
        in_kafka = self._index.find(moments)
        stored = self._stored(_ids(moments))
        lost = set()
        for key, moment in moments.items():
            delivery = sent.get(key, Delivery())
            found = in_kafka.get(key) or KeyInKafka()
            count = self._report.count_at(self._topic.topic, moment)
            count.closed += has_row
            count.outbox += delivery.messages
            count.kafka += found.copies
            count.duplicated += max(found.copies - 1, 0)
            if key in stored:
                count.facts += 1
                count.not_comparable += not has_row or self._is_beyond(delivery, found, moment)
            elif self._is_in_flight(delivery, found):
                count.late += 1
            else:
                count.lost[self._reason(delivery, found, moment)] += 1
                count.unrepairable += not has_row
                lost.add(key)
        return lost

    def _is_in_flight(self, delivery: Delivery, found: KeyInKafka) -> bool:
        published_at = delivery.published_at
        published_since = published_at is not None and published_at >= self._began
        return bool(delivery.pending or found.unread or published_since)

    def _is_beyond(self, delivery: Delivery, found: KeyInKafka, moment: datetime) -> bool:
        """Return whether age alone explains that the outbox or Kafka lacks a message."""
        if not delivery.messages and moment < self._outbox_since:
            return True
        if found.copies or delivery.pending or delivery.parked:
            return False
        sent_at = delivery.published_at or moment
        earliest = self._index.earliest
        return earliest is None or sent_at < earliest or sent_at >= self._began

    def _reason(self, delivery: Delivery, found: KeyInKafka, moment: datetime) -> Lost:
        if found.is_dead_letter:
            return Lost.DEAD_LETTERED
        if found.copies:
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
        topic = self._topic
        text = statement.format(column=topic.id_column, table=topic.table.name)
        with translated_errors():
            return self._writer.client.query(text, parameters=parameters).result_rows


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
        if len(chunk) == MOST_IDS:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk


def _microseconds(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
