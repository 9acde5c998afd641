"""Facts in ClickHouse: the consumers of dev-stats, by their specification's own words.

AC are its acceptance criteria, RETRY 1 to 4 the rows of its table "Retry и DLQ", C the cases of
public bug reports. `--dev-stats-scale=full --timeout=900` makes the outages last minutes.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client
from structlog.testing import capture_logs

from devstats.clickhouse import DATABASE
from devstats.options import DevStatsOptions
from devstats.tables import SESSION_FACTS
from devstats.writer import MOST_MONTHS, FactWriter
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topics import (
    PROPERTY_OBJECT_CHANGED,
    PROPERTY_OBJECT_VIEW_ENDED,
    SESSION_ENDED,
)
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
    metric,
    read_sessions,
    rows_of,
    spread,
    stop_merges,
)

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
        ({"LastActivityAt": "later"}, "last-activity-at-in-the-future"),
        ({"LastActivityAt": "9999-12-31T23:59:59.999999Z"}, "last-activity-at-in-the-future"),
        ({"SessionId": "00000000-0000-0000-0000-000000000000"}, "session-id-invalid"),
        (b"\xff\xfe", "value-not-json"),
    ],
    ids=["duration", "default", "future", "activity", "year 9999", "empty", "bytes"],
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
    views.send(ended_view(LastActivityAt=late), ended_view(LastActivityAt="9999-12-31T00:00:00Z"))
    views.run()
    assert views.reasons == [
        "viewed-at-in-the-future",
        "last-activity-at-in-the-future",
        "last-activity-at-in-the-future",
    ]
    assert count_rows(clickhouse, "property_object_view_facts") == 1


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
