"""The consumer of session facts against its limit: a bare poll and insert of the same batches.

`make bench NAME=ingest` lets both read the same topic in turn, into emptied tables. The bare way
polls with kafka-python, throws the messages away, and inserts rows that were made before, 1,000 at
a time, committing after each. The consumer is that of production: it decodes, checks,
follows traces, inserts under tokens, commits. Both have their partitions assigned, since joining a
group takes seconds and proves nothing. `cpu_us_per_event` is of the whole process.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.management import call_command
from kafka import KafkaProducer, TopicPartition

from bench.measure import BenchFailed, Samples, conclude, interleave, ratio_range, say
from devstats.clickhouse import connect_writer
from devstats.facts import SessionFact, decode_session
from devstats.tables import SESSION_FACTS
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.producer import DeliveryError, Message
from pinactivity.kafka.source import KafkaSource
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.testing import record
from pinactivity.kafka.topic_admin import create_topics
from pinactivity.process.interpreter import settle

CONSUMER, BARE = "consumer", "bare poll and insert"
_PARTITIONS = 6
_ROWS = 1000


class WholeTopic(KafkaSource):
    """Has every partition of a topic, from its beginning; in no group."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            topics=(topic,),
            group=f"bench-{new_id().hex}",
            max_poll_interval=timedelta(minutes=5),
            session_timeout=timedelta(seconds=45),
        )
        self._consumer.unsubscribe()
        partitions = [TopicPartition(topic, number) for number in range(_PARTITIONS)]
        self._consumer.assign(partitions)
        self._consumer.seek_to_beginning(*partitions)
        for partition in partitions:
            self._consumer.position(partition)

    def poll_bare(self) -> Mapping[TopicPartition, Sequence[Any]]:
        """Poll as kafka-python does it."""
        polled: Mapping[TopicPartition, Sequence[Any]] = self._consumer.poll(
            timeout_ms=500, max_records=_ROWS
        )
        return polled


class NoDeadLetters:
    """A publisher that is never asked: the messages are sound."""

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        raise BenchFailed("There is a dead-letter record.")

    def close(self) -> None:
        pass


def _payload(moment: datetime) -> dict[str, Any]:
    return {
        "SessionId": str(new_id()),
        "AnonymousId": str(new_id()),
        "UserId": str(new_id()),
        "CreatedAt": iso_utc(moment - timedelta(minutes=5)),
        "LastActivityAt": iso_utc(moment),
        "DurationSeconds": 300,
    }


def _fill(topic: str, events: int) -> list[SessionFact]:
    """Publish events as the relay does; return the rows that they become."""
    create_topics(
        [topic],
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=_PARTITIONS,
        replication=1,
        retention=timedelta(days=30),
    )
    producer = KafkaProducer(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, acks="all", linger_ms=20
    )
    moment = datetime.now(UTC)
    facts = []
    for _ in range(events):
        payload = _payload(moment)
        message = record(
            topic,
            payload,
            headers={
                "EventType": "SessionEndedKafkaEvent",
                "AggregateType": "Session",
                "AggregateId": payload["SessionId"],
                "Version": "2",
                "CorrelationId": str(new_id()),
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            },
        )
        facts.append(decode_session(message))
        producer.send(
            topic,
            key=payload["SessionId"].encode(),
            value=json.dumps(payload).encode(),
            headers=[(name, text.encode()) for name, text in message.text_headers.items()],
        )
    producer.flush()
    producer.close()
    return facts


class Bench:
    def __init__(self, events: int) -> None:
        self.events = events
        self.topic = f"pin.bench.session-ended-{new_id().hex}"
        self.rows = _fill(self.topic, events)
        self.client = connect_writer()
        self.source = WholeTopic(self.topic)
        self.cpu: dict[str, float] = {}
        settle()  # as `consume` does; the rows made beforehand are in no consumer

    def prepare(self) -> None:
        self.client.command(f"TRUNCATE TABLE {SESSION_FACTS.name}")
        self.source.close()
        self.source = WholeTopic(self.topic)

    def check(self, name: str) -> None:
        stored = self.client.query(f"SELECT count() FROM {SESSION_FACTS.name}").result_rows[0][0]
        if stored != self.events:
            raise BenchFailed(f"{name} stored {stored} of {self.events} rows.")

    def run_consumer(self) -> None:
        began = time.process_time()
        consumer = Consumer(
            replace(
                registered_consumers()["dev-stats-session-ended"],
                topics=(self.topic,),
                limits=lambda: BatchLimits(rows=_ROWS, age=timedelta(seconds=1)),
            ),
            open_source=lambda: self.source,
            publisher=NoDeadLetters(),
            options=ConsumerOptions(),
        )
        committed = 0
        while committed < self.events:
            committed += consumer.run_once().committed
        self._note(CONSUMER, began)
        consumer.close()

    def run_bare(self) -> None:
        began = time.process_time()
        polled = written = 0
        positions: dict[tuple[str, int], int] = {}
        while written < self.events:
            for part, batch in self.source.poll_bare().items():
                polled += len(batch)
                positions[part.topic, part.partition] = batch[-1].offset + 1
            if polled - written >= _ROWS or polled == self.events:
                self.client.insert(
                    SESSION_FACTS.name,
                    self.rows[written:polled],
                    column_names=list(SESSION_FACTS.columns),
                    column_type_names=list(SESSION_FACTS.columns.values()),
                )
                self.source.commit(positions)
                written = polled
        self._note(BARE, began)

    def _note(self, name: str, began: float) -> None:
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - began


def main() -> None:
    """Measure, prove, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.ingest", description=__doc__)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=5, help="of each way")
    parser.add_argument("--quick", action="store_true", help="a few seconds: does it work?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.events, arguments.repeats = 5_000, 1
    call_command("migrate_clickhouse", verbosity=0)
    bench = Bench(arguments.events)
    say(f"{arguments.events} events in {bench.topic}")
    samples = interleave(
        {CONSUMER: bench.run_consumer, BARE: bench.run_bare},
        work=arguments.events,
        repeats=arguments.repeats,
        prepare=bench.prepare,
        check=bench.check,
    )
    conclude(_summarise(bench, samples))


def _summarise(bench: Bench, samples: Mapping[str, Samples]) -> dict[str, Any]:
    consumer, bare = samples[CONSUMER], samples[BARE]
    handled = bench.events * len(consumer.seconds)
    return {
        "name": "ingest",
        "events": bench.events,
        "consumer_rows_per_second": round(consumer.per_second),
        "bare_rows_per_second": round(bare.per_second),
        "ratio": round(consumer.per_second / bare.per_second, 3),
        "ratio_range": ratio_range(consumer, bare),
        "consumer_cpu_us_per_event": round(bench.cpu[CONSUMER] / handled * 1e6, 1),
        "bare_cpu_us_per_event": round(bench.cpu[BARE] / handled * 1e6, 1),
    }


if __name__ == "__main__":
    main()
