"""What tests of consumers share: the two brokers in one form, a handler, and a driver."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

from django.conf import settings
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from prometheus_client import REGISTRY

from pinactivity.core.ids import new_id
from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.producer import DeliveryError, KafkaPublisher, Message, Publisher
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.source import KafkaSource, Source, to_record
from pinactivity.kafka.spec import ConsumerSpec, SinkUnavailable, registered_consumers
from pinactivity.kafka.testing import InMemoryBroker, message
from pinactivity.kafka.topic_admin import create_topics, find_ends
from pinactivity.kafka.topics import dead_letter_topic

PARTITIONS = 6
FIVE_MINUTES = timedelta(minutes=5)
SESSION_TIMEOUT = timedelta(seconds=6)
"""The least that Apache Kafka takes; the embedded broker waits for half of it at a first join."""


class Broker(Protocol):
    """The in-memory broker or the real one."""

    def create(self, topic: str) -> None: ...
    def send(self, messages: Sequence[Message]) -> None: ...
    def send_tombstone(self, topic: str, key: bytes) -> None: ...
    def join(self, topic: str, group: str, max_poll_interval: timedelta) -> Source: ...
    def publisher(self) -> Publisher: ...
    def committed(self, topic: str, group: str) -> dict[int, int]: ...
    def read(self, topic: str) -> list[Record]: ...
    def close(self) -> None: ...


class MemoryBroker:
    def __init__(self) -> None:
        self._broker = InMemoryBroker()

    def create(self, topic: str) -> None:
        self._broker.create_topic(topic, partitions=PARTITIONS)

    def send(self, messages: Sequence[Message]) -> None:
        assert self._broker.publish(messages) == [None] * len(messages)

    def send_tombstone(self, topic: str, key: bytes) -> None:
        assert self._broker.append(topic, key, None) is None

    def join(self, topic: str, group: str, max_poll_interval: timedelta) -> Source:
        return self._broker.join((topic,), group, max_poll_interval=max_poll_interval)

    def publisher(self) -> Publisher:
        return self._broker

    def committed(self, topic: str, group: str) -> dict[int, int]:
        return {number: offset for (_, number), offset in self._broker.committed(group).items()}

    def read(self, topic: str) -> list[Record]:
        return self._broker.read(topic)

    def close(self) -> None:
        pass


class RealBroker:
    """The broker of KAFKA_BOOTSTRAP_SERVERS, or another."""

    def __init__(self, servers: list[str] | None = None) -> None:
        self._servers = servers or settings.KAFKA_BOOTSTRAP_SERVERS
        self._producer = KafkaProducer(bootstrap_servers=self._servers, acks="all")

    def create(self, topic: str) -> None:
        create_topics(
            [topic],
            bootstrap_servers=self._servers,
            partitions=PARTITIONS,
            replication=1,
            retention=timedelta(days=30),
        )

    def send(self, messages: Sequence[Message]) -> None:
        futures = [
            self._producer.send(
                each.topic, key=each.key, value=each.value, headers=list(each.headers)
            )
            for each in messages
        ]
        for future in futures:
            future.get(timeout=30)

    def send_tombstone(self, topic: str, key: bytes) -> None:
        self._producer.send(topic, key=key, value=None).get(timeout=30)

    def join(self, topic: str, group: str, max_poll_interval: timedelta) -> Source:
        return KafkaSource(
            bootstrap_servers=self._servers,
            topics=(topic,),
            group=group,
            max_poll_interval=max_poll_interval,
            session_timeout=SESSION_TIMEOUT,
        )

    def publisher(self) -> Publisher:
        return KafkaPublisher(
            bootstrap_servers=self._servers, delivery_timeout=timedelta(seconds=4)
        )

    def committed(self, topic: str, group: str) -> dict[int, int]:
        consumer = KafkaConsumer(
            bootstrap_servers=self._servers, group_id=group, enable_auto_commit=False
        )
        try:
            found = {
                number: consumer.committed(TopicPartition(topic, number))
                for number in range(PARTITIONS)
            }
        finally:
            consumer.close()
        return {number: offset for number, offset in found.items() if offset is not None}

    def read(self, topic: str) -> list[Record]:
        consumer = KafkaConsumer(
            bootstrap_servers=self._servers,
            group_id=None,
            enable_auto_commit=False,
            fetch_max_wait_ms=100,
        )
        try:
            parts = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            ends = find_ends(consumer, parts)
            consumer.seek_to_beginning(*parts)
            records: list[Record] = []
            while any(consumer.position(part) < ends[part] for part in parts):
                for batch in consumer.poll(timeout_ms=500).values():
                    records += map(to_record, batch)
        finally:
            consumer.close()
        return sorted(records, key=lambda record: (record.partition, record.offset))

    def close(self) -> None:
        self._producer.close()


class NumberHandler:
    """Keeps the numbers that it gets, where a test can see them; misbehaves as a test asks."""

    all_prefetch: ClassVar = False

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.batches: list[list[int]] = []
        self.records: list[Record] = []
        self.down = False
        self.refused: set[int] = set()
        self.on_flush: Callable[[Sequence[Entry[int]]], object] = len
        self.prefetches = NumberHandler.all_prefetch
        self.is_closed = False

    def decode(self, record: Record) -> int | None:
        payload = record.payload()
        if "Skip" in payload:
            return None
        number = payload.get("Number")
        if not isinstance(number, int):
            raise Poison("number-missing")
        return number

    def flush(self, entries: Sequence[Entry[int]], while_waiting: Callable[[], None]) -> None:
        if self.prefetches:
            while_waiting()
        self.on_flush(entries)
        if self.down:
            raise SinkUnavailable
        rows = [entry.row for entry in entries]
        if self.refused.intersection(rows):
            raise Poison("number-refused")
        self.batches.append(rows)
        self.numbers += rows
        self.records += [entry.record for entry in entries]

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A topic, its dead-letter topic and a group of their own, on one of the brokers."""

    def __init__(self, broker: Broker, *, dead_letters: bool = True) -> None:
        self.broker = broker
        unique = new_id().hex
        self.topic = f"pin.test.numbers-{unique}"
        self.group = f"test-{unique}"
        self.dead_letter_topic = dead_letter_topic(self.topic, self.group)
        broker.create(self.topic)
        if dead_letters:
            self.create_dead_letter_topic()
        self._consumers: list[Consumer] = []

    def create_dead_letter_topic(self) -> None:
        self.broker.create(self.dead_letter_topic)

    def send(self, *numbers: int, headers: Any = None) -> None:
        self.broker.send(
            [
                message(self.topic, {"Number": number}, key=str(number).encode(), headers=headers)
                for number in numbers
            ]
        )

    def send_bytes(self, *values: bytes, key: bytes | None = None, headers: Any = None) -> None:
        self.broker.send([message(self.topic, value, key=key, headers=headers) for value in values])

    def consumer(
        self,
        handler: NumberHandler,
        *,
        rows: int = 1000,
        age: float = 0.0,
        one_by_one: bool = False,
        max_poll_interval: timedelta = FIVE_MINUTES,
        clock: Callable[[], float] = time.monotonic,
        publisher: Publisher | None = None,
        open_source: Callable[[], Source] | None = None,
        **options: Any,
    ) -> Consumer:
        consumer = Consumer(
            ConsumerSpec(
                name="numbers",
                topics=(self.topic,),
                group=self.group,
                handler=lambda: handler,
                limits=lambda: BatchLimits(rows=rows, age=timedelta(seconds=age)),
                one_by_one=one_by_one,
            ),
            open_source=open_source
            or (lambda: self.broker.join(self.topic, self.group, max_poll_interval)),
            publisher=publisher or self.broker.publisher(),
            options=ConsumerOptions(
                **{
                    "first_wait": timedelta(milliseconds=50),
                    "longest_wait": timedelta(milliseconds=200),
                    **options,
                }
            ),
            clock=clock,
        )
        self._consumers.append(consumer)
        return consumer

    @property
    def committed(self) -> int:
        """How many messages lie before the group's offsets."""
        return sum(self.broker.committed(self.topic, self.group).values())

    @property
    def dead_letters(self) -> list[Record]:
        return self.broker.read(self.dead_letter_topic)

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()


