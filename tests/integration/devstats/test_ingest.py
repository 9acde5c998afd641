"""Facts in ClickHouse: the consumers of dev-stats, by their specification's own words.

AC are its acceptance criteria, RETRY 1 to 4 the rows of its table "Retry и DLQ", C the cases of
public bug reports. `--dev-stats-scale=full --timeout=900` makes the outages last minutes.
"""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client
from django.conf import settings as django_settings
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from devstats.clickhouse import DATABASE, connect_writer
from devstats.enrichment import Enrichment
from devstats.facts import UNKNOWN_DEVELOPER
from devstats.options import DevStatsOptions
from devstats.ownership import PropertyObject
from devstats.property_objects import find_versions, store_objects
from devstats.selectors import summarise_objects, summarise_sessions
from devstats.tables import PROPERTY_OBJECTS, SESSION_FACTS
from devstats.writer import MOST_MONTHS, FactWriter
from embedded.stack import find_free_port, private_server
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.http.periods import Period
from pinactivity.kafka.consumer import Consumer, registered_consumers
from pinactivity.kafka.source import CommitRefused, Source
from pinactivity.kafka.topics import (
    PROPERTY_OBJECT_CHANGED,
    PROPERTY_OBJECT_VIEW_ENDED,
    SESSION_ENDED,
)
from pinactivity.telemetry import tracing
from tests.consuming import Broker, MemoryBroker, RealBroker, RefusingPublisher, drive
from tests.dev_stats import (
    CREATED_AT,
    OBJECTS,
    SESSIONS,
    VIEWS,
    Ingest,
    changed_object,
    count_rows,
    ended_session,
    ended_view,
    lossy_clickhouse,
    make_tables,
    merge,
    read_sessions,
    rows_of,
    spread,
    stop_merges,
)
from tests.processes import MANAGE, running, wait_until

SECRET = "203.0.113.7"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@dataclass(frozen=True)
class Scale:
    kills: int
    away_seconds: float
    """ClickHouse stopped, or its table gone."""
    joins: int
    join_seconds: float


@pytest.fixture
def scale(pytestconfig: pytest.Config) -> Scale:
    if pytestconfig.getoption("--dev-stats-scale") == "full":
        return Scale(kills=50, away_seconds=120, joins=18, join_seconds=10)
    return Scale(kills=10, away_seconds=0, joins=1, join_seconds=0)


