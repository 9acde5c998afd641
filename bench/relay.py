"""The relay against its limit: a bare kafka-python producer, same settings, broker and messages.

`make bench NAME=relay` measures

- the rate: events/s of the relay with a backlog, in turn with a producer that has the same bytes
  ready and waits for each acknowledgement; and the CPU time of each for an event. The producer
  has kafka-python's partitioner. The interpreter is tuned for both, as in a worker;
- the latency: this process writes 500 events/s, 10 a transaction, and a worker of Celery publishes
  them, woken by commits and by the ticks of Celery's beat. It is the time from just before the
  commit until a consumer has the event, which is after Kafka's acknowledgement;
- the rate at full load beside a REPEATABLE READ transaction: the last quarter of that time by the
  rate before it (`held_xmin_ratio`; `--held-seconds 600` for the design's case).
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from bench.measure import (
    BenchFailed,
    Samples,
    conclude,
    database_url,
    interleave,
    own_database,
    ratio_range,
    say,
)
from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.pending_messages import fetch_messages
from outbox.relay import OutboxRelay
from outbox.services import enqueue
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import KafkaPublisher, Message, producer_settings
from pinactivity.kafka.topic_admin import create_topics, find_ends
from pinactivity.kafka.topics import SESSION_ENDED, TOPICS
from pinactivity.postgres.clock import statement_time
from pinactivity.process.interpreter import settle
from sessions.events import SessionEnded

RELAY, BARE = "relay", "bare producer"
_RATE = 500
_EVENTS_A_TRANSACTION = 10


def _ended(moment: datetime) -> SessionEnded:
    return SessionEnded(
        session_id=new_id(),
        anonymous_id=new_id(),
        user_id=new_id(),
        created_at=iso_utc(moment - timedelta(minutes=5)),
        last_activity_at=iso_utc(moment),
        duration_seconds=300,
        version=2,
    )


def _write(count: int) -> None:
    """Write events into the outbox, as the closer does."""
    for first in range(0, count, 400):
        with transaction.atomic():
            moment = statement_time()
            enqueue(_ended(moment) for _ in range(min(400, count - first)))


# -- the rate --------------------------------------------------------------------------------


class Backlog:
    """Events that each load makes pending again, and their bytes, ready to send."""

    def __init__(self, events: int) -> None:
        self.events = events
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE outbox_messages RESTART IDENTITY")
            _write(events)
            cursor.execute("DROP TABLE IF EXISTS backlog")
            cursor.execute("CREATE TABLE backlog AS SELECT * FROM outbox_messages")
        rows = fetch_messages(OutboxMessage.objects.order_by("id"), events)
        self.messages: list[Message] = [row.message for row in rows]

    def load(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE outbox_messages")
            cursor.execute("INSERT INTO outbox_messages SELECT * FROM backlog ORDER BY id")
            cursor.execute("VACUUM (ANALYZE) outbox_messages")
            cursor.execute("CHECKPOINT")


class CpuTime:
    """Sums up the CPU time of this process, by the name of what ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, name: str, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before = time.process_time()
            call()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - before

        return run


def _publisher(options: OutboxOptions) -> KafkaPublisher:
    return KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        delivery_timeout=options.delivery_timeout,
    )


