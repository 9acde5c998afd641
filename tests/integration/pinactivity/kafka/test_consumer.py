"""The consumers' loop (design, section 10): the same tests on the in-memory and the real broker."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from embedded.stack import private_server
from pinactivity.kafka.dead_lettering import PoisonLimitReached
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.source import CommitRefused, Source
from tests.consuming import (
    Bench,
    Broker,
    Clock,
    NumberHandler,
    RealBroker,
    RefusingPublisher,
    count_numbers,
    drive,
    handled_offsets,
)

pytestmark = pytest.mark.kafka


def test_messages_are_written_and_then_committed(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(20))

    drive(bench.consumer(handler), lambda: len(handler.numbers) == 20 and bench.committed == 20)

    assert sorted(handler.numbers) == list(range(20))
    assert bench.dead_letters == []


def test_order_within_a_key_is_kept(bench: Bench, handler: NumberHandler) -> None:
    for number in range(30):
        bench.send_bytes(json.dumps({"Number": number}).encode(), key=b"one key")

    drive(bench.consumer(handler, rows=7), lambda: len(handler.numbers) == 30)

    assert handler.numbers == list(range(30))


def test_full_batch_is_flushed_at_once(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(25))
    clock = Clock()
    consumer = bench.consumer(handler, rows=10, age=5, clock=clock)

    drive(consumer, lambda: len(handler.numbers) == 20)

    assert [len(batch) for batch in handler.batches] == [10, 10]
    assert bench.committed == 20


def test_batch_that_is_not_full_waits_for_its_age(bench: Bench, handler: NumberHandler) -> None:
    bench.send(1, 2, 3)
    clock = Clock()
    consumer = bench.consumer(handler, rows=10, age=5, clock=clock)
    polled = 0
    while polled < 3:
        polled += consumer.run_once().polled
    clock.now += 4.9
    consumer.run_once()
    assert handler.batches == []
    assert bench.committed == 0

    clock.now += 0.1
    consumer.run_once()

    assert [sorted(batch) for batch in handler.batches] == [[1, 2, 3]]
    assert bench.committed == 3


def test_poison_is_dead_lettered_and_the_partition_goes_on_c53(
    bench: Bench, handler: NumberHandler
) -> None:
    bench.send_bytes(b'{"Number": 1}', key=b"k")
    bench.send_bytes(b"\xff\xfe", key=b"k", headers={"Extra": b"\x00\xff", "MessageId": None})
    bench.send_bytes(b"\xff\xfe", key=b"k", headers={"Extra": b"\x00\xff"})
    bench.send_bytes(b'{"Number": 2}', key=b"k")

    with capture_logs() as logs:
        drive(bench.consumer(handler), lambda: bench.committed == 4)

    assert handler.numbers == [1, 2]
    first, second = bench.dead_letters
    original = [record for record in bench.broker.read(bench.topic) if record.value == b"\xff\xfe"]
    for dead_letter, source, reason in zip(
        (first, second), original, (b"message-id-missing", b"value-not-json"), strict=True
    ):
        assert (dead_letter.key, dead_letter.value) == (b"k", b"\xff\xfe")
        headers = dict(dead_letter.headers)
        at = headers.pop("dlq-at")
        assert at is not None
        assert datetime.now(UTC) - datetime.fromisoformat(at.decode()) < timedelta(minutes=5)
        assert headers == {
            **dict(source.headers),
            "dlq-reason": reason,
            "dlq-topic": bench.topic.encode(),
            "dlq-partition": str(source.partition).encode(),
            "dlq-offset": str(source.offset).encode(),
        }
    skipped = [line for line in logs if line["event"] == "skipped-poison"]
    assert [(line["reason"], line["log_level"]) for line in skipped] == [
        ("message-id-missing", "error"),
        ("value-not-json", "error"),
    ]
    assert skipped[1]["SourceEventId"] == dict(original[1].headers)["MessageId"].decode()  # type: ignore[union-attr]  # it is there


def test_refused_dead_letter_holds_the_offset_c54(bench: Bench, handler: NumberHandler) -> None:
    publisher = RefusingPublisher(bench.broker.publisher())
    bench.send_bytes(b'{"Number": 1}', b"no json", b'{"Number": 2}', key=b"k")
    consumer = bench.consumer(handler, publisher=publisher)

    drive(consumer, lambda: publisher.asked >= 3)
    assert bench.committed == 0
    assert consumer.waits_for == "DeadLettersRefused"
    publisher.refuses = False
    drive(consumer, lambda: bench.committed == 3)

    assert handler.numbers == [1, 2], "a refused dead-letter record repeats no row"
    assert [dead_letter.value for dead_letter in bench.dead_letters] == [b"no json"]
    assert consumer.waits_for is None


def test_too_many_poison_messages_in_a_row_stop_the_consumer(
    bench: Bench, handler: NumberHandler
) -> None:
    good, bad = b'{"Number": 1}', b"no json"
    bench.send_bytes(good, bad, bad, bad, good, bad, bad, bad, bad, good, key=b"k")
    consumer = bench.consumer(handler, poison_limit=3)

    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)

    assert len(bench.dead_letters) == 6
    assert bench.committed == 8, "the fourth in a row is the first message not handled"


def test_poison_limit_counts_across_batches_and_zero_is_none(
    bench: Bench, handler: NumberHandler
) -> None:
    bench.send_bytes(*[b"no json"] * 12, key=b"k")
    consumer = bench.consumer(handler, rows=2, poison_limit=5)
    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)
    assert len(bench.dead_letters) == bench.committed == 5
    consumer.close()

    drive(bench.consumer(handler, rows=2, poison_limit=0), lambda: bench.committed == 12)


def test_tombstones_are_skipped(bench: Bench, handler: NumberHandler) -> None:
    bench.broker.send_tombstone(bench.topic, b"k")
    bench.send_bytes(b'{"Number": 1}', key=b"k")
    bench.broker.send_tombstone(bench.topic, b"k")

    drive(bench.consumer(handler), lambda: bench.committed == 3)

    assert handler.numbers == [1]
    assert bench.dead_letters == []


def test_dead_sink_loses_neither_membership_nor_messages_c51(
    bench: Bench, handler: NumberHandler
) -> None:
    """The outage lasts several times the longest poll interval."""
    interval = timedelta(seconds=2)
    consumer = bench.consumer(handler, rows=10, max_poll_interval=interval)
    bench.send(*range(5))
    drive(consumer, lambda: bench.committed == 5)
    handler.down = True
    bench.send(*range(5, 40))

    with capture_logs() as logs:
        outage_ends = time.monotonic() + 4 * interval.total_seconds()
        drive(consumer, lambda: time.monotonic() > outage_ends)
        assert bench.committed == 5
        assert consumer.waits_for == "SinkUnavailable"
        handler.down = False
        drive(consumer, lambda: bench.committed == 40)

    assert sorted(handler.numbers) == list(range(40)), "no loss, and nothing twice"
    events = [line["event"] for line in logs]
    assert "partitions gone" not in events
    assert events.count("failed") > 10
    waits = [line["retryInSeconds"] for line in logs if line["event"] == "failed"]
    assert waits[:4] == [0.05, 0.1, 0.2, 0.2]


def test_what_was_written_but_not_committed_comes_again(
    bench: Bench, handler: NumberHandler
) -> None:
    """The end of a process between the writing and the commit, without the process."""

    class Killed(BaseException):
        pass

    def open_source() -> Source:
        source = bench.broker.join(bench.topic, bench.group, timedelta(minutes=5))

        def die(offsets: Any) -> None:
            source.close()  # the broker would notice after 45 s
            raise Killed

        source.commit = die  # type: ignore[method-assign]  # this is the place to die at
        return source

    bench.send(*range(10))
    with pytest.raises(Killed):
        drive(bench.consumer(handler, open_source=open_source), lambda: False)
    assert handler.numbers
    assert bench.committed == 0

    survivor = NumberHandler()
    drive(bench.consumer(survivor), lambda: bench.committed == 10)

    assert sorted(survivor.numbers) == list(range(10))


def test_refused_commit_is_tried_again_without_writing_again(
    bench: Bench, handler: NumberHandler
) -> None:
    refusals = 2
    opened: list[Source] = []

    def open_source() -> Source:
        source = bench.broker.join(bench.topic, bench.group, timedelta(minutes=5))
        commit = source.commit

        def refuse(offsets: Any) -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise CommitRefused
            commit(offsets)

        source.commit = refuse  # type: ignore[method-assign]  # the broker's fault
        opened.append(source)
        return source

    bench.send(*range(5))

    drive(bench.consumer(handler, open_source=open_source), lambda: bench.committed == 5)

    assert refusals == 0
    assert sorted(handler.numbers) == list(range(5))


def test_members_that_come_and_go_lose_nothing_c52(bench: Bench) -> None:
    """Each handler notes what it wrote; the offsets are checked against that all the time."""
    handlers: list[NumberHandler] = []
    stop_all, produced = threading.Event(), 0

    def consume(stop: threading.Event) -> None:
        handler = NumberHandler()
        handlers.append(handler)
        bench.consumer(handler, rows=20, age=0.2).run(lambda: stop.is_set() or stop_all.is_set())

    def check() -> None:
        offsets = bench.broker.committed(bench.topic, bench.group)
        handled = handled_offsets(handlers)
        for partition, offset in offsets.items():
            assert set(range(offset)) <= handled.get(partition, set())

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(consume, threading.Event())]
        try:
            for _ in range(4):
                visitor = threading.Event()
                threads.append(pool.submit(consume, visitor))
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    bench.send(*range(produced, produced + 50))
                    produced += 50
                    time.sleep(0.1)
                visitor.set()
                threads.pop().result(timeout=60)
                check()
            deadline = time.monotonic() + 60
            while bench.committed < produced and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            stop_all.set()
        for thread in threads:
            thread.result(timeout=60)

    check()
    assert bench.committed == produced
    counts = count_numbers(handlers)
    assert set(counts) == set(range(produced))


def test_stop_flushes_and_commits_what_was_read(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(10))
    consumer = bench.consumer(handler, age=60)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(consumer.run, stop.is_set)
        deadline = time.monotonic() + 60
        while consumer.unstored < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert handler.numbers == []
        stop.set()
        running.result(timeout=30)

    assert sorted(handler.numbers) == list(range(10))
    assert bench.committed == 10
    assert handler.is_closed


def test_one_by_one_gives_each_message_its_own_flush(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(8))

    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 8)

    assert [len(batch) for batch in handler.batches] == [1] * 8


def test_refused_row_among_many_is_found_by_halving_c50(
    bench: Bench, handler: NumberHandler
) -> None:
    handler.refused = {37}
    bench.send(*range(100))

    drive(bench.consumer(handler, rows=100, age=1), lambda: bench.committed == 100)

    assert sorted(handler.numbers) == [number for number in range(100) if number != 37]
    (dead_letter,) = bench.dead_letters
    assert json.loads(dead_letter.value) == {"Number": 37}
    assert dict(dead_letter.headers)["dlq-reason"] == b"number-refused"


def test_second_consumer_of_another_group_gets_everything_too(
    broker: Broker, bench: Bench, handler: NumberHandler
) -> None:
    bench.send(1, 2, 3)
    drive(bench.consumer(handler), lambda: bench.committed == 3)
    other = Bench(broker)
    other.topic = bench.topic
    others = NumberHandler()

    drive(other.consumer(others), lambda: len(others.numbers) == 3)
    other.close()

    assert sorted(others.numbers) == sorted(handler.numbers) == [1, 2, 3]


def test_dead_letters_wait_while_their_broker_is_away_c54(
    bench: Bench, handler: NumberHandler
) -> None:
    absent = KafkaPublisher(
        bootstrap_servers=["127.0.0.1:1"], delivery_timeout=timedelta(seconds=1)
    )
    bench.send_bytes(b"no json", b'{"Number": 1}', key=b"k")
    consumer = bench.consumer(handler, publisher=absent)

    drive(consumer, lambda: consumer.waits_for)

    assert consumer.waits_for == "DeadLettersRefused"
    assert handler.numbers == [1]
    assert bench.committed == 0


def test_frozen_broker_is_waited_out(handler: NumberHandler) -> None:
    """A broker of one's own, so that nobody else waits with us."""
    with private_server("kafka") as server:
        broker = RealBroker([server.address])
        bench = Bench(broker)
        bench.send(*range(10))
        consumer = bench.consumer(handler)
        drive(consumer, lambda: bench.committed == 10)
        bench.send(*range(10, 20))
        server.freeze()
        thawing = threading.Timer(8, server.thaw)
        thawing.start()
        try:
            consumer.run(lambda: len(set(handler.numbers)) == 20)
        finally:
            thawing.join()
        assert bench.committed == 20
        broker.close()
