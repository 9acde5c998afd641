"""What the ingest process reports: metrics, logs, spans, health; nothing private in any."""

import json
import signal
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from structlog.testing import capture_logs

from devstats.clickhouse import DATABASE
from embedded.stack import find_free_port
from pinactivity.core.times import iso_utc
from pinactivity.telemetry import tracing
from tests.consuming import RealBroker
from tests.dev_stats import (
    CREATED_AT,
    OBJECTS,
    SESSIONS,
    VIEWS,
    Ingest,
    ended_session,
    lossy_clickhouse,
    metric,
)
from tests.processes import MANAGE, running, wait_until

SECRET = "203.0.113.7"
TRACE = "0af7651916cd43dd8448eb211c80319c"


# -- observability and privacy -------------------------------------------------------------


def test_metrics_and_logs_have_the_specifications_names(
    sessions: Ingest, clickhouse: Client
) -> None:
    ingested = metric("dev_stats_session_facts_ingested_total")
    lags = metric("dev_stats_ingest_lag_seconds_count", group=SESSIONS)
    slow = metric("dev_stats_ingest_lag_seconds_bucket", group=SESSIONS, le="60.0")
    sessions.send(
        *(ended_session() for _ in range(5)),
        headers={"CreatedAt": iso_utc(datetime.now(UTC) - timedelta(seconds=100))},
    )
    sessions.send(b"no")
    with capture_logs() as logs:
        sessions.run()
    assert metric("dev_stats_session_facts_ingested_total") == ingested + 5
    assert metric("dev_stats_ingest_lag_seconds_count", group=SESSIONS) == lags + 5
    assert metric("dev_stats_ingest_lag_seconds_bucket", group=SESSIONS, le="60.0") == slow
    assert metric("dev_stats_ingest_batch_size_sum", group=sessions.group) == 5
    lines = {line["event"]: line for line in logs}
    assert {"consumed", "skipped-poison", "flushed"} <= lines.keys()
    assert (lines["flushed"]["rows"], lines["consumed"]["batchSize"]) == (5, 6)
    assert lines["flushed"]["insertMs"] >= 0
    assert all("-" in place for place in lines["consumed"]["offsets"].values())


def test_spans_of_consume_and_insert_join_the_events_trace_up_to_clickhouse(
    sessions: Ingest, clickhouse: Client, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_spans_are_sent", True)
    sessions.send(ended_session(), headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    with lossy_clickhouse() as proxy:
        sessions.run()
        sessions.close()
    finished = spans.get_finished_spans()
    assert [span.name for span in finished] == ["consume", "insert"]
    assert {f"{span.context.trace_id:032x}" for span in finished} == {TRACE}
    inserts = [head for head in proxy.requests if b"insert_deduplication_token" in head]
    assert len(inserts) == 1
    assert f"traceparent: 00-{TRACE}-".encode() in inserts[0].lower()


def test_no_log_line_quotes_a_row(
    sessions: Ingest, clickhouse: Client, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ended_session(
        LastActivityAt=iso_utc(CREATED_AT - timedelta(seconds=1)), UserAgent=SECRET, Ip=SECRET
    )
    sessions.send(bad, ended_session(DurationSeconds=SECRET))
    with capture_logs() as logs:
        sessions.run()
    text = f"{logs} {caplog.text}"
    for value in (SECRET, bad["AnonymousId"], bad["SessionId"]):
        assert value not in text
    assert not clickhouse.query(
        f"SELECT * FROM {DATABASE}.session_facts WHERE FactId LIKE '%{SECRET}%'"
    ).result_rows


# -- the process ---------------------------------------------------------------------------


@pytest.mark.kafka
def test_process_starts_without_clickhouse_and_stops_when_asked(
    real_broker: RealBroker, tmp_path: Path
) -> None:
    log, port = tmp_path / "log", find_free_port()
    names = (SESSIONS, VIEWS, OBJECTS)
    with running(
        [*MANAGE, "consume", *names],
        log,
        CLICKHOUSE_URL="http://default:@127.0.0.1:1/",
        METRICS_PORT=str(port),
    ) as process:
        wait_until(lambda: _is_healthy(port), what=log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return set(json.load(answer)["Consumers"]) == {SESSIONS, VIEWS, OBJECTS}
    except OSError:
        return False