class RefusingPublisher:
    """Acknowledges nothing while `refuses`."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.refuses = True
        self.asked = 0

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        self.asked += 1
        if self.refuses:
            return [DeliveryError("NotEnoughReplicasError", is_permanent=False)] * len(messages)
        return self._publisher.publish(messages)

    def close(self) -> None:
        self._publisher.close()


def real_consumer(name: str) -> Consumer:
    """Return a member of a consumer of the service, on the real broker."""
    spec = registered_consumers()[name]
    servers = settings.KAFKA_BOOTSTRAP_SERVERS
    return Consumer(
        spec,
        open_source=lambda: KafkaSource(
            bootstrap_servers=servers,
            topics=spec.topics,
            group=spec.group,
            max_poll_interval=FIVE_MINUTES,
            session_timeout=SESSION_TIMEOUT,
        ),
        publisher=KafkaPublisher(bootstrap_servers=servers, delivery_timeout=timedelta(seconds=4)),
        options=ConsumerOptions(),
    )


def drive(consumer: Consumer, until: Callable[[], object], *, seconds: float = 90) -> None:
    """Turn the loop until a condition holds; a first join of a group can take 20 s.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "the loop did not get there"
        consumer.run_once()


def handled_offsets(handlers: Sequence[NumberHandler]) -> dict[int, set[int]]:
    """Return the offsets that reached a sink, by partition."""
    offsets: dict[int, set[int]] = {}
    for handler in handlers:
        for record in handler.records:
            offsets.setdefault(record.partition, set()).add(record.offset)
    return offsets


def count_numbers(handlers: Sequence[NumberHandler]) -> Counter[int]:
    return Counter(number for handler in handlers for number in handler.numbers)


def metric(name: str, bench: Bench, **labels: str) -> float | None:
    """Return a sample of the bench's consumer."""
    return REGISTRY.get_sample_value(name, {"group": bench.group, **labels})
