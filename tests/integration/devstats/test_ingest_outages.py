"""Facts while something fails: ClickHouse, Kafka, a member, a message (specification, RETRY).

RETRY 1 to 4 are the rows of the specification's table "Retry и DLQ", C the cases of public bug
reports. `--dev-stats-scale=full --timeout=900` makes the outages last minutes.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from django.conf import settings as django_settings
from structlog.testing import capture_logs

from devstats.clickhouse import DATABASE, connect_writer
from devstats.options import DevStatsOptions
from embedded.stack import private_server
from pinactivity.core.times import iso_utc
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.source import CommitRefused, Source
from tests.consuming import Broker, RefusingPublisher, drive
from tests.dev_stats import (
    CREATED_AT,
    SESSIONS,
    VIEWS,
    Ingest,
    Scale,
    count_rows,
    ended_session,
    ended_view,
    lossy_clickhouse,
    make_tables,
    metric,
    read_sessions,
    rows_of,
    stop_merges,
)
from tests.processes import MANAGE, running


def lasts(seconds: float) -> Callable[[], bool]:
    """Return a function that is true until the time is over."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


# -- the table "Retry и DLQ" ---------------------------------------------------------------


def test_clickhouse_away_keeps_the_batch_and_its_offsets_until_it_is_back_retry_1(
    sessions: Ingest, settings: Any, scale: Scale
) -> None:
    with private_server("clickhouse") as server, capture_logs() as logs:
        settings.CLICKHOUSE_URL = server.address
        make_tables()
        server.stop()
        outage = lasts(scale.away_seconds)
        sessions.send(
            *(ended_session() for _ in range(20)),
            headers={"CreatedAt": iso_utc(datetime.now(UTC) - timedelta(minutes=20))},
        )
        consumer = sessions.consumer(first_wait=timedelta(milliseconds=20))
        drive(consumer, lambda: _failures(logs) >= 3 and not outage(), seconds=300)

        assert consumer.waits_for == "SinkUnavailable"
        assert sessions.committed() == 0
        assert metric("dev_stats_ingest_retries_total", group=sessions.group) >= 3
        assert metric("dev_stats_oldest_unstored_seconds", group=sessions.group) > 1190

        server.start()
        drive(consumer, lambda: sessions.committed() == 20)
        client = connect_writer()
        assert count_rows(client) == 20
        client.close()
    waits = [line["retryInSeconds"] for line in logs if line["event"] == "failed"]
    assert waits[:3] == [0.02, 0.04, 0.08]
    assert sessions.dead_letters == []
    assert metric("dev_stats_oldest_unstored_seconds", group=sessions.group) == 0


def test_waits_grow_from_a_second_to_a_minute_retry_1() -> None:
    options = django_settings.CONSUMER
    assert (options.first_wait, options.longest_wait) == (
        timedelta(seconds=1),
        timedelta(minutes=1),
    )


def _failures(logs: list[Any]) -> int:
    return sum(line["event"] == "failed" for line in logs)


def test_insert_that_takes_too_long_is_retried_retry_1(sessions: Ingest, settings: Any) -> None:
    settings.DEV_STATS = DevStatsOptions(storage_timeout=timedelta(seconds=1))
    with private_server("clickhouse") as server, capture_logs() as logs:
        settings.CLICKHOUSE_URL = server.address
        make_tables()
        consumer = sessions.consumer()
        sessions.send(ended_session())
        drive(consumer, lambda: sessions.committed() == 1)  # connected
        server.freeze()
        sessions.send(ended_session())
        drive(consumer, lambda: _failures(logs))
        assert sessions.committed() == 1
        server.thaw()
        drive(consumer, lambda: sessions.committed() == 2)
        client = connect_writer()
        assert read_sessions(client) == (2, 600)
        client.close()


def test_other_contract_version_is_a_warning_and_stored_retry_3(
    sessions: Ingest, clickhouse: Client
) -> None:
    sessions.send(ended_session(), headers={"ContractVersion": "2"})
    with capture_logs() as logs:
        sessions.run()
    assert count_rows(clickhouse) == 1
    assert sessions.dead_letters == []
    (line,) = [line for line in logs if line["event"] == "contract version differs"]
    assert line["log_level"] == "warning"


