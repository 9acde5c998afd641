"""What a run of the ActivityCloserJob logs, measures, records and writes into headers."""

import json
from datetime import timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.lifecycle import RunOutcome
from sessions.models import ActivityCloserRun
from tests.closer import close_inactive
from tests.factories import (
    MINUTE,
    silent_session,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_run_is_reported_by_the_lines_metrics_and_spans_of_the_specification(
    caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter, refuse_one: Any
) -> None:
    """The names and fields of the specification's section on observability."""
    bad, *_ = [silent_session(minutes=14 - number / 10, views=1) for number in range(3)]
    refuse_one(bad)
    before = closer_metrics()

    result = close_inactive()

    lines = [record.msg for record in caplog.records if record.name == "sessions.closer"]
    assert [
        {name: line[name] for name in names if name in line}
        for line in lines
        if isinstance(line, dict)
        for names in [LINES[line["event"]]]
    ] == [
        {"event": "job started", "jobRunId": str(result.run_id), "cutoff": ANY},
        {"event": "batch processed", "phase": "A", "rows": 3, "closed": 3},
        {"event": "unit failed", "phase": "B", "rows": 3, "errorClass": ANY},
        {"event": "item failed", "id": str(bad.id), "type": "Session", "errorClass": ANY},
        {"event": "batch processed", "phase": "B", "rows": 3, "closed": 2},
        {
            "event": "job completed",
            "closedSessions": 2,
            "closedViews": 3,
            "durationMs": ANY,
            "backlogRemaining": 1,
        },
    ]
    after = closer_metrics()
    assert {name: after[name] - before[name] for name in after} == {
        "activity_closer_run_duration_ms_count": 1,
        "activity_closer_sessions_closed_total": 2,
        "activity_closer_views_closed_total": 3,
        "activity_closer_errors_total": 2,
        "activity_closer_close_lag_seconds_count": 5,
        "activity_closer_batch_backlog": after["activity_closer_batch_backlog"]
        - before["activity_closer_batch_backlog"],
    }
    assert after["activity_closer_batch_backlog"] == 1
    *units, run = spans.get_finished_spans()
    assert dict(run.attributes or {}) == {
        "jobRunId": str(result.run_id),
        "outcome": "Succeeded",
        "closedCount": 5,
    }
    assert [
        {name: value for name, value in (unit.attributes or {}).items() if name != "error.type"}
        for unit in units
    ] == [
        {"phase": "A", "batchSize": 500, "closedCount": 3},
        {"phase": "B", "batchSize": 100},
        {"phase": "B", "batchSize": 1},
        {"phase": "B", "batchSize": 1, "closedCount": 1},
        {"phase": "B", "batchSize": 1, "closedCount": 1},
    ]
    assert all(unit.parent and unit.parent.span_id == run.context.span_id for unit in units)


LINES = {
    "job started": ("event", "jobRunId", "cutoff"),
    "batch processed": ("event", "phase", "rows", "closed"),
    "unit failed": ("event", "phase", "rows", "errorClass"),
    "item failed": ("event", "id", "type", "errorClass"),
    "job completed": ("event", "closedSessions", "closedViews", "durationMs", "backlogRemaining"),
}


def closer_metrics() -> dict[str, float]:
    names = (
        "activity_closer_run_duration_ms_count",
        "activity_closer_sessions_closed_total",
        "activity_closer_views_closed_total",
        "activity_closer_batch_backlog",
        "activity_closer_errors_total",
        "activity_closer_close_lag_seconds_count",
    )
    return {name: REGISTRY.get_sample_value(name) or 0.0 for name in names}


def test_run_is_recorded() -> None:
    silent_session(minutes=13, views=2)
    silent_session(minutes=3)

    result = close_inactive()

    run = ActivityCloserRun.objects.get()
    assert run.id == result.run_id
    assert run.finished_at is not None
    assert run.finished_at >= run.started_at == run.cutoff + 12 * MINUTE
    assert (run.closed_sessions, run.closed_views, run.failures) == (1, 2, 0)
    assert (run.outcome, run.backlog_remaining, run.active_sessions) == ("Succeeded", 0, 1)


def test_runs_older_than_30_days_are_forgotten() -> None:
    old = statement_time() - timedelta(days=31)
    ActivityCloserRun.objects.create(
        id=new_id(), started_at=old, finished_at=old, cutoff=old, outcome=RunOutcome.SUCCEEDED
    )

    result = close_inactive()

    assert [run.id for run in ActivityCloserRun.objects.all()] == [result.run_id]


def test_events_carry_the_run_as_correlation_and_the_rows_version() -> None:
    session = silent_session(minutes=13)

    result = close_inactive()

    message = OutboxMessage.objects.get()
    headers = json.loads(message.headers)
    traceparent = headers.pop("traceparent")
    assert len(traceparent) == 55
    assert headers == {
        "EventType": "SessionEndedKafkaEvent",
        "AggregateType": "Session",
        "AggregateId": str(session.id),
        "ContractVersion": "1",
        "Version": "2",
        "CorrelationId": str(result.run_id),
    }
