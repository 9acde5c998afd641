"""What tests of the reconciliation share: rows, events and facts in all stores."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import transaction

from devstats.consumers import SessionFactsHandler, ViewFactsHandler
from devstats.reconciliation import compare
from devstats.reconciliation.report import Count, Report, hour_of
from devstats.reconciliation.topics import ReconciledTopic, reconciled_topics
from devstats.writer import FactWriter
from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.envelope import read_envelope
from pinactivity.kafka.history import opened_reader, read
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, SESSION_ENDED, dead_letter_topic
from sessions.lifecycle import CloseReason
from sessions.models import Session
from sessions.transitions import close_sessions
from tests.consuming import FIVE_MINUTES, Broker, drive
from tests.dev_stats import SESSIONS, VIEWS
from tests.factories import make_session, make_view
from tests.kafka import publish_outbox, skip_to_end

HOUR = timedelta(hours=1)


class Stores:
    """Sessions with one view each, and their events, on topics and with groups of their own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.hour = hour_of(datetime.now(UTC)) - 2 * HOUR
        self.topics: tuple[ReconciledTopic, ...] = ()
        self.make_topics_anew()

    @property
    def sessions(self) -> str:
        return self.topics[0].topic

    @property
    def views(self) -> str:
        return self.topics[1].topic

    def make_topics_anew(self) -> None:
        """Empty topics, as an embedded broker has after a restart; the outbox stays as it is."""
        unique = new_id().hex
        before = self.topics or reconciled_topics()
        self.topics = tuple(
            replace(topic, topic=f"pin.test.{name}-{unique}", group=f"{name}-{unique}")
            for name, topic in zip((SESSIONS, VIEWS), before, strict=True)
        )
        for old, new in zip(before, self.topics, strict=True):
            self._broker.create(new.topic)
            self._broker.create(dead_letter_topic(new.topic, new.group))
            OutboxMessage.objects.filter(topic=old.topic).update(topic=new.topic)

    def close(self, *ends: datetime, **fields: Any) -> list[Session]:
        """Close a session with a view at each time, silent for 12 minutes as the closer has it."""
        sessions = []
        for end in ends:
            session = make_session(last_activity_at=end - timedelta(minutes=12), **fields)
            make_view(session=session, filter_snapshot={"Rooms": 2})
            with transaction.atomic():
                close_sessions([session.id], reason=CloseReason.INACTIVITY, now=end)
            sessions.append(session)
        for new, old in zip(self.topics, (SESSION_ENDED, PROPERTY_OBJECT_VIEW_ENDED), strict=True):
            OutboxMessage.objects.filter(topic=old).update(topic=new.topic)
        return sessions

    def store(self, *ends: datetime, **fields: Any) -> list[Session]:
        """Close, publish and consume."""
        sessions = self.close(*ends, **fields)
        publish_outbox()
        self.consume()
        return sessions

    def consume(self) -> None:
        """Store what the topics hold, and set the groups to their ends, without joining them."""
        for topic, make in zip(self.topics, (SessionFactsHandler, ViewFactsHandler), strict=True):
            handler: Any = make()
            with opened_reader(settings.KAFKA_BOOTSTRAP_SERVERS) as reader:
                records = list(read(reader, topic.topic) or ())
            for record in records:
                read_envelope(record)
            handler.flush(
                [Entry(record, handler.decode(record)) for record in records], lambda: None
            )
            handler.close()
            skip_to_end((topic.topic,), topic.group)

    def run_consumer(self, place: int, *, messages: int) -> None:
        """Let the service's own loop consume so many messages of a topic."""
        topic = self.topics[place]
        consumer = Consumer(
            replace(
                registered_consumers()[(SESSIONS, VIEWS)[place]],
                topics=(topic.topic,),
                group=topic.group,
                limits=lambda: BatchLimits(rows=1000, age=timedelta(0)),
            ),
            open_source=lambda: self._broker.join(topic.topic, topic.group, FIVE_MINUTES),
            publisher=self._broker.publisher(),
            options=ConsumerOptions(),
        )
        drive(
            consumer,
            lambda: sum(self._broker.committed(topic.topic, topic.group).values()) == messages,
        )
        consumer.close()

    def publish_again(self, topic: str, count: int) -> None:
        """Publish as a relay that died before it marked what Kafka had acknowledged."""
        ids = OutboxMessage.objects.filter(topic=topic).order_by("id").values("id")[:count]
        OutboxMessage.objects.filter(id__in=list(ids.values_list("id", flat=True))).update(
            published_at=None
        )
        publish_outbox()

    def reconcile(self, *, since: datetime | None = None, until: datetime | None = None) -> Report:
        writer = FactWriter()
        try:
            return compare.reconcile(
                writer,
                since=since or self.hour,
                until=until or self.hour + HOUR,
                topics=self.topics,
            )
        finally:
            writer.close()


def run_command(stores: Stores, *options: str) -> tuple[int, str]:
    """Run the command over the hour; return its exit code and what it prints."""
    output = StringIO()
    bounds = ["--from", iso_utc(stores.hour), "--to", iso_utc(stores.hour + HOUR)]
    try:
        call_command("reconcile", *bounds, *options, stdout=output)
    except CommandError as exc:
        return exc.returncode, f"{output.getvalue()}{exc}"
    return 0, output.getvalue()


def lose(clickhouse: Client, table: str, column: str, row_id: UUID) -> None:
    clickhouse.command(
        f"DELETE FROM {table} WHERE {column} = {{id:UUID}}", parameters={"id": row_id}
    )


def stored(number: int, **differences: Any) -> Count:
    """Of an hour in which so many ended and arrived."""
    whole = Count(closed=number, outbox=number, kafka=number, facts=number)
    return replace(whole, **differences)