def measure_rate(events: int, repeats: int, options: OutboxOptions) -> dict[str, Any]:
    """Measure relay and bare producer in turn, on the same backlog."""
    backlog = Backlog(events)
    publisher = _publisher(options)
    # It sends the whole backlog at once, which may take longer than the 8 s of a wave.
    bare = KafkaProducer(
        **producer_settings(120.0, most_bytes=1024 * 1024),
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
    )
    bare.partitions_for(SESSION_ENDED)
    publisher.publish(backlog.messages[:1])  # connects, as the bare producer has

    def run_relay() -> None:
        # A new one each time: the ids begin again.
        result = OutboxRelay(publisher=publisher, options=options).run()
        if result.published != events:
            raise BenchFailed(f"The relay did not publish everything: {result}")

    def run_bare() -> None:
        futures = [
            bare.send(each.topic, key=each.key, value=each.value, headers=list(each.headers))
            for each in backlog.messages
        ]
        bare.flush()
        for future in futures:
            future.get(timeout=60)

    cpu = CpuTime()
    settle()
    try:
        samples = interleave(
            {RELAY: cpu.of(RELAY, run_relay), BARE: cpu.of(BARE, run_bare)},
            work=events,
            repeats=repeats,
            prepare=backlog.load,
            check=lambda _: None,
        )
    finally:
        bare.close()
        publisher.close()
    return _summarise_rate(samples[RELAY], samples[BARE], cpu)


def _summarise_rate(relay: Samples, bare: Samples, cpu: CpuTime) -> dict[str, Any]:
    sent = relay.work * len(relay.seconds)
    return {
        "relay_events_per_second": round(relay.per_second),
        "bare_events_per_second": round(bare.per_second),
        "ratio": round(relay.per_second / bare.per_second, 3),
        "ratio_range": ratio_range(relay, bare),
        "ratio_of_fastest": round(relay.fastest / bare.fastest, 3),
        "relay_cpu_us_per_event": round(cpu.seconds[RELAY] / sent * 1e6, 1),
        "bare_cpu_us_per_event": round(cpu.seconds[BARE] / sent * 1e6, 1),
    }


# -- the latency -----------------------------------------------------------------------------


