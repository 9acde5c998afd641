"""The next batch is read while the handler waits, on the in-memory broker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError
from structlog.testing import capture_logs

from pinactivity.kafka.dead_lettering import PoisonLimitReached
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Partition, Record
from pinactivity.kafka.source import CommitRefused, Source
from tests.consuming import (
    FIVE_MINUTES,
    Bench,
    NumberHandler,
    RefusingPublisher,
    drive,
    metric,
)

GOOD = b'{"Number": 1}'
SECRET = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.fixture
def waiting(handler: NumberHandler) -> NumberHandler:
    """A handler that prefetches."""
    handler.prefetches = True
    return handler


def send_in_order(bench: Bench, *numbers: int) -> None:
    bench.send_bytes(*(b'{"Number": %d}' % number for number in numbers), key=b"k")


class OddSource:
    """A member whose prefetch raises an error, or reports that partitions went."""

    def __init__(self, bench: Bench, *, error: Exception | None, gone: set[Partition]) -> None:
        self._source = bench.broker.join(bench.topic, bench.group, FIVE_MINUTES)
        self._error, self._gone = error, gone
        self._is_prefetch = False
        self.refuses_commits = False
        self.pause: Callable[[], None] = self._source.pause
        self.take_revoked: Callable[[], set[Partition]] = self._take_revoked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def poll(self, *, seconds: float, most: int) -> list[Record]:
        self._is_prefetch = seconds == 0 and not self._is_prefetch
        if self._is_prefetch and self._error is not None:
            raise self._error
        return self._source.poll(seconds=seconds, most=most)

    def _take_revoked(self) -> set[Partition]:
        return self._gone if self._is_prefetch else self._source.take_revoked()

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self.refuses_commits:
            raise CommitRefused
        self._source.commit(offsets)


def test_next_batch_is_read_while_the_handler_waits(bench: Bench, waiting: NumberHandler) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    consumer = bench.consumer(waiting, rows=2)
    seen: list[tuple[int, int]] = []
    waiting.on_flush = lambda _: seen.append((bench.committed, consumer.unstored))

    drive(consumer, lambda: bench.committed == 4)

    assert waiting.batches == [[1, 2], [3, 4]]
    assert seen == [(0, 4), (2, 2)]
    assert metric("kafka_consumer_consumed_total", bench) == 4


def test_what_was_prefetched_stays_behind_a_batch_that_fails(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    waiting.down = True
    consumer = bench.consumer(waiting, rows=2)
    drive(consumer, lambda: consumer.waits_for)
    assert (bench.committed, consumer.unstored) == (0, 4)
    waiting.down = False
    drive(consumer, lambda: bench.committed == 4)
    assert waiting.numbers == [1, 2, 3, 4]


def test_what_comes_in_spite_of_the_pause_stays_behind_what_was_prefetched(
    bench: Bench, waiting: NumberHandler
) -> None:
    source = OddSource(bench, error=None, gone=set())
    source.pause = lambda: None
    send_in_order(bench, 1, 2, 3, 4)
    waiting.down = True
    consumer = bench.consumer(waiting, rows=2, open_source=lambda: source)
    drive(consumer, lambda: consumer.waits_for)
    send_in_order(bench, 5)
    drive(consumer, lambda: consumer.unstored == 5)
    waiting.down = False
    drive(consumer, lambda: bench.committed == 5)
    assert waiting.numbers == [1, 2, 3, 4, 5]


def test_prefetched_poison_waits_for_its_own_batch(bench: Bench, waiting: NumberHandler) -> None:
    send_in_order(bench, 1, 2)
    bench.send_bytes(b"no json", b'{"Number": 4}', key=b"k")
    seen: list[int] = []
    waiting.on_flush = lambda _: seen.append(len(bench.dead_letters))
    drive(bench.consumer(waiting, rows=2), lambda: bench.committed == 4)
    assert waiting.numbers == [1, 2, 4]
    assert (seen, len(bench.dead_letters)) == ([0, 0], 1)


@pytest.mark.parametrize("refused", ["dead letters", "commit"])
def test_poison_limit_holds_for_what_was_prefetched_and_what_comes_later(
    bench: Bench, waiting: NumberHandler, refused: str
) -> None:
    publisher = RefusingPublisher(bench.broker.publisher())
    publisher.refuses = refused == "dead letters"
    source = OddSource(bench, error=None, gone=set())
    source.refuses_commits = refused == "commit"
    source.pause = lambda: None
    bench.send_bytes(GOOD, *[b"no json"] * 3, *[GOOD] * 4, key=b"k")
    consumer = bench.consumer(
        waiting, rows=6, poison_limit=2, publisher=publisher, open_source=lambda: source
    )
    drive(consumer, lambda: consumer.waits_for)
    bench.send_bytes(GOOD, key=b"k")
    drive(consumer, lambda: metric("kafka_consumer_consumed_total", bench) == 9)
    publisher.refuses = source.refuses_commits = False

    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)

    assert bench.committed == 3
    assert len(bench.dead_letters) == 2


def test_poison_limit_ends_a_consumer_whose_batch_went_to_another(
    bench: Bench, waiting: NumberHandler
) -> None:
    source = OddSource(bench, error=None, gone=set())
    source.refuses_commits = True
    bench.send_bytes(GOOD, *[b"no json"] * 3, key=b"k")
    consumer = bench.consumer(waiting, poison_limit=2, open_source=lambda: source)
    drive(consumer, lambda: consumer.waits_for)
    source.take_revoked = lambda: {(bench.topic, number) for number in range(20)}

    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)
    assert bench.committed == 0


def test_broker_that_fails_in_a_prefetch_is_no_failure_of_the_storage(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    errors = [KafkaConnectionError(SECRET)]

    def join() -> Source:
        return OddSource(bench, error=errors.pop() if errors else None, gone=set())

    with capture_logs() as logs:
        bench.consumer(waiting, rows=2, open_source=join).run(lambda: bench.committed == 4)

    assert waiting.batches == [[1, 2], [3, 4]]
    assert [line["event"] for line in logs] == [
        *("flushed", "consumed", "failed", "flushed", "consumed")
    ]
    assert metric("kafka_consumer_retries_total", bench) is None


def test_partition_that_goes_while_its_rows_are_written_is_not_committed(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2)
    gone = {(bench.topic, number) for number in range(6)}
    consumer = bench.consumer(
        waiting, rows=2, open_source=lambda: OddSource(bench, error=None, gone=gone)
    )
    result = consumer.run_once()
    assert (waiting.numbers, result.dropped, result.committed) == ([1, 2], 2, 0)
    assert (bench.committed, consumer.unstored) == (0, 0)


def test_nothing_is_prefetched_before_a_rebalance(bench: Bench) -> None:
    others: list[Source] = []

    class Joined(NumberHandler):
        def flush(self, entries: Sequence[Entry[int]], while_waiting: Callable[[], None]) -> None:
            other = bench.broker.join(bench.topic, bench.group, FIVE_MINUTES)
            other.poll(seconds=0, most=1)
            others.append(other)
            super().flush(entries, while_waiting)

    send_in_order(bench, 1, 2, 3, 4)
    handler = Joined()
    handler.prefetches = True
    consumer = bench.consumer(handler, rows=2)
    unstored: list[int] = []
    handler.on_flush = lambda _: unstored.append(consumer.unstored)
    consumer.run_once()
    for other in others:
        other.close()
    assert unstored == [2]


def test_nothing_is_prefetched_where_messages_are_handled_one_by_one(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    consumer = bench.consumer(waiting, rows=2, one_by_one=True)
    unstored: list[int] = []
    waiting.on_flush = lambda _: unstored.append(consumer.unstored)
    drive(consumer, lambda: bench.committed == 4)
    assert unstored == [2, 2, 2, 2]