def lasts(seconds: float) -> Callable[[], bool]:
    """Tell whether it is not over yet."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


@pytest.fixture
def broker() -> Broker:
    return MemoryBroker()


@pytest.fixture
def real_broker() -> Iterator[RealBroker]:
    broker = RealBroker()
    yield broker
    broker.close()


@pytest.fixture
def sessions(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, SESSIONS)
    yield ingest
    ingest.close()


@pytest.fixture
def views(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, VIEWS)
    yield ingest
    ingest.close()


@pytest.fixture
def objects(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, OBJECTS)
    yield ingest
    ingest.close()


@pytest.fixture
def real_sessions(real_broker: RealBroker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(real_broker, SESSIONS)
    yield ingest
    ingest.close()


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


# -- declaration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        (SESSIONS, SESSION_ENDED),
        (VIEWS, PROPERTY_OBJECT_VIEW_ENDED),
        (OBJECTS, PROPERTY_OBJECT_CHANGED),
    ],
)
def test_consumer_is_registered_under_its_group_with_the_specifications_batches(
    name: str, topic: str, settings: Any
) -> None:
    spec = registered_consumers()[name]
    assert (spec.topics, spec.group, spec.one_by_one) == ((topic,), name, False)
    assert (spec.limits().rows, spec.limits().age) == (1000, timedelta(seconds=5))
    settings.DEV_STATS = DevStatsOptions(batch_size=7, flush_interval=timedelta(seconds=1))
    assert (spec.limits().rows, spec.limits().age) == (7, timedelta(seconds=1))


# -- acceptance criteria -------------------------------------------------------------------


@pytest.mark.kafka
def test_valid_session_ended_becomes_a_row_ac_happy(
    real_sessions: Ingest, clickhouse: Client
) -> None:
    message_id, user = new_id(), new_id()
    payload = ended_session(UserId=str(user))
    before = datetime.now(UTC)
    real_sessions.send(payload, headers={"MessageId": str(message_id)})

    real_sessions.run()

    (row,) = rows_of(clickhouse, "session_facts")
    assert before <= row.pop("IngestionTime") <= datetime.now(UTC)
    assert row == {
        "FactId": str(message_id),
        "SessionId": UUID(payload["SessionId"]),
        "AnonymousId": UUID(payload["AnonymousId"]),
        "UserId": user,
        "StartedAt": CREATED_AT,
        "EventTime": CREATED_AT,
        "LastActivityAt": CREATED_AT + timedelta(minutes=5),
        "DurationSeconds": 300,
        "TenantId": "00000000-0000-0000-0000-000000000000",
        "BrandId": None,
        "DeveloperId": None,
        "ViewerKind": "User",
    }
    assert real_sessions.dead_letters == []


def test_viewer_kind_is_by_the_user_alone_ac_viewer_kind(
    sessions: Ingest, clickhouse: Client
) -> None:
    guest, user = ended_session(), ended_session(UserId=str(new_id()))
    sessions.send(guest, user)
    sessions.run()
    kinds = {
        str(row["SessionId"]): row["ViewerKind"] for row in rows_of(clickhouse, SESSION_FACTS.name)
    }
    assert kinds == {guest["SessionId"]: "Guest", user["SessionId"]: "User"}


def test_event_delivered_twice_is_one_session_ac_idempotent_c56(
    sessions: Ingest, clickhouse: Client
) -> None:
    """In one batch it is one row; in two it is, merges stopped, two that are read as one."""
    stop_merges(clickhouse)
    payload, headers = ended_session(), {"MessageId": str(new_id())}
    before = metric("dev_stats_session_facts_ingested_total")
    sessions.send(payload, payload, headers=headers)
    sessions.run()
    assert metric("dev_stats_session_facts_ingested_total") == before + 1
    assert count_rows(clickhouse) == 1

    sessions.send(payload, headers=headers)
    sessions.run()

    assert count_rows(clickhouse) == 2
    assert read_sessions(clickhouse) == (1, 300)
    clickhouse.command(f"SYSTEM START MERGES {DATABASE}.session_facts")
    clickhouse.command(f"OPTIMIZE TABLE {DATABASE}.session_facts FINAL")
    assert count_rows(clickhouse) == 1


def in_the_future(minutes: float) -> str:
    return iso_utc(datetime.now(UTC) + timedelta(minutes=minutes))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"DurationSeconds": -1}, "duration-seconds-invalid"),
        ({"CreatedAt": "0001-01-01T00:00:00Z"}, "created-at-default"),
        ({"CreatedAt": "later", "LastActivityAt": "later"}, "created-at-in-the-future"),
        ({"SessionId": "00000000-0000-0000-0000-000000000000"}, "session-id-invalid"),
        (b"\xff\xfe", "value-not-json"),
    ],
    ids=["duration", "default", "future", "empty", "bytes"],
)
def test_bad_value_goes_to_the_dead_letters_and_the_partition_goes_on_ac_boundaries_retry_2_c53(
    sessions: Ingest, clickhouse: Client, bad: Any, reason: str
) -> None:
    if isinstance(bad, dict):
        later = {name: in_the_future(61) for name, value in bad.items() if value == "later"}
        bad = ended_session(**{**bad, **later})
    message_id = str(new_id())
    good = [ended_session() for _ in range(4)]
    sessions.send(*good[:2], key=b"k")
    sessions.send(bad, key=b"k", headers={"MessageId": message_id})
    sessions.send(*good[2:], key=b"k")

    with capture_logs() as logs:
        sessions.run()

    stored = {str(row["SessionId"]) for row in rows_of(clickhouse, "session_facts")}
    assert stored == {payload["SessionId"] for payload in good}
    assert sessions.reasons == [reason]
    (error,) = [line for line in logs if line["event"] == "skipped-poison"]
    assert (error["log_level"], error["reason"], error["SourceEventId"]) == (
        "error",
        reason,
        message_id,
    )
    assert metric("dev_stats_dlq_total", group=sessions.group, reason=reason) == 1


def test_an_hour_ahead_is_still_taken_and_the_hosts_clock_does_not_matter(
    sessions: Ingest, clickhouse: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = in_the_future(59)
    sessions.send(ended_session(CreatedAt=soon, LastActivityAt=soon))
    sessions.run()
    assert count_rows(clickhouse) == 1
    asked: list[str] = []
    writer = FactWriter()
    monkeypatch.setattr(
        type(writer.client), "query", _noting(type(writer.client).query, asked), raising=True
    )
    now = datetime.now(UTC)
    assert writer.is_past(now - timedelta(days=1))
    assert writer.is_past(now - timedelta(days=1))
    assert len(asked) == 1  # what was past stays past
    assert not writer.is_past(now + timedelta(minutes=1))
    assert len(asked) == 2
    writer.close()


def _noting(call: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def query(self: Client, statement: str, *args: Any, **options: Any) -> Any:
        asked.append(statement)
        return call(self, statement, *args, **options)

    return query


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


# -- batches -------------------------------------------------------------------------------


def test_batch_over_more_than_a_hundred_months_is_split_and_stored(
    sessions: Ingest, clickhouse: Client
) -> None:
    days = [datetime(1990 + n // 12, 1 + n % 12, 1, tzinfo=UTC) for n in range(2 * MOST_MONTHS + 1)]
    sessions.send(*spread(days))
    with capture_logs() as logs:
        sessions.run()
    assert {row["StartedAt"] for row in rows_of(clickhouse, "session_facts")} == set(days)
    assert [line["rows"] for line in logs if line["event"] == "flushed"] == [len(days)]
    assert sessions.dead_letters == []


def test_same_rows_added_again_by_one_writer_are_dropped_and_by_another_are_not(
    clickhouse: Client,
) -> None:
    """A replay after a correction must never be taken for a repetition."""
    stop_merges(clickhouse)
    row = ("fact", new_id(), new_id(), None, *[CREATED_AT] * 3, 1, "", None, None, "Guest")
    first, second = FactWriter(), FactWriter()
    for _ in range(2):
        first.append(SESSION_FACTS, {"topic/0/0": row})
    assert count_rows(clickhouse) == 1
    first.append(SESSION_FACTS, {"topic/0/0": ("other", *row[1:])})  # of a topic made anew
    assert count_rows(clickhouse) == 2
    second.append(SESSION_FACTS, {"topic/0/0": row})
    assert count_rows(clickhouse) == 3
    first.close()
    second.close()


# -- views and the dimension ---------------------------------------------------------------


def owners(client: Client) -> dict[str, UUID]:
    """The owners of views, as far as reads would count them."""
    return {
        str(row["PropertyObjectViewId"]): row["DeveloperId"]
        for row in rows_of(client, "property_object_view_facts")
        if row["DeveloperId"] != UNKNOWN_DEVELOPER
    }


def test_ended_view_is_stored_with_its_objects_owner(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object(BrandId=str(new_id()))
    objects.send(flat, headers={"CreatedAt": iso_utc(CREATED_AT - timedelta(days=1))})
    objects.run()
    message_id = str(new_id())
    known = ended_view(PropertyObjectId=flat["PropertyObjectId"], FilterSnapshot={"Rooms": [1]})
    views.send(known, headers={"MessageId": message_id})
    unknown = ended_view()
    views.send(unknown)

    views.run()

    rows = {
        str(row["PropertyObjectViewId"]): row
        for row in rows_of(clickhouse, "property_object_view_facts")
    }
    assert rows[unknown["PropertyObjectViewId"]]["DeveloperId"] == UNKNOWN_DEVELOPER
    row = rows[known["PropertyObjectViewId"]]
    assert isinstance(row.pop("IngestionTime"), datetime)
    assert row == {
        "FactId": message_id,
        "PropertyObjectViewId": UUID(known["PropertyObjectViewId"]),
        "PropertyObjectId": UUID(known["PropertyObjectId"]),
        "SessionId": UUID(known["SessionId"]),
        "AnonymousId": UUID(known["AnonymousId"]),
        "UserId": None,
        "ViewSource": "Map",
        "EventTime": CREATED_AT,
        "LastActivityAt": CREATED_AT + timedelta(minutes=1),
        "DurationSeconds": 60,
        "FilterSnapshot": '{"Rooms":[1]}',
        "TenantId": "00000000-0000-0000-0000-000000000000",
        "BrandId": UUID(flat["BrandId"]),
        "DeveloperId": UUID(flat["DeveloperId"]),
        "ViewerKind": "Guest",
    }


def test_object_that_changes_hands_keeps_its_old_facts_also_when_the_topic_is_read_anew(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    buyer = str(new_id())
    for developer, moment in (
        (flat["DeveloperId"], CREATED_AT - timedelta(days=1)),
        (buyer, CREATED_AT + timedelta(hours=1)),
    ):
        objects.send(
            {**flat, "DeveloperId": developer}, headers={"CreatedAt": iso_utc(moment)}, key=b"k"
        )
    objects.run()
    moments = (CREATED_AT, CREATED_AT + timedelta(hours=2))
    seen = [
        ended_view(
            PropertyObjectId=flat["PropertyObjectId"],
            ViewedAt=iso_utc(moment),
            LastActivityAt=iso_utc(moment),
        )
        for moment in moments
    ]
    views.send(*seen)
    views.run()
    expected = {
        seen[0]["PropertyObjectViewId"]: UUID(flat["DeveloperId"]),
        seen[1]["PropertyObjectViewId"]: UUID(buyer),
    }
    assert owners(clickhouse) == expected

    views.run(group=f"{views.group}-again")

    assert owners(clickhouse) == expected
    clickhouse.command(f"OPTIMIZE TABLE {DATABASE}.property_object_view_facts FINAL")
    assert count_rows(clickhouse, "property_object_view_facts") == 2


def test_views_stored_before_their_objects_owner_was_known_get_him_once(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    early = [
        ended_view(
            PropertyObjectId=flat["PropertyObjectId"],
            ViewedAt=iso_utc(CREATED_AT + month * timedelta(days=31)),
            LastActivityAt=iso_utc(CREATED_AT + month * timedelta(days=31, minutes=1)),
        )
        for month in range(3)
    ]
    views.send(*early, ended_view())
    views.run()
    assert owners(clickhouse) == {}
    objects.send(flat)
    objects.run()
    writer = FactWriter()
    enrichment = Enrichment(writer)
    done: list[int] = []

    assert enrichment.count() == 3
    assert enrichment.run(advance=done.append) == 3

    assert sum(done) == 3
    assert owners(clickhouse) == {
        view["PropertyObjectViewId"]: UUID(flat["DeveloperId"]) for view in early
    }
    assert (enrichment.count(), enrichment.run()) == (0, 0)
    facts = rows_of(clickhouse, "property_object_view_facts")
    assert len(facts) == 7
    assert len({row["FactId"] for row in facts}) == 4
    writer.close()


def test_enrichment_reads_twice_as_much_for_twice_as_many_views(
    clickhouse: Client, writer: FactWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not four times as much, as when what there is to do is worked out for each thousand."""
    flat = new_id()
    writer.append(PROPERTY_OBJECTS, {"0": PropertyObject(flat, new_id(), None, CREATED_AT)})
    read = []
    query = writer.client.query

    def noting(*arguments: Any, **options: Any) -> Any:
        result = query(*arguments, **options)
        read.append(int(result.summary["read_rows"]))
        return result

    monkeypatch.setattr(writer.client, "query", noting)
    streamed = Mock(wraps=writer.client.query_row_block_stream)
    monkeypatch.setattr(writer.client, "query_row_block_stream", streamed)
    sums = []
    for count in (12_000, 24_000):
        clickhouse.command("TRUNCATE TABLE property_object_view_facts")
        clickhouse.command(
            "INSERT INTO property_object_view_facts (FactId, PropertyObjectViewId,"
            " PropertyObjectId, EventTime, LastActivityAt, ViewerKind)"
            " SELECT toString(number), generateUUIDv4(number), {flat:UUID},"
            " toDateTime64('2026-03-01', 6, 'UTC') AS At, At, 'Guest' FROM numbers({count:UInt64})",
            parameters={"flat": flat, "count": count},
        )
        read.clear()
        assert Enrichment(writer).run() == count
        sums.append(sum(read))
    assert sums[1] < 3 * sums[0]
    assert streamed.call_count == 2  # whose reading no summary tells: once a month of views


