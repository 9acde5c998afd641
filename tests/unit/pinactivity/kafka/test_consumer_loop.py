"""The consumers' loop in detail, on the in-memory broker."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import DataError, OperationalError
from kafka.errors import KafkaConnectionError
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from pinactivity.core.ids import new_id
from pinactivity.kafka.dead_letters import dead_letter
from pinactivity.kafka.loop import (
    ConsumerSpec,
    Entry,
    Poison,
    PoisonLimitReached,
    Record,
    SinkUnavailable,
    register,
)
from pinactivity.kafka.source import CommitRefused, Partition, RawRecord, Source
from pinactivity.kafka.testing import InMemoryBroker, record
from pinactivity.kafka.topics import dead_letter_topics
from pinactivity.meanwhile import do_offered
from pinactivity.monitoring.consumers import report
from pinactivity.telemetry import tracing
from tests.consuming import (
    FIVE_MINUTES,
    Bench,
    Clock,
    MemoryBroker,
    NumberHandler,
    RefusingPublisher,
    drive,
)

GOOD = b'{"Number": 1}'
SECRET = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryBroker())
    yield bench
    bench.close()


@pytest.fixture
def handler() -> NumberHandler:
    return NumberHandler()


def metric(name: str, bench: Bench, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"group": bench.group, **labels})


@pytest.mark.parametrize(
    ("value", "headers", "reason"),
    [
        (GOOD, {"MessageId": None}, "message-id-missing"),
        (GOOD, {"MessageId": ""}, "message-id-invalid"),
        (GOOD, {"MessageId": "not an id"}, "message-id-invalid"),
        (GOOD, {"MessageId": str(UUID(int=0))}, "message-id-invalid"),
        (GOOD, {"MessageId": b"\xff\xfe"}, "header-not-text"),
        (GOOD, {"CreatedAt": b"\xff\xfe"}, "header-not-text"),
        (b"", {}, "value-not-json"),
        (b"\xff\xfe", {}, "value-not-json"),
        (b'{"Number": NaN}', {}, "value-not-json"),
        (b'{"Number": 1, "Number": 2}', {}, "value-not-json"),
        (b"[1]", {}, "value-not-an-object"),
        (b"{}", {}, "number-missing"),
    ],
)
def test_message_that_breaks_the_contract_is_poison(
    bench: Bench, handler: NumberHandler, value: bytes, headers: dict[str, Any], reason: str
) -> None:
    bench.send_bytes(value, headers=headers)
    drive(bench.consumer(handler), lambda: bench.committed == 1)
    (letter,) = bench.dead_letters
    assert dict(letter.headers)["dlq-reason"] == reason.encode()
    assert handler.numbers == []
    assert metric("kafka_consumer_dead_lettered_total", bench, reason=reason) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Foreign": b"\xff\xfe"},
        {"ContractVersion": "2"},
        {"ContractVersion": None},
        {"CorrelationId": "not an id"},
        {"CreatedAt": "yesterday"},
        {"traceparent": "nonsense"},
        {"MessageId": f"{{{SECRET.upper()}}}"},
    ],
)
def test_message_whose_envelope_is_merely_odd_is_handled(
    bench: Bench, handler: NumberHandler, headers: dict[str, Any]
) -> None:
    bench.send_bytes(GOOD, headers=headers)
    drive(bench.consumer(handler), lambda: bench.committed == 1)
    assert handler.numbers == [1]


def test_other_contract_version_is_a_warning(bench: Bench, handler: NumberHandler) -> None:
    bench.send(1, headers={"ContractVersion": "2"})
    with capture_logs() as logs:
        drive(bench.consumer(handler), lambda: bench.committed == 1)
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["contract version differs"]


def test_record_carries_the_envelope(bench: Bench, handler: NumberHandler) -> None:
    message_id, correlation_id = new_id(), new_id()
    bench.send_bytes(
        GOOD,
        key=b"\x00key",
        headers={
            "MessageId": str(message_id),
            "CorrelationId": str(correlation_id),
            "CreatedAt": "2026-03-01T12:00:00.1234567+03:00",
            "Other": "text",
        },
    )
    drive(bench.consumer(handler), lambda: handler.records)
    (got,) = handler.records
    assert (got.message_id, got.correlation_id) == (message_id, correlation_id)
    assert got.created_at == datetime(2026, 3, 1, 9, 0, 0, 123456, UTC)
    assert (got.key, got.value, got.headers["Other"]) == (b"\x00key", GOOD, "text")


def test_correlation_of_a_message_without_one_is_its_own_id(
    bench: Bench, handler: NumberHandler
) -> None:
    seen: list[UUID] = []
    handler.on_flush = lambda _: seen.append(tracing.correlation_id())
    bench.send(1, 2)
    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 2)
    assert seen == [got.message_id for got in handler.records]


def test_decoding_that_fails_by_a_fault_of_ours_is_poison_and_does_not_leak(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(NumberHandler):
        def decode(self, record: Record) -> int | None:
            raise KeyError(SECRET)

    bench.send(1)
    with caplog.at_level(logging.DEBUG):
        drive(bench.consumer(Faulty()), lambda: bench.committed == 1)
    assert dict(bench.dead_letters[0].headers)["dlq-reason"] == b"handler-error"
    assert SECRET not in caplog.text


def test_logs_say_what_happened_and_nothing_of_the_payload(
    bench: Bench, handler: NumberHandler
) -> None:
    bench.send_bytes(
        json.dumps({"Number": 1, "AnonymousId": SECRET}).encode(),
        json.dumps({"AnonymousId": SECRET}).encode(),
        key=SECRET.encode(),
    )
    with capture_logs() as logs:
        drive(bench.consumer(handler), lambda: bench.committed == 2)
    assert [line["event"] for line in logs] == ["flushed", "skipped-poison", "consumed"]
    flushed, skipped, consumed = logs
    assert flushed["rows"] == 1
    assert flushed["insertMs"] >= 0
    assert skipped["reason"] == "number-missing"
    assert consumed["batchSize"] == 2
    assert list(consumed["offsets"].values()) == ["0-1"]
    assert SECRET not in str(logs)


def test_what_postgresql_refuses_is_the_rows_fault(bench: Bench, handler: NumberHandler) -> None:
    def refuse(entries: Sequence[Entry[int]]) -> None:
        if any(entry.row == 2 for entry in entries):
            raise DataError(SECRET)

    handler.on_flush = refuse
    bench.send(1, 2, 3)
    drive(bench.consumer(handler), lambda: bench.committed == 3)
    assert sorted(handler.numbers) == [1, 3]
    assert dict(bench.dead_letters[0].headers)["dlq-reason"] == b"row-refused"


def test_any_other_fault_of_a_flush_keeps_the_batch(bench: Bench, handler: NumberHandler) -> None:
    faults: list[Exception] = [OperationalError(SECRET), RuntimeError(SECRET)]

    def fail(entries: Sequence[Entry[int]]) -> None:
        if faults:
            raise faults.pop()

    handler.on_flush = fail
    bench.send(1, 2, 3)
    with capture_logs() as logs:
        drive(bench.consumer(handler), lambda: bench.committed == 3)
    assert sorted(handler.numbers) == [1, 2, 3]
    failed = [line for line in logs if line["event"] == "failed"]
    assert [(line["errorClass"], line["log_level"]) for line in failed] == [
        ("RuntimeError", "error"),
        ("OperationalError", "error"),
    ]
    assert metric("kafka_consumer_retries_total", bench) == 2
    assert SECRET not in str(logs)


def test_one_by_one_goes_on_where_it_failed(bench: Bench, handler: NumberHandler) -> None:
    calls: list[int] = []

    def fail_once_at_three(entries: Sequence[Entry[int]]) -> None:
        calls.append(entries[0].row)
        if calls.count(3) == 1 and calls[-1] == 3:
            raise SinkUnavailable

    handler.on_flush = fail_once_at_three
    for number in range(1, 6):
        bench.send_bytes(json.dumps({"Number": number}).encode(), key=b"k")
    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 5)
    assert calls == [1, 2, 3, 3, 4, 5]


def test_handler_that_cannot_be_made_is_tried_again(bench: Bench, handler: NumberHandler) -> None:
    attempts: list[int] = []

    def make() -> NumberHandler:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionRefusedError
        return handler

    consumer = bench.consumer(handler)
    consumer.spec = ConsumerSpec(
        name="numbers",
        topics=(bench.topic,),
        group=bench.group,
        handler=make,
        limits=consumer.spec.limits,
    )
    bench.send(1)
    with capture_logs() as logs:
        consumer.run(lambda: bench.committed == 1)
    assert handler.numbers == [1]
    assert [line["errorClass"] for line in logs if line["event"] == "failed"] == [
        "ConnectionRefusedError"
    ] * 2


def test_skipped_message_is_committed_without_a_row(bench: Bench, handler: NumberHandler) -> None:
    bench.send_bytes(b'{"Skip": true}')
    drive(bench.consumer(handler), lambda: bench.committed == 1)
    assert handler.batches == []


def test_metrics_tell_age_and_lag_while_the_sink_is_away(
    bench: Bench, handler: NumberHandler
) -> None:
    handler.down = True
    bench.send(1, headers={"CreatedAt": "2026-01-01T00:00:00Z"})
    consumer = bench.consumer(handler, rows=10)
    drive(consumer, lambda: consumer.waits_for)
    bench.send(2, 3)
    consumer.run_once()
    age = (datetime.now(UTC) - datetime(2026, 1, 1, tzinfo=UTC)).total_seconds()
    assert metric("kafka_consumer_oldest_unstored_seconds", bench) == pytest.approx(age, abs=60)
    assert metric("kafka_consumer_lag", bench) == 2
    handler.down = False
    drive(consumer, lambda: bench.committed == 3)
    assert metric("kafka_consumer_oldest_unstored_seconds", bench) == 0
    assert metric("kafka_consumer_consumed_total", bench) == 3
    assert metric("kafka_consumer_batch_size_sum", bench) == 3


def test_spans_join_the_trace_of_the_message_and_record_no_exception_text(
    bench: Bench, handler: NumberHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
    monkeypatch.setattr(tracing, "_spans_are_sent", True)
    faults = [RuntimeError(SECRET)]

    def fail_once(entries: Sequence[Entry[int]]) -> None:
        if faults:
            raise faults.pop()

    handler.on_flush = fail_once
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    bench.send(1, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    drive(bench.consumer(handler), lambda: bench.committed == 1)

    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["consume", "insert", "insert"]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {trace_id}
    assert spans[1].status.status_code is trace.StatusCode.ERROR
    assert SECRET not in "".join(span.to_json() for span in spans)


def test_events_of_a_flush_carry_the_trace_of_the_message_without_any_endpoint(
    bench: Bench, handler: NumberHandler
) -> None:
    seen: list[str] = []
    handler.on_flush = lambda _: seen.append(tracing.traceparent())
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    bench.send(1, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 1)
    assert [traceparent.split("-")[1] for traceparent in seen] == [trace_id]


def test_health_is_progress_and_waiting_is_alive() -> None:
    class Doing:
        def __init__(self, silent: float, waits_for: str | None) -> None:
            self.silent_seconds = silent
            self.waits_for = waits_for

    working, waiting = Doing(0.2, None), Doing(3, "SinkUnavailable")
    alive, body = report({"a": working, "b": waiting})
    assert alive
    assert [part["Status"] for part in body["Consumers"].values()] == ["working", "waiting"]
    assert body["Consumers"]["b"]["WaitsFor"] == "SinkUnavailable"
    alive, body = report({"a": working, "b": Doing(121, None)})
    assert not alive
    assert body["Status"] == "stuck"


def test_silence_of_the_loop_grows_until_the_next_turn(
    bench: Bench, handler: NumberHandler
) -> None:
    clock = Clock()
    consumer = bench.consumer(handler, clock=clock)
    clock.now += 500
    assert consumer.silent_seconds == 500
    consumer.run_once()
    assert consumer.silent_seconds == 0


def test_member_that_does_not_poll_is_evicted_and_loses_its_batch(
    bench: Bench, handler: NumberHandler
) -> None:
    """What the double does to a loop that would not poll while it waits."""
    clock = Clock()
    broker = InMemoryBroker(clock=clock)
    broker.create_topic("t", partitions=2)
    slow = broker.join(("t",), "g", max_poll_interval=timedelta(seconds=30))
    slow.poll(seconds=0, most=1)
    clock.now += 31
    other = broker.join(("t",), "g", max_poll_interval=timedelta(seconds=30))
    other.poll(seconds=0, most=1)
    assert slow.evictions == 1
    slow.poll(seconds=0, most=1)
    assert slow.take_revoked() == {("t", 0), ("t", 1)}


def test_dead_letter_keeps_everything_and_replaces_older_reasons() -> None:
    raw = RawRecord(
        "t", 3, 7, 0, None, b"\xff", (("A", b"\x00"), ("A", None), ("dlq-reason", b"old"))
    )
    letter = dead_letter(raw, group="g", reason="new", at=datetime(2026, 1, 1, tzinfo=UTC))
    assert (letter.topic, letter.key, letter.value) == ("t.g.dlq", None, b"\xff")
    assert letter.headers == (
        ("A", b"\x00"),
        ("A", b""),
        ("dlq-reason", b"new"),
        ("dlq-topic", b"t"),
        ("dlq-partition", b"3"),
        ("dlq-offset", b"7"),
        ("dlq-at", b"2026-01-01T00:00:00.000000Z"),
    )


def test_name_of_a_consumer_is_registered_once() -> None:
    taken = ConsumerSpec(name="signed-in", topics=("t",), group="g", handler=NumberHandler)
    from pinactivity.kafka.loop import registered_consumers  # noqa: PLC0415 - imports the apps

    assert "signed-in" in registered_consumers()
    with pytest.raises(ValueError, match="two consumers signed-in"):
        register(taken)


def test_every_topic_of_a_consumer_has_its_dead_letter_topic() -> None:
    spec = ConsumerSpec(name="n", topics=("a", "b"), group="g", handler=NumberHandler)
    assert dead_letter_topics([spec]) == ("a.g.dlq", "b.g.dlq")


def test_payload_of_a_made_record_is_read_as_from_the_broker() -> None:
    assert record("t", {"A": 1}).payload() == {"A": 1}
    with pytest.raises(Poison):
        record("t", b"no json").payload()


# -- the next batch is read while the handler waits -----------------------------------------


@pytest.fixture
def waiting(handler: NumberHandler) -> NumberHandler:
    """A handler that lets the loop read ahead."""
    handler.lets_read_ahead = True
    return handler


def send_in_order(bench: Bench, *numbers: int) -> None:
    bench.send_bytes(*(b'{"Number": %d}' % number for number in numbers), key=b"k")


class OddSource:
    """A member whose poll of the next batch meets a fault, or tells that partitions went."""

    def __init__(self, bench: Bench, *, fault: Exception | None, gone: set[Partition]) -> None:
        self._source = bench.broker.join(bench.topic, bench.group, FIVE_MINUTES)
        self._fault, self._gone = fault, gone
        self._is_ahead = False
        self.refuses_commits = False
        self.pause: Callable[[], None] = self._source.pause
        self.take_revoked: Callable[[], set[Partition]] = self._take_revoked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def poll(self, *, seconds: float, most: int) -> list[RawRecord]:
        self._is_ahead = seconds == 0 and not self._is_ahead
        if self._is_ahead and self._fault is not None:
            raise self._fault
        return self._source.poll(seconds=seconds, most=most)

    def _take_revoked(self) -> set[Partition]:
        return self._gone if self._is_ahead else self._source.take_revoked()

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


def test_what_was_read_ahead_stays_behind_a_batch_that_fails(
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


def test_what_comes_in_spite_of_the_pause_stays_behind_what_was_read_ahead(
    bench: Bench, waiting: NumberHandler
) -> None:
    source = OddSource(bench, fault=None, gone=set())
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


def test_poison_read_ahead_waits_for_its_own_batch(bench: Bench, waiting: NumberHandler) -> None:
    send_in_order(bench, 1, 2)
    bench.send_bytes(b"no json", b'{"Number": 4}', key=b"k")
    seen: list[int] = []
    waiting.on_flush = lambda _: seen.append(len(bench.dead_letters))
    drive(bench.consumer(waiting, rows=2), lambda: bench.committed == 4)
    assert waiting.numbers == [1, 2, 4]
    assert (seen, len(bench.dead_letters)) == ([0, 0], 1)


@pytest.mark.parametrize("refused", ["dead letters", "commit"])
def test_poison_limit_holds_for_what_was_read_ahead_and_what_comes_meanwhile(
    bench: Bench, waiting: NumberHandler, refused: str
) -> None:
    publisher = RefusingPublisher(bench.broker.publisher())
    publisher.refuses = refused == "dead letters"
    source = OddSource(bench, fault=None, gone=set())
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
    source = OddSource(bench, fault=None, gone=set())
    source.refuses_commits = True
    bench.send_bytes(GOOD, *[b"no json"] * 3, key=b"k")
    consumer = bench.consumer(waiting, poison_limit=2, open_source=lambda: source)
    drive(consumer, lambda: consumer.waits_for)
    source.take_revoked = lambda: {(bench.topic, number) for number in range(20)}

    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)
    assert bench.committed == 0


def test_broker_that_fails_while_reading_ahead_is_no_fault_of_the_storage(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    faults = [KafkaConnectionError(SECRET)]

    def join() -> Source:
        return OddSource(bench, fault=faults.pop() if faults else None, gone=set())

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
        waiting, rows=2, open_source=lambda: OddSource(bench, fault=None, gone=gone)
    )
    result = consumer.run_once()
    assert (waiting.numbers, result.dropped, result.committed) == ([1, 2], 2, 0)
    assert (bench.committed, consumer.unstored) == (0, 0)


def test_nothing_is_read_ahead_of_a_rebalance(bench: Bench, handler: NumberHandler) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    consumer = bench.consumer(handler, rows=2)
    unstored: list[int] = []

    def see_another_join(_: Sequence[Entry[int]]) -> None:
        other = bench.broker.join(bench.topic, bench.group, FIVE_MINUTES)
        other.poll(seconds=0, most=1)
        do_offered()
        unstored.append(consumer.unstored)
        other.close()

    handler.on_flush = see_another_join
    consumer.run_once()
    assert unstored == [2]


def test_nothing_is_read_ahead_of_what_is_handled_one_by_one(
    bench: Bench, waiting: NumberHandler
) -> None:
    send_in_order(bench, 1, 2, 3, 4)
    consumer = bench.consumer(waiting, rows=2, one_by_one=True)
    unstored: list[int] = []
    waiting.on_flush = lambda _: unstored.append(consumer.unstored)
    drive(consumer, lambda: bench.committed == 4)
    assert unstored == [2, 2, 2, 2]
