"""The shipped visits, replayed: PostgreSQL and Kafka agree with the oracle, row by row."""

import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import pytest
from clickhouse_connect.driver.client import Client
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client as ApiClient

from devstats.options import DevStatsOptions
from devstats.ownership import PropertyObject
from devstats.property_objects import store_objects
from devstats.reconciliation.report import hour_of
from devstats.writer import FactWriter
from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.kafka.spec import registered_consumers
from pinactivity.postgres.locks import REPLAY, advisory_lock
from sessions.models import ActivityCloserRun, Session
from sessions.options import ActivityCloserOptions
from tests.acceptance import oracle
from tests.consuming import drive, real_consumer
from tests.dev_stats import SESSIONS, VIEWS, count_rows, merge, read_sessions, stop_merges
from tests.kafka import go_on_from, publish_outbox, skip_to_end
from tests.tokens import SECRET, bearer, development_token
from views.models import (
    PropertyObjectView,
    PropertyObjectViewStats,
    PropertyObjectViewStatsSeen,
)
from views.stats import RebuildResult, rebuild_stats

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(900),
]

VISITS = settings.BASE_DIR / "data" / "web-visits-1995-08-01.csv"
START = datetime(2026, 11, 1, tzinfo=UTC)
SESSION_ENDED = "pin.user-activity.session-ended.v1"
VIEW_ENDED = "pin.user-activity.property-object-view-ended.v1"


def replay(file: Any = VISITS, **options: Any) -> str:
    output = io.StringIO()
    call_command("replay_visits", str(file), stdout=output, **{"start": START, **options})
    return output.getvalue()


@pytest.fixture(autouse=True)
def _leave_the_connection_as_it_was() -> Any:
    yield
    connection.close()  # the replay has changed its settings


def rows_of(expected: list[oracle.ExpectedSession]) -> tuple[set[Any], set[Any]]:
    """The oracle's sessions and views as tuples, views with the start of their session."""
    sessions = {
        (s.anonymous_id, s.created_at, s.last_activity_at, s.ended_at, s.duration, s.close_reason)
        for s in expected
    }
    views = {
        (
            s.anonymous_id,
            s.created_at,
            v.property_object_id,
            v.created_at,
            v.last_activity_at,
            v.ended_at,
            v.duration,
            v.close_reason,
        )
        for s in expected
        for v in s.views
    }
    return sessions, views


def rows_in_postgres() -> tuple[set[Any], set[Any]]:
    columns = ("created_at", "last_activity_at", "ended_at", "duration", "close_reason")
    sessions = Session.objects.values_list("anonymous_id", *columns)
    views = PropertyObjectView.objects.values_list(
        "session__anonymous_id", "session__created_at", "property_object_id", *columns
    )
    assert sessions.count() == len(set(sessions))
    assert views.count() == len(set(views))
    return set(sessions), set(views)


@pytest.fixture
def _consumers_from_here(kafka_topics: None) -> None:
    """The consumers of statistics are to read this test's events only."""
    for name in ("view-stats", SESSIONS, VIEWS):
        spec = registered_consumers()[name]
        skip_to_end(spec.topics, spec.group)