def test_failure_between_insert_and_commit_is_delivered_again_and_collapses_retry_4(
    sessions: Ingest, clickhouse: Client
) -> None:
    stop_merges(clickhouse)
    sessions.send(*(ended_session() for _ in range(30)))
    sources: list[Source] = []

    def join_without_commits() -> Source:
        source = sessions.broker.join(sessions.topic, sessions.group, timedelta(minutes=5))
        source.commit = _refuse  # type: ignore[method-assign]  # it fails just there
        sources.append(source)
        return source

    first = sessions.consumer(open_source=join_without_commits)
    drive(first, lambda: count_rows(clickhouse) == 30)
    first.close()
    assert sessions.committed() == 0

    sessions.run()

    assert count_rows(clickhouse) == 60
    assert read_sessions(clickhouse) == (30, 30 * 300)
    clickhouse.command(f"SYSTEM START MERGES {DATABASE}.session_facts")
    clickhouse.command(f"OPTIMIZE TABLE {DATABASE}.session_facts FINAL")
    assert count_rows(clickhouse) == 30


def _refuse(offsets: Any) -> None:
    raise CommitRefused


@pytest.mark.kafka
def test_consumer_killed_many_times_stores_every_session_once_retry_4(
    real_sessions: Ingest, clickhouse: Client, tmp_path: Path, scale: Scale
) -> None:
    real_sessions.send(*(ended_session() for _ in range(1000)))
    driver = [
        *MANAGE[:1],
        *("-m", "tests.kill_consumer", real_sessions.topic, real_sessions.group),
        *("any-moment", "--consumer", SESSIONS, "--kills", str(scale.kills)),
    ]
    log = tmp_path / "log"
    with running(driver, log) as process:
        assert process.wait(150) == 0, log.read_text()[-3000:]
    assert f"{scale.kills} kills in" in log.read_text()
    assert read_sessions(clickhouse) == (1000, 300_000)


# -- cases of public bug reports -----------------------------------------------------------


def test_thirty_day_session_is_stored_as_it_is_c22(sessions: Ingest, clickhouse: Client) -> None:
    month = timedelta(days=30)
    sessions.send(
        ended_session(LastActivityAt=iso_utc(CREATED_AT + month), DurationSeconds=2_592_000),
        ended_session(DurationSeconds=2**31 - 1),
    )
    sessions.run()
    rows = sorted(rows_of(clickhouse, "session_facts"), key=lambda row: row["DurationSeconds"])
    assert [row["DurationSeconds"] for row in rows] == [2_592_000, 2**31 - 1]
    assert rows[0]["LastActivityAt"] - rows[0]["StartedAt"] == month


def test_session_over_midnight_is_one_row_of_the_day_it_began_c23(
    sessions: Ingest, clickhouse: Client
) -> None:
    began = datetime(2026, 3, 31, 23, 58, tzinfo=UTC)  # the month changes, and two clocks have
    sessions.send(
        ended_session(
            CreatedAt="2026-04-01T01:58:00+02:00",
            LastActivityAt=iso_utc(began + timedelta(minutes=7)),
            DurationSeconds=420,
        )
    )
    sessions.run()
    (row,) = rows_of(clickhouse, "session_facts")
    assert (row["StartedAt"], row["EventTime"], row["DurationSeconds"]) == (began, began, 420)
    assert clickhouse.query(
        f"SELECT partition FROM system.parts WHERE database = '{DATABASE}'"
        " AND table = 'session_facts' AND active"
    ).result_rows == [("202603",)]


def test_lost_answer_of_an_insert_leaves_one_copy_c48(sessions: Ingest, clickhouse: Client) -> None:
    """Lost once, the client repeats the insert by itself; lost twice, the loop does."""
    stop_merges(clickhouse)
    with lossy_clickhouse() as proxy:
        consumer = sessions.consumer()
        sent = 0
        for cuts in (1, 2, 3):
            sessions.send(*(ended_session() for _ in range(10)))
            sent += 10
            proxy.cuts = cuts
            with capture_logs() as logs:
                drive(consumer, lambda: sessions.committed() == sessions.sent)
            assert proxy.cuts == 0
            assert _failures(logs) == cuts // 2
            assert count_rows(clickhouse) == sent
    assert sessions.dead_letters == []


@pytest.mark.parametrize("name", [SESSIONS, VIEWS])
def test_next_events_are_read_before_clickhouse_has_answered(
    name: str, broker: Broker, clickhouse: Client
) -> None:
    """The views' owners are asked for first: that short wait is not the one."""
    ingest = Ingest(broker, name)
    table = "session_facts" if name == SESSIONS else "property_object_view_facts"
    ingest.send(
        *((ended_session if name == SESSIONS else ended_view)() for _ in range(4)), key=b"k"
    )
    consumer = ingest.consumer(rows=2)

    consumer.run_once()

    assert (ingest.committed(), consumer.unstored, count_rows(clickhouse, table)) == (2, 2, 2)
    consumer.run_once()
    assert (ingest.committed(), consumer.unstored, count_rows(clickhouse, table)) == (4, 0, 4)
    ingest.close()


