"""What a message's headers and value have to be, on the in-memory broker."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from pinactivity.core.ids import new_id
from pinactivity.kafka.record import Poison
from pinactivity.kafka.testing import record
from pinactivity.telemetry import tracing
from tests.consuming import (
    Bench,
    NumberHandler,
    drive,
    metric,
)

GOOD = b'{"Number": 1}'
SECRET = "0f8fad5b-d9cb-469f-a165-70867728950e"


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
    (dead_letter,) = bench.dead_letters
    assert dict(dead_letter.headers)["dlq-reason"] == reason.encode()
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
    assert (got.key, got.value, got.text_headers["Other"]) == (b"\x00key", GOOD, "text")


def test_correlation_of_a_message_without_one_is_its_own_id(
    bench: Bench, handler: NumberHandler
) -> None:
    seen: list[UUID] = []
    handler.on_flush = lambda _: seen.append(tracing.correlation_id())
    bench.send(1, 2)
    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 2)
    assert seen == [got.message_id for got in handler.records]


def test_payload_of_a_made_record_is_read_as_from_the_broker() -> None:
    assert record("t", {"A": 1}).payload() == {"A": 1}
    with pytest.raises(Poison):
        record("t", b"no json").payload()