@pytest.mark.usefixtures("_consumers_from_here")
@pytest.mark.parametrize("minutes", [pytest.param(12, marks=pytest.mark.kafka), 10])
def test_shipped_visits_become_exactly_the_predicted_rows_and_events(
    minutes: int,
    settings: Any,
    read_topic: Callable[[str], list[Any]],
    clickhouse: Client,
) -> None:
    began = datetime.now(UTC)
    threshold = timedelta(minutes=minutes)
    settings.ACTIVITY_CLOSER = ActivityCloserOptions(inactivity_threshold=threshold)
    settings.DEV_STATS = DevStatsOptions(flush_interval=timedelta(milliseconds=200))
    expected = oracle.predict(oracle.read_visits(VISITS), start=START, threshold=threshold)

    summary = replay()

    predicted_sessions, predicted_views = rows_of(expected)
    sessions, views = rows_in_postgres()
    assert sessions == predicted_sessions
    assert views == predicted_views
    assert f"{len(sessions)} sessions and {len(views)} views closed" in summary
    assert not ActivityCloserRun.objects.exists()

    publish_outbox()
    assert_events_are_one_to_one(
        read_topic(SESSION_ENDED), Session, "Session", predicted_session_payloads(expected)
    )
    assert_events_are_one_to_one(
        read_topic(VIEW_ENDED),
        PropertyObjectView,
        "PropertyObjectView",
        predicted_view_payloads(expected),
    )

    consume_view_stats(count=len(views))
    assert_stats_are(expected)

    settings.JWT_DEVELOPMENT_SECRET = SECRET
    give_objects_to_developers()
    stop_merges(clickhouse)
    answers = []
    for _ in range(2):  # the second time both topics are read again
        consume_facts(clickhouse, expected, since=began)
        assert_facts_are(clickhouse, expected)
        assert_stores_reconcile(expected)
        answers.append(answers_of_the_api())
    merge(clickhouse)
    answers.append(answers_of_the_api())
    assert answers[0] == answers[1] == answers[2]


def consume_facts(
    clickhouse: Client, expected: list[oracle.ExpectedSession], *, since: datetime
) -> None:
    """Let dev-stats read what was published since then, once more if it has before."""
    for name, table, count in (
        (SESSIONS, "session_facts", len(expected)),
        (VIEWS, "property_object_view_facts", oracle.view_totals(expected).count),
    ):
        spec = registered_consumers()[name]
        go_on_from(spec.topics, spec.group, since)
        wanted = count_rows(clickhouse, table) + count
        consumer = real_consumer(name)
        drive(consumer, lambda table=table, wanted=wanted: count_rows(clickhouse, table) >= wanted)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        consumer.close()


def assert_facts_are(clickhouse: Client, expected: list[oracle.ExpectedSession]) -> None:
    """What readers count, by every field, is what the oracle predicts and the events say."""
    message_ids = {key: str(m) for key, m in OutboxMessage.objects.values_list("key", "message_id")}
    sessions = clickhouse.query(
        "SELECT DISTINCT FactId, toString(SessionId), toString(AnonymousId), UserId, StartedAt,"
        " EventTime, LastActivityAt, DurationSeconds, ViewerKind FROM session_facts"
    ).result_rows
    assert sorted(map(tuple, sessions)) == sorted(
        (
            message_ids[session_id],
            session_id,
            payload["AnonymousId"],
            None,
            *(datetime.fromisoformat(payload["CreatedAt"]),) * 2,
            datetime.fromisoformat(payload["LastActivityAt"]),
            payload["DurationSeconds"],
            "Guest",
        )
        for session_id, payload in predicted_session_payloads(expected).items()
    )
    views = clickhouse.query(
        "SELECT DISTINCT FactId, toString(PropertyObjectViewId), toString(PropertyObjectId),"
        " toString(SessionId), toString(AnonymousId), UserId, ViewSource, EventTime,"
        " LastActivityAt, DurationSeconds, FilterSnapshot, ViewerKind"
        " FROM property_object_view_facts"
    ).result_rows
    assert sorted(map(tuple, views)) == sorted(
        (
            message_ids[view_id],
            view_id,
            payload["PropertyObjectId"],
            payload["SessionId"],
            payload["AnonymousId"],
            None,
            payload["ViewSource"],
            datetime.fromisoformat(payload["ViewedAt"]),
            datetime.fromisoformat(payload["LastActivityAt"]),
            payload["DurationSeconds"],
            "",
            "Guest",
        )
        for view_id, payload in predicted_view_payloads(expected).items()
    )
    totals = oracle.session_totals(expected)
    assert read_sessions(clickhouse) == (totals.count, totals.total_seconds)


DEVELOPERS = [uuid5(NAMESPACE_URL, f"developer:{number}") for number in range(3)]