def test_interrupted_enrichment_goes_on_where_it_was(
    views: Ingest, objects: Ingest, clickhouse: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = changed_object()
    views.send(*(ended_view(PropertyObjectId=flat["PropertyObjectId"]) for _ in range(7)))
    views.run()
    views.run(group=f"{views.group}-again")
    objects.send(flat)
    objects.run()
    monkeypatch.setattr("devstats.property_objects.MOST_IDS", 2)
    writer = FactWriter()

    def interrupt(added: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Enrichment(writer).run(advance=interrupt)
    assert len(owners(clickhouse)) == 2

    assert Enrichment(writer).count() == 5
    assert Enrichment(writer).run() == 5
    assert len(owners(clickhouse)) == 7
    writer.close()


def counted(developer: str) -> tuple[int, int]:
    """Tell how many sessions and views a developer is told of."""
    period = Period(CREATED_AT - timedelta(days=1), CREATED_AT + timedelta(days=1))
    total = summarise_objects(UUID(developer), period).total
    return (
        summarise_sessions(UUID(developer), period).total.sessions,
        total.views if total else 0,
    )


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "merges stopped"])
def test_owner_told_late_gets_the_view_when_its_topic_is_read_anew_and_he_alone(
    sessions: Ingest, views: Ingest, objects: Ingest, clickhouse: Client, merges: bool
) -> None:
    if not merges:
        stop_merges(clickhouse)
    flat, house = changed_object(), changed_object()
    seller, buyer = flat["DeveloperId"], str(new_id())
    house["DeveloperId"] = seller

    def tell(payload: dict[str, Any], developer: str, moment: datetime) -> None:
        objects.send(
            {**payload, "DeveloperId": developer}, headers={"CreatedAt": iso_utc(moment)}, key=b"k"
        )
        objects.run()

    def read_anew(number: int) -> None:
        views.run(group=f"{views.group}-{number}")
        if merges:
            merge(clickhouse)

    tell(flat, seller, CREATED_AT - timedelta(days=9))
    tell(house, seller, CREATED_AT - timedelta(days=9))
    for seen in (flat, house):
        view = ended_view(PropertyObjectId=seen["PropertyObjectId"])
        views.send(view)
        sessions.send(ended_session(SessionId=view["SessionId"]))
    sessions.run()
    views.run()
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))

    tell(flat, buyer, CREATED_AT - timedelta(days=5))
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))  # the view is filed already
    read_anew(1)
    assert (counted(seller), counted(buyer)) == ((1, 1), (1, 1))

    tell(flat, seller, CREATED_AT - timedelta(days=1))  # and was his again when it was viewed
    read_anew(2)
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))


