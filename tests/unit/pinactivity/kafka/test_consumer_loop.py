"""The consumers' loop in detail, on the in-memory broker."""

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from django.db import DataError, OperationalError
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Record
from pinactivity.kafka.spec import ConsumerSpec, SinkUnavailable, register
from pinactivity.kafka.testing import InMemoryBroker
from pinactivity.monitoring.consumers import report
from pinactivity.telemetry import tracing
from tests.consuming import (
    Bench,
    Clock,
    NumberHandler,
    drive,
    metric,
)

SECRET = "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_decoding_that_fails_by_our_own_error_is_poison_and_does_not_leak(
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


def test_row_that_postgresql_refuses_is_poison(bench: Bench, handler: NumberHandler) -> None:
    def refuse(entries: Sequence[Entry[int]]) -> None:
        if any(entry.row == 2 for entry in entries):
            raise DataError(SECRET)

    handler.on_flush = refuse
    bench.send(1, 2, 3)
    drive(bench.consumer(handler), lambda: bench.committed == 3)
    assert sorted(handler.numbers) == [1, 3]
    assert dict(bench.dead_letters[0].headers)["dlq-reason"] == b"row-refused"


def test_any_other_error_of_a_flush_keeps_the_batch(bench: Bench, handler: NumberHandler) -> None:
    errors: list[Exception] = [OperationalError(SECRET), RuntimeError(SECRET)]

    def fail(entries: Sequence[Entry[int]]) -> None:
        if errors:
            raise errors.pop()

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
    errors = [RuntimeError(SECRET)]

    def fail_once(entries: Sequence[Entry[int]]) -> None:
        if errors:
            raise errors.pop()

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
    """What the double does to a member that does not poll while it backs off."""
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


def test_name_of_a_consumer_is_registered_once() -> None:
    second = ConsumerSpec(name="signed-in", topics=("t",), group="g", handler=NumberHandler)
    from pinactivity.kafka.spec import registered_consumers  # noqa: PLC0415 - imports the apps

    assert "signed-in" in registered_consumers()
    with pytest.raises(ValueError, match="two consumers signed-in"):
        register(second)