def give_objects_to_developers() -> None:
    """Let each developer own a third of the objects, since before they were viewed."""
    ids = PropertyObjectView.objects.order_by("property_object_id").values_list(
        "property_object_id", flat=True
    )
    owned = [
        PropertyObject(object_id, DEVELOPERS[place % 3], None, START - timedelta(days=1))
        for place, object_id in enumerate(ids.distinct())
    ]
    with closing(FactWriter()) as writer:
        assert store_objects(writer, owned) == len(owned)


def answers_of_the_api() -> list[Any]:
    """What each developer is told, but for when the newest of it was stored."""
    answers = []
    for developer in DEVELOPERS:
        token = development_token(new_id(), developer_id=str(developer))
        for path in ("sessions", "property-objects"):
            response = ApiClient().get(
                f"/api/dev-stats/{path}/summary",
                {"From": "2026-11-01", "To": "2026-11-03"},
                headers=bearer(token),
            )
            assert response.status_code == 200
            answers.append({**response.json(), "FreshAsOf": None})
            assert answers[-1].get("Items") or answers[-1]["Total"]["Sessions"]
    return answers


def assert_stores_reconcile(expected: list[oracle.ExpectedSession]) -> None:
    """Every ended row has its outbox row, one offset and one fact, in the hour of its end."""
    output = io.StringIO()
    call_command("reconcile", "--from=2026-11-01", "--to=2026-11-03", "--json", stdout=output)
    report = json.loads(output.getvalue())
    hours = Counter[tuple[str, datetime]]()
    for session in expected:
        hours[SESSION_ENDED, hour_of(session.ended_at)] += 1
        for view in session.views:
            hours[VIEW_ENDED, hour_of(view.ended_at)] += 1
    stores = ("Closed", "Outbox", "Offsets", "Facts")
    assert {
        (hour["Topic"], datetime.fromisoformat(hour["Hour"])): [hour[name] for name in stores]
        for hour in report["Hours"]
    } == {hour: [number] * len(stores) for hour, number in hours.items()}
    others = ("Lost", "Duplicated", "Late", "NotComparable")
    assert [report["Total"][name] for name in others] == [0, 0, 0, 0]


def consume_view_stats(*, count: int) -> None:
    """Run the statistics' consumer until it has counted so many views."""
    consumer = real_consumer("view-stats")
    drive(consumer, lambda: PropertyObjectViewStatsSeen.objects.count() >= count)
    consumer.close()


def assert_stats_are(expected: list[oracle.ExpectedSession]) -> None:
    last_viewed = oracle.last_viewed_by_object(expected)
    assert set(
        PropertyObjectViewStats.objects.values_list(
            "property_object_id", "views_count", "total_duration_seconds", "last_viewed_at"
        )
    ) == {
        (object_id, totals.count, totals.total_seconds, last_viewed[object_id])
        for object_id, totals in oracle.view_totals_by_object(expected).items()
    }
    assert rebuild_stats(repair=False) == RebuildResult(
        objects=len(last_viewed), views=oracle.view_totals(expected).count
    )


def predicted_session_payloads(expected: list[oracle.ExpectedSession]) -> dict[str, Any]:
    """The oracle's payloads by SessionId, which only PostgreSQL knows."""
    ids = {
        (anonymous_id, created_at): str(session_id)
        for session_id, anonymous_id, created_at in Session.objects.values_list(
            "id", "anonymous_id", "created_at"
        )
    }
    payloads = {}
    for session in expected:
        session_id = ids[session.anonymous_id, session.created_at]
        payload = oracle.expected_session_ended_payload(session)
        payloads[session_id] = {"SessionId": session_id, **payload}
    return payloads