def test_of_two_owners_from_the_same_moment_on_the_later_message_tells(
    objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    told = [str(new_id()) for _ in range(3)]
    moment = {"CreatedAt": iso_utc(CREATED_AT)}
    for developer in told:
        objects.send({**flat, "DeveloperId": developer}, headers=moment, key=b"k")

    for number in range(2):  # the second time it is read anew
        objects.run(group=f"{objects.group}-{number}")
        object_id = UUID(flat["PropertyObjectId"])
        (version,) = find_versions(clickhouse, [object_id])[object_id]
        assert str(version.developer_id) == told[-1]


def test_largest_batch_goes_to_clickhouse_whole_and_no_address_is_long(
    views: Ingest, clickhouse: Client, writer: FactWriter
) -> None:
    """Addresses end at 8 KiB in many a proxy, a parameter at 128 KiB in ClickHouse."""
    many = [PropertyObject(new_id(), new_id(), None, CREATED_AT) for _ in range(5000)]
    seen = [ended_view(PropertyObjectId=str(each.property_object_id)) for each in many[:1000]]
    views.send(*seen)
    with lossy_clickhouse() as proxy:
        with closing(FactWriter()) as proxied:
            assert store_objects(proxied, many) == len(many)
            assert find_versions(proxied.client, [each[0] for each in many]).keys() == {
                each[0] for each in many
            }
        views.run()
        views.close()
    assert set(owners(clickhouse).values()) == {each.developer_id for each in many[:1000]}
    assert max(len(head.partition(b"\r\n")[0]) for head in proxy.requests) < 8 * 1024


def test_object_of_the_future_is_poison(objects: Ingest, clickhouse: Client) -> None:
    objects.send(changed_object(), headers={"CreatedAt": in_the_future(61)})
    objects.send(changed_object(), headers={"CreatedAt": in_the_future(59)})
    objects.run()
    assert objects.reasons == ["updated-at-in-the-future"]
    assert count_rows(clickhouse, "property_objects") == 1


def test_view_of_the_future_is_poison(views: Ingest, clickhouse: Client) -> None:
    late = in_the_future(61)
    views.send(ended_view(ViewedAt=late, LastActivityAt=late), ended_view())
    views.run()
    assert views.reasons == ["viewed-at-in-the-future"]
    assert count_rows(clickhouse, "property_object_view_facts") == 1


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
def test_process_starts_without_clickhouse_and_stops_when_told(
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