def test_missing_table_holds_every_offset_until_it_is_back_c49(
    sessions: Ingest, clickhouse: Client, scale: Scale
) -> None:
    consumer = sessions.run()
    clickhouse.command(f"RENAME TABLE {DATABASE}.session_facts TO {DATABASE}.away")
    try:
        sessions.send(*(ended_session() for _ in range(50)))
        outage = lasts(scale.away_seconds)
        with capture_logs() as logs:
            drive(consumer, lambda: _failures(logs) >= 3 and not outage(), seconds=300)
        assert sessions.committed() == 0
        assert {line["code"] for line in logs if line["event"] == "failed"} == {"60"}
    finally:
        clickhouse.command(f"RENAME TABLE {DATABASE}.away TO {DATABASE}.session_facts")
    drive(consumer, lambda: sessions.committed() == 50)
    assert read_sessions(clickhouse) == (50, 15_000)
    assert sessions.dead_letters == []


def test_row_that_clickhouse_refuses_goes_to_the_dead_letters_and_999_are_stored_c50(
    sessions: Ingest, clickhouse: Client
) -> None:
    """Its LastActivityAt lies before its CreatedAt: no rule of decoding, but a constraint."""
    good = [ended_session() for _ in range(999)]
    bad = ended_session(LastActivityAt=iso_utc(CREATED_AT - timedelta(seconds=1)))
    sessions.send(*good[:700], bad, *good[700:])

    sessions.run()

    assert read_sessions(clickhouse) == (999, 999 * 300)
    assert count_rows(clickhouse) == 999
    assert sessions.reasons == ["row-refused"]
    assert [json.loads(letter.value or b"") for letter in sessions.dead_letters] == [bad]


@pytest.mark.kafka
def test_clickhouse_away_longer_than_the_poll_interval_evicts_nobody_c51(
    real_sessions: Ingest, settings: Any
) -> None:
    interval = timedelta(seconds=3)
    with private_server("clickhouse") as server:
        settings.CLICKHOUSE_URL = server.address
        make_tables()
        consumer = real_sessions.consumer(max_poll_interval=interval)
        real_sessions.send(ended_session())
        drive(consumer, lambda: real_sessions.committed() == 1)
        server.stop()
        real_sessions.send(*(ended_session() for _ in range(30)))
        with capture_logs() as logs:
            until = time.monotonic() + 1.5 * interval.total_seconds()
            drive(consumer, lambda: time.monotonic() > until)
            assert real_sessions.committed() == 1
            server.start()
            drive(consumer, lambda: real_sessions.committed() == 31)
        client = connect_writer()
        assert read_sessions(client) == (31, 31 * 300)
        assert count_rows(client) == 31
        client.close()
    assert not [line for line in logs if line["event"] == "partitions gone"]


@pytest.mark.kafka
def test_second_member_that_joins_and_leaves_loses_and_doubles_nothing_c52(
    real_sessions: Ingest, clickhouse: Client, scale: Scale
) -> None:
    stop = threading.Event()
    first = real_sessions.consumer(rows=20, age=0.2)
    thread = threading.Thread(target=_run, args=[first, stop])
    thread.start()
    try:
        for _ in range(scale.joins):
            second = real_sessions.consumer(rows=20)
            handled = 0
            stays = lasts(scale.join_seconds)
            deadline = time.monotonic() + 60
            while handled < 50 or stays():  # it has got partitions, and the first has lost some
                assert time.monotonic() < deadline
                real_sessions.send(*(ended_session() for _ in range(20)))
                handled += second.run_once().committed
            second.close()
        deadline = time.monotonic() + 60
        while real_sessions.committed() < real_sessions.sent:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        stop.set()
        thread.join()
    assert read_sessions(clickhouse) == (real_sessions.sent, real_sessions.sent * 300)


def _run(consumer: Consumer, stop: threading.Event) -> None:
    consumer.run(stop.is_set)


def test_refusing_dead_letter_topic_holds_the_offset_c54(
    sessions: Ingest, clickhouse: Client
) -> None:
    publisher = RefusingPublisher(sessions.broker.publisher())
    consumer = sessions.consumer(publisher=publisher)
    sessions.send(ended_session(), b"\xff\xfe", ended_session(), key=b"k")
    drive(consumer, lambda: publisher.asked >= 2)
    assert sessions.committed() == 0
    assert count_rows(clickhouse) == 2  # written, and not again

    publisher.refuses = False
    drive(consumer, lambda: sessions.committed() == 3)
    assert count_rows(clickhouse) == 2
    assert sessions.reasons == ["value-not-json"]