def predicted_view_payloads(expected: list[oracle.ExpectedSession]) -> dict[str, Any]:
    """The oracle's payloads by PropertyObjectViewId."""
    ids = {
        (anonymous_id, session_created_at, object_id, created_at): (str(view_id), str(session_id))
        for (
            view_id,
            session_id,
            anonymous_id,
            session_created_at,
            object_id,
            created_at,
        ) in PropertyObjectView.objects.values_list(
            "id",
            "session_id",
            "session__anonymous_id",
            "session__created_at",
            "property_object_id",
            "created_at",
        )
    }
    payloads = {}
    for session in expected:
        for view in session.views:
            view_id, session_id = ids[
                session.anonymous_id, session.created_at, view.property_object_id, view.created_at
            ]
            payloads[view_id] = {
                "PropertyObjectViewId": view_id,
                "SessionId": session_id,
                **oracle.expected_view_ended_payload(session, view),
            }
    return payloads


def assert_events_are_one_to_one(
    records: list[Any], model: Any, aggregate_type: str, payloads: dict[str, Any]
) -> None:
    assert {record.key.decode(): json.loads(record.value) for record in records} == payloads
    assert len(records) == len(payloads) == model.objects.filter(status="Inactive").count()
    versions = {str(pk): str(version) for pk, version in model.objects.values_list("id", "version")}
    message_ids = {
        key: str(message_id)
        for key, message_id in OutboxMessage.objects.values_list("key", "message_id")
    }
    for record in records:
        headers = {name: value.decode() for name, value in record.headers}
        key = record.key.decode()
        assert headers["AggregateId"] == key
        assert headers["AggregateType"] == aggregate_type
        assert headers["EventType"] == f"{aggregate_type}EndedKafkaEvent"
        assert headers["ContractVersion"] == "1"
        assert headers["Version"] == versions[key] == "2"
        assert headers["MessageId"] == message_ids[key]


FEW = "seconds,device,page\n0,1,\n4,2,1\n70,2,1\n100,2,2\n2000,1,7\n2000,2,1\n5500,2,2\n9000,2,2\n"


@pytest.fixture
def few_visits(tmp_path: Any) -> Any:
    path = tmp_path / "visits.csv"
    path.write_text(FEW)
    return path


@pytest.mark.parametrize("tick", [60, 3600])
def test_slow_ticks_leave_abandoned_rows_as_predicted(few_visits: Any, tick: int) -> None:
    interval = timedelta(seconds=tick)
    expected = oracle.predict(oracle.read_visits(few_visits), start=START, tick=interval)

    replay(few_visits, tick=interval)

    assert rows_in_postgres() == rows_of(expected)
    reasons = {session.close_reason for session in expected}
    assert reasons == ({"Inactivity"} if tick == 60 else {"Inactivity", "Abandoned"})


def test_second_replay_is_refused_unless_again(few_visits: Any) -> None:
    replay(few_visits)
    before = Session.objects.count()
    with pytest.raises(CommandError, match="--again"):
        replay(few_visits)
    assert "already" in replay(few_visits, if_new=True)
    assert Session.objects.count() == before
    replay(few_visits, again=True)
    assert Session.objects.count() == 2 * before


def test_replay_that_would_end_in_the_future_is_refused(few_visits: Any) -> None:
    with pytest.raises(CommandError, match="future"):
        replay(few_visits, start=datetime.now(UTC) - timedelta(hours=2))
    assert not Session.objects.exists()


def test_replay_is_refused_while_another_is_under_way(few_visits: Any) -> None:
    with advisory_lock(REPLAY), pytest.raises(CommandError, match="under way"):
        replay(few_visits)
    assert not Session.objects.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "first line"),
        ("a,b,c\n", "first line"),
        ("seconds,device,page\n", "no visits"),
        ("seconds,device,page\n0,1,\nx,1,\n", "line 3"),
        ("seconds,device,page\n0,1,\n5,1\n", "line 3"),
        ("seconds,device,page\n5,1,\n4,1,\n", "line 3"),
        ("seconds,device,page\n-5,1,\n", "line 2"),
    ],
)
def test_unreadable_visits_are_refused_with_their_line(
    tmp_path: Any, content: str, message: str
) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(content)
    with pytest.raises(CommandError, match=message):
        replay(path)
    with pytest.raises(CommandError, match="cannot be read"):
        replay(tmp_path / "absent.csv")