@contextmanager
def _worker() -> Iterator[None]:
    """Run a worker of the queue `relay` and a beat, as deployed, on the bench's database."""
    environment = {**os.environ, "DATABASE_URL": database_url(), "LOG_LEVEL": "ERROR"}
    celery = [sys.executable, "-m", "celery", "-A", "pinactivity.celery"]
    options = [
        *("worker", "--pool", "threads", "--queues", "relay", "--concurrency", "2"),
        *("--purge", "--without-mingle", "--without-gossip"),
    ]
    commands = (
        [*celery, *options],
        [*celery, "beat", "--schedule", "/tmp/bench-relay-beat"],
    )
    processes = [
        subprocess.Popen(
            command,
            cwd=settings.BASE_DIR,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@contextmanager
def _arrivals() -> Iterator[dict[bytes, float]]:
    """Consume; yield the keys that have arrived so far, each with the time of its arrival.

    At the end of the block every message of the broker is among them.
    """
    consumer = KafkaConsumer(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, group_id=None, enable_auto_commit=False
    )
    numbers = consumer.partitions_for_topic(SESSION_ENDED)
    find_ends(consumer, [TopicPartition(SESSION_ENDED, number) for number in numbers or ()])
    arrived: dict[bytes, float] = {}
    is_over = threading.Event()

    def consume() -> None:
        while (batches := consumer.poll(timeout_ms=1000)) or not is_over.is_set():
            now = time.monotonic()
            arrived.update((record.key, now) for batch in batches.values() for record in batch)

    try:
        with ThreadPoolExecutor(1) as pool:
            consuming = pool.submit(consume)
            try:
                yield arrived
            finally:
                is_over.set()
            consuming.result()
    finally:
        consumer.close()


def measure_latency(seconds: float) -> dict[str, Any]:
    """Write at a steady pace while a worker publishes; the first event only warms up."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox_messages RESTART IDENTITY")
    interval = _EVENTS_A_TRANSACTION / _RATE
    with _worker(), _arrivals() as arrived:
        _write(1)
        _wait_for_delivery(60)
        began = time.monotonic()
        committed: dict[bytes, float] = {}
        for number in range(int(seconds / interval)):
            time.sleep(max(began + number * interval - time.monotonic(), 0.0))
            moment = statement_time()
            events = [_ended(moment) for _ in range(_EVENTS_A_TRANSACTION)]
            with transaction.atomic():
                enqueue(events)
                now = time.monotonic()
            committed |= {str(event.session_id).encode(): now for event in events}
        seconds_taken = time.monotonic() - began
        _wait_for_delivery(60)
    latencies = [(arrived[key] - at) * 1000 for key, at in committed.items()]
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "latency_events_per_second": round(len(committed) / seconds_taken),
        "latency_p50_ms": round(cuts[49], 1),
        "latency_p99_ms": round(cuts[98], 1),
        "latency_max_ms": round(max(latencies), 1),
    }


def _wait_for_delivery(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while OutboxMessage.objects.pending().exists():
        if time.monotonic() > deadline:
            raise BenchFailed("The worker did not publish everything in time.")
        time.sleep(0.05)


# -- the held transaction --------------------------------------------------------------------


@contextmanager
def _held_snapshot() -> Iterator[None]:
    """Hold a REPEATABLE READ transaction, as a report or a dump does."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SET idle_in_transaction_session_timeout = 0")
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM sessions")
            yield
    finally:
        other.close()


def measure_held(seconds: float, options: OutboxOptions) -> dict[str, Any]:
    """Measure the relay at full load, first without and then beside a held transaction.

    Only the time of the relay counts. Between its runs a chunk of events is written.
    """
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox_messages RESTART IDENTITY")
        cursor.execute("VACUUM (ANALYZE) outbox_messages")
    publisher = _publisher(options)
    relay = OutboxRelay(publisher=publisher, options=options)
    chunk = 5 * options.batch_size

    def rate(during: float) -> list[float]:
        rates = []
        until = time.monotonic() + during
        while time.monotonic() < until:
            _write(chunk)
            began = time.monotonic()
            if relay.run().published != chunk:
                raise BenchFailed("The relay did not publish everything.")
            rates.append(chunk / (time.monotonic() - began))
        return rates

    try:
        rate(2.0)  # warms up
        before = rate(max(seconds / 6, 5.0))
        with _held_snapshot():
            held = rate(seconds)
    finally:
        publisher.close()
    last = held[-max(len(held) // 4, 1) :]
    say(f"held for {seconds:.0f} s: {[round(each) for each in held[:: max(len(held) // 10, 1)]]}")
    return {
        "held_seconds": seconds,
        "held_events": chunk * len(held),
        "before_events_per_second": round(statistics.median(before)),
        "held_last_events_per_second": round(statistics.median(last)),
        "held_xmin_ratio": round(statistics.median(last) / statistics.median(before), 3),
    }


# -- the bench -------------------------------------------------------------------------------


def main() -> None:
    """Measure, prove, print."""
    arguments = _parse_arguments()
    options = OutboxOptions()
    if arguments.batch_size:
        options = OutboxOptions(batch_size=arguments.batch_size)
    create_topics(
        TOPICS,
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=6,
        replication=1,
        retention=timedelta(days=30),
    )
    result: dict[str, Any] = {"name": "relay", "events": arguments.events}
    with own_database():
        result |= measure_rate(arguments.events, arguments.repeats, options)
        say(str(result))
        result |= measure_latency(arguments.latency_seconds)
        say(str(result))
        result |= measure_held(arguments.held_seconds, options)
    conclude({**result, "batch_size": options.batch_size, "repeats": arguments.repeats})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    parser.add_argument("--events", type=int, default=30_000)
    parser.add_argument("--repeats", type=int, default=3, help="of each way")
    parser.add_argument("--latency-seconds", type=float, default=20.0)
    parser.add_argument("--held-seconds", type=float, default=60.0)
    parser.add_argument("--batch-size", type=int, help="default: the option's")
    parser.add_argument("--quick", action="store_true", help="a few seconds each")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.events, arguments.repeats = 5_000, 1
        arguments.latency_seconds = arguments.held_seconds = 5.0
    return arguments


if __name__ == "__main__":
    main()
