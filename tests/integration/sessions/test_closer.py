"""The ActivityCloserJob: the rows of the specification's test table, and what lies around them."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
import time_machine
from django.db import connection, transaction
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from pinactivity.postgres.locks import CLOSER, REPLAY, advisory_lock
from sessions.closer import ActivityCloser, ActivityCloserResult
from sessions.errors import SessionNotFound
from sessions.lifecycle import RunOutcome
from sessions.models import ActivityCloserRun, Session
from sessions.options import ActivityCloserOptions
from sessions.services import link_session, record_heartbeat
from tests.concurrency import Background, run_together
from tests.factories import (
    DEVICE,
    MINUTE,
    make_due_sessions,
    make_session,
    make_view,
    silent_session,
)
from views.lifecycle import ViewSource
from views.models import PropertyObjectView
from views.services import extend_view, open_view

pytestmark = pytest.mark.django_db(transaction=True)

SESSION_ENDED = "pin.user-activity.session-ended.v1"
MICROSECOND = timedelta(microseconds=1)
VIEW_ENDED = "pin.user-activity.property-object-view-ended.v1"


def close_inactive(**options: Any) -> ActivityCloserResult:
    return ActivityCloser(ActivityCloserOptions(**options)).run()


def events(topic: str) -> list[dict[str, Any]]:
    rows = OutboxMessage.objects.filter(topic=topic).order_by("id")
    return [json.loads(payload) for payload in rows.values_list("payload", flat=True)]


def test_empty_batch_is_a_success_without_events() -> None:
    """Tests: Empty batch."""
    make_session(silent=11 * MINUTE)

    result = close_inactive()

    assert result.outcome is RunOutcome.SUCCEEDED
    assert (result.closed_sessions, result.closed_views, result.failures) == (0, 0, 0)
    assert result.backlog_remaining == 0
    assert not OutboxMessage.objects.exists()


def test_expired_session_closes_with_all_its_views_and_events_inv_ses_005_inv_lv_007_ac5() -> None:
    """Tests: expired session with open views."""
    user_id = new_id()
    session = silent_session(minutes=13, user_id=user_id)
    views = [
        make_view(session=session, filter_snapshot={"Rooms": [1, 2], "Город": "Уфа"}),
        make_view(session=session),
    ]

    result = close_inactive()

    assert (result.closed_sessions, result.closed_views) == (1, 2)
    closed = Session.objects.get(id=session.id)
    assert (closed.status, closed.close_reason, closed.version) == ("Inactive", "Inactivity", 2)
    assert closed.duration == session.last_activity_at - session.created_at == 5 * MINUTE
    assert closed.last_activity_at == session.last_activity_at
    assert closed.ended_at is not None
    assert timedelta(0) <= statement_time() - closed.ended_at < MINUTE
    for view in PropertyObjectView.objects.all():
        assert (view.status, view.close_reason, view.version) == ("Inactive", "Inactivity", 2)
        assert view.duration == MINUTE
    (ended,) = events(SESSION_ENDED)
    assert ended == {
        "SessionId": str(session.id),
        "AnonymousId": str(session.anonymous_id),
        "UserId": str(user_id),
        "CreatedAt": session.created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "LastActivityAt": session.last_activity_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "DurationSeconds": 300,
    }
    by_id = {event["PropertyObjectViewId"]: event for event in events(VIEW_ENDED)}
    assert set(by_id) == {str(view.id) for view in views}
    assert by_id[str(views[0].id)] == {
        "PropertyObjectViewId": str(views[0].id),
        "PropertyObjectId": str(views[0].property_object_id),
        "SessionId": str(session.id),
        "AnonymousId": str(session.anonymous_id),
        "UserId": str(user_id),
        "ViewSource": "Catalog",
        "ViewedAt": views[0].created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "LastActivityAt": views[0].last_activity_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "DurationSeconds": 60,
        "FilterSnapshot": {"Rooms": [1, 2], "Город": "Уфа"},
    }


def test_views_left_to_phase_b_close_with_their_session() -> None:
    """A view whose own activity is newer than the cutoff, which only a race can leave behind."""
    session = silent_session(minutes=13)
    view = make_view(session=session, silent=MINUTE)

    close_inactive()

    assert PropertyObjectView.objects.get(id=view.id).status == "Inactive"
    assert Session.objects.get(id=session.id).status == "Inactive"
    assert [event["PropertyObjectViewId"] for event in events(VIEW_ENDED)] == [str(view.id)]


def test_hanging_view_in_a_live_session_closes_alone_inv_lv_004() -> None:
    """Tests: hanging view in a live session."""
    session = silent_session(minutes=1)
    hanging = make_view(session=session, silent=13 * MINUTE)
    live = make_view(session=session)

    result = close_inactive()

    assert (result.closed_sessions, result.closed_views) == (0, 1)
    assert PropertyObjectView.objects.get(id=hanging.id).status == "Inactive"
    assert PropertyObjectView.objects.get(id=live.id).status == "Active"
    assert Session.objects.get(id=session.id).status == "Active"
    assert [event["PropertyObjectViewId"] for event in events(VIEW_ENDED)] == [str(hanging.id)]


def test_second_run_closes_nothing_and_repeats_no_event_ac5() -> None:
    """Tests: idempotency, restart. Idempotency: duplicate item."""
    for _ in range(3):
        silent_session(minutes=20, views=2)
    close_inactive()
    before = list(Session.objects.order_by("id").values())

    again = close_inactive()

    assert (again.closed_sessions, again.closed_views) == (0, 0)
    assert list(Session.objects.order_by("id").values()) == before
    assert OutboxMessage.objects.count() == 9


def test_user_id_of_the_view_event_is_the_sessions_at_closing_time() -> None:
    """Tests: UserId in the payload."""
    session = silent_session(minutes=1)
    hanging = make_view(session=session, silent=13 * MINUTE)
    user_id = new_id()
    Session.objects.filter(id=session.id).update(user_id=user_id, linked_at=statement_time())

    close_inactive()

    assert PropertyObjectView.objects.get(id=hanging.id).user_id is None
    assert [event["UserId"] for event in events(VIEW_ENDED)] == [str(user_id)]


@pytest.mark.parametrize(
    ("lasted", "seconds"),
    [
        (timedelta(0), 0),
        (timedelta(seconds=1) - MICROSECOND, 0),
        (timedelta(seconds=1), 1),
        (timedelta(days=1), 86_400),
        (timedelta(days=30), 2_592_000),
        (timedelta(days=30) - MICROSECOND, 2_591_999),
        (timedelta(days=36_500), 3_153_600_000),
    ],
)
def test_duration_is_reported_in_whole_seconds_rounded_down_inv_ses_005_c22(
    lasted: timedelta, seconds: int
) -> None:
    session = silent_session(minutes=13, lasted=lasted)
    make_view(session=session, lasted=lasted)

    close_inactive()

    ended = [*events(SESSION_ENDED), *events(VIEW_ENDED)]
    assert [event["DurationSeconds"] for event in ended] == [seconds, seconds]
    assert all(type(event["DurationSeconds"]) is int for event in ended)
    assert Session.objects.get().duration == PropertyObjectView.objects.get().duration == lasted


@pytest.mark.parametrize("day", ["2026-02-28", "2026-03-28", "2025-10-25", "2025-12-31"])
def test_session_across_midnight_lasts_its_420_seconds_c23(day: str) -> None:
    """Whatever the last day of a month, and the nights when clocks are put forward or back."""
    start = datetime.fromisoformat(f"{day}T23:58:00Z")
    make_session(created_at=start, last_activity_at=start + timedelta(seconds=420))

    close_inactive()

    (ended,) = events(SESSION_ENDED)
    assert (ended["CreatedAt"], ended["DurationSeconds"]) == (f"{day}T23:58:00.000000Z", 420)


def test_row_exactly_at_the_cutoff_stays() -> None:
    session = make_session(silent=20 * MINUTE)
    closer = ActivityCloser(ActivityCloserOptions())

    closer.run(now=session.last_activity_at + 12 * MINUTE)
    assert Session.objects.get(id=session.id).status == "Active"
    closer.run(now=session.last_activity_at + 12 * MINUTE + timedelta(microseconds=1))
    assert Session.objects.get(id=session.id).status == "Inactive"


def test_large_backlog_closes_in_one_run_over_many_units() -> None:
    for _ in range(23):
        silent_session(minutes=13, views=1)

    result = close_inactive(batch_size=5, sessions_per_transaction=2)

    assert (result.closed_sessions, result.closed_views, result.backlog_remaining) == (23, 23, 0)


def test_units_find_their_rows_by_indexes_whatever_the_tables_look_like_to_the_planner() -> None:
    """Small tables invite it to read them whole, for each unit; so do large ones of odd shape."""

    def whole_reads() -> dict[str, int]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute(
                "SELECT relname, seq_scan FROM pg_stat_user_tables"
                " WHERE relname IN ('sessions', 'property_object_views')"
            )
            return dict(cursor.fetchall())

    for _ in range(20):
        silent_session(minutes=13, views=2)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE sessions, property_object_views")
    before = whole_reads()

    result = close_inactive(batch_size=5, sessions_per_transaction=2)

    assert (result.closed_sessions, result.closed_views) == (20, 40)
    assert whole_reads() == before


def test_50_parallel_instances_close_each_of_10000_rows_once_inv_ses_006_inv_lv_008_c15() -> None:
    """Tests, idempotency: parallel instances."""
    sessions, views = 2500, 3
    make_due_sessions(sessions, views=views)

    results = run_together([lambda: close_inactive(batch_size=10, sessions_per_transaction=3)] * 50)

    assert sum(result.closed_sessions for result in results) == sessions
    assert sum(result.closed_views for result in results) == views * sessions
    assert sum(result.closed_sessions + result.closed_views > 0 for result in results) > 1
    assert all((result.outcome, result.failures) == ("Succeeded", 0) for result in results)
    keys = list(OutboxMessage.objects.values_list("key", flat=True))
    assert len(keys) == len(set(keys)) == 10_000


def test_cancellation_ends_the_run_between_transactions_and_keeps_what_is_committed() -> None:
    """Tests: cancellation."""
    for _ in range(10):
        silent_session(minutes=13)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3  # once for phase A, twice for phase B

    options = ActivityCloserOptions(sessions_per_transaction=2)
    result = ActivityCloser(options, stop=stop).run()

    assert result.outcome is RunOutcome.CANCELLED
    assert result.closed_sessions == Session.objects.filter(status="Inactive").count() == 4
    assert OutboxMessage.objects.count() == 4
    assert result.backlog_remaining == 6
    assert close_inactive().closed_sessions == 6


def test_run_ends_at_max_run_duration_and_the_next_takes_the_rest() -> None:
    silent_session(minutes=13)

    result = close_inactive(max_run_duration=timedelta(microseconds=1))

    assert result.outcome is RunOutcome.OUT_OF_TIME
    assert result.backlog_remaining == 1
    assert close_inactive().closed_sessions == 1


@pytest.fixture
def refuse_one(request: pytest.FixtureRequest) -> Any:
    """Make PostgreSQL refuse the closing of one session, by a trigger of the test's own."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE refused (id uuid)")
        cursor.execute("CREATE SEQUENCE refusals")  # which no rollback sets back
        cursor.execute(
            """
            CREATE FUNCTION refuse_listed() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF EXISTS (SELECT FROM refused WHERE refused.id = new.id) THEN
                    PERFORM nextval('refusals');
                    RAISE EXCEPTION 'refused' USING ERRCODE = 'raise_exception';
                END IF;
                RETURN new;
            END $$
            """
        )
        cursor.execute(
            "CREATE TRIGGER refuse_listed BEFORE UPDATE ON sessions"
            " FOR EACH ROW EXECUTE FUNCTION refuse_listed()"
        )

    def refuse(session: Session) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO refused VALUES (%s)", [session.id])

    yield refuse
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER refuse_listed ON sessions")
        cursor.execute("DROP FUNCTION refuse_listed")
        cursor.execute("DROP TABLE refused")
        cursor.execute("DROP SEQUENCE refusals")


def test_failure_of_one_session_leaves_only_that_one_active(refuse_one: Any) -> None:
    """Tests, border of the transaction: partial failure."""
    sessions = [silent_session(minutes=13 + number, views=1) for number in range(7)]
    refuse_one(sessions[3])

    result = close_inactive(sessions_per_transaction=5)

    assert (result.outcome, result.closed_sessions, result.failures) == ("Succeeded", 6, 1)
    assert [s.id for s in Session.objects.filter(status="Active")] == [sessions[3].id]
    assert OutboxMessage.objects.filter(topic=SESSION_ENDED).count() == 6
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM refused")
    assert close_inactive().closed_sessions == 1


def test_row_that_keeps_failing_is_tried_twice_a_run_and_taken_again_by_the_next_tick(
    refuse_one: Any,
) -> None:
    """Idempotency: repeatable error; no endless retry within a run."""
    bad, *_ = [silent_session(minutes=14 - number / 10) for number in range(3)]
    refuse_one(bad)

    results = [close_inactive() for _ in range(3)]

    assert [(run.outcome, run.closed_sessions, run.failures) for run in results] == [
        ("Succeeded", 2, 1),
        ("Succeeded", 0, 1),
        ("Succeeded", 0, 1),
    ]
    assert [run.backlog_remaining for run in results] == [1, 1, 1]
    with connection.cursor() as cursor:
        cursor.execute("SELECT last_value FROM refusals")
        assert cursor.fetchone() == (2 + 1 + 1,)  # in its unit and alone; then it is the unit
        cursor.execute("DELETE FROM refused")
    assert close_inactive().closed_sessions == 1
    assert [event["SessionId"] for event in events(SESSION_ENDED)].count(str(bad.id)) == 1


def test_row_that_is_revived_while_its_unit_fails_stays_alive(refuse_one: Any) -> None:
    """Taken alone, it must pass the whole predicate again."""
    bad, revived, closed = (silent_session(minutes=14 - number / 10) for number in range(3))
    refuse_one(bad)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == 4:  # phase A, the unit, `bad` alone; now `revived` alone
            record_heartbeat(
                session_id=revived.id,
                anonymous_id=revived.anonymous_id,
                device=DEVICE,
            )
        return False

    result = ActivityCloser(ActivityCloserOptions(), stop=stop).run()

    assert (result.closed_sessions, result.failures) == (1, 1)
    assert set(Session.objects.active().values_list("id", flat=True)) == {bad.id, revived.id}
    assert [event["SessionId"] for event in events(SESSION_ENDED)] == [str(closed.id)]


def test_database_that_cannot_write_fails_the_run_at_once() -> None:
    """Not row by row, and not as a success: the alert on the last success must see it."""
    for _ in range(5):
        silent_session(minutes=13)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_messages RENAME TO gone")
    try:
        result = close_inactive()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE gone RENAME TO outbox_messages")

    assert (result.outcome, result.failures) == (RunOutcome.FAILED, 1)
    assert result.closed_sessions == 0
    assert close_inactive().closed_sessions == 5


def test_locked_table_is_left_to_the_next_tick_without_an_error() -> None:
    silent_session(minutes=13)
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("LOCK TABLE sessions IN EXCLUSIVE MODE")
        result = close_inactive()
    finally:
        holder.rollback()
        holder.close()
    assert (result.outcome, result.failures) == (RunOutcome.SUCCEEDED, 0)
    assert close_inactive().closed_sessions == 1


def test_failing_view_leaves_only_that_one_active() -> None:
    """Border of the transaction: partial failure, phase A."""
    session = silent_session(minutes=1)
    bad = make_view(session=session, silent=14 * MINUTE, view_source="Catalog")
    good = [make_view(session=session, silent=13 * MINUTE) for _ in range(4)]
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE property_object_views ADD CONSTRAINT chk_test"
            f" CHECK (id <> '{bad.id}' OR status = 'Active')"
        )
    try:
        result = close_inactive()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE property_object_views DROP CONSTRAINT chk_test")

    assert (result.closed_views, result.failures) == (len(good), 1)
    assert [v.id for v in PropertyObjectView.objects.filter(status="Active")] == [bad.id]


def test_held_view_delays_its_session_by_one_tick_and_nobody_else() -> None:
    held = silent_session(minutes=14)
    view = make_view(session=held, silent=MINUTE)  # not due: phase B waits for it
    others = [silent_session(minutes=13) for _ in range(3)]
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT FROM property_object_views WHERE id = %s FOR UPDATE", [view.id])

        result = close_inactive()

        assert (result.outcome, result.failures) == ("Succeeded", 0)
        assert result.closed_sessions == len(others)
        assert Session.objects.get(id=held.id).status == "Active"
    finally:
        holder.rollback()
        holder.close()
    assert close_inactive().closed_sessions == 1


def test_statement_timeout_goes_on_with_smaller_units_c21() -> None:
    """Closing two sessions is too much for the timeout, closing one is not."""
    for _ in range(6):
        silent_session(minutes=13)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            CREATE FUNCTION work_slowly() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_sleep(0.3); RETURN new; END $$;
            CREATE TRIGGER work_slowly BEFORE UPDATE ON sessions
            FOR EACH ROW EXECUTE FUNCTION work_slowly();
            SET statement_timeout = '500ms'
            """
        )
    try:
        result = close_inactive(sessions_per_transaction=4)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET statement_timeout")
            cursor.execute("DROP TRIGGER work_slowly ON sessions; DROP FUNCTION work_slowly")

    assert (result.outcome, result.closed_sessions, result.failures) == ("Succeeded", 6, 0)


def test_lost_connection_ends_the_run_as_failed_and_the_next_takes_the_rest() -> None:
    """Idempotency: job restart, repeatable error."""
    for _ in range(4):
        silent_session(minutes=13)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:  # before the second unit of phase B
            killer = connection.copy()
            with killer.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            killer.close()
        return False

    options = ActivityCloserOptions(sessions_per_transaction=2)
    result = ActivityCloser(options, stop=stop).run()

    assert (result.outcome, result.failures, result.closed_sessions) == (RunOutcome.FAILED, 1, 2)
    connection.close()
    assert close_inactive().closed_sessions == 2


def test_run_is_reported_by_the_lines_metrics_and_spans_of_the_specification(
    caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter, refuse_one: Any
) -> None:
    """The specification's section on what can be observed: names, and what each of them holds."""
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


def test_live_run_skips_while_a_replay_is_under_way() -> None:
    silent_session(minutes=13)
    with advisory_lock(REPLAY):
        assert close_inactive().outcome is RunOutcome.SKIPPED
    assert close_inactive().closed_sessions == 1


def test_single_instance_skips_while_another_runs() -> None:
    silent_session(minutes=13)
    with advisory_lock(CLOSER):
        assert close_inactive(single_instance=True).outcome is RunOutcome.SKIPPED
        assert close_inactive().closed_sessions == 1


def test_locked_rows_wait_for_the_next_tick_c19() -> None:
    make_due_sessions(100)
    held = list(Session.objects.values_list("id", flat=True))
    free = [silent_session(minutes=12.5) for _ in range(3)]
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT FROM sessions WHERE id = ANY(%s) FOR UPDATE", [held])
        result = close_inactive()
        assert (result.closed_sessions, result.failures) == (len(free), 0)
        assert result.backlog_remaining == len(held)
        assert set(Session.objects.active().values_list("id", flat=True)) == set(held)
    finally:
        holder.rollback()
        holder.close()
    assert close_inactive().closed_sessions == len(held)


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


def test_heartbeats_and_closers_at_the_threshold_leave_one_outcome_each_ac9_a6() -> None:
    """Race: heartbeat against closing.

    Either the beat came first and the session lives, or the closer did and it restarted.
    """
    sessions = [silent_session(minutes=12, views=1) for _ in range(60)]

    def extend_all() -> list[tuple[UUID, bool]]:
        return [
            (beat.session.session_id, beat.restarted)
            for beat in (
                record_heartbeat(
                    session_id=session.id,
                    anonymous_id=session.anonymous_id,
                    device=DEVICE,
                )
                for session in sessions
            )
        ]

    def close_all() -> list[tuple[UUID, bool]]:
        close_inactive(sessions_per_transaction=1)
        return []

    beats, *_ = run_together([extend_all, close_all, close_all])

    restarted = 0
    for session, (session_id, was_restarted) in zip(sessions, beats, strict=True):
        row = Session.objects.get(id=session.id)
        active = Session.objects.get(anonymous_id=session.anonymous_id, status="Active")
        assert active.id == session_id
        if was_restarted:
            assert (row.status, row.duration) == ("Inactive", 5 * MINUTE)
            assert session_id != session.id
            restarted += 1
        else:
            assert (row.status, session_id) == ("Active", session.id)
            assert row.last_activity_at > session.last_activity_at
    assert len(events(SESSION_ENDED)) == restarted


def test_heartbeat_of_a_view_that_was_closed_first_is_not_accepted_inv_lv_003() -> None:
    """Race: view heartbeat, the closer was first."""
    view = make_view(session=silent_session(minutes=1), silent=13 * MINUTE)
    anonymous_id = view.session.anonymous_id
    close_inactive()

    assert not extend_view(view_id=view.id, anonymous_id=anonymous_id)
    opened = open_view(
        session_id=view.session_id,
        anonymous_id=anonymous_id,
        device=DEVICE,
        property_object_id=view.property_object_id,
        view_source=ViewSource.CATALOG,
        filter_snapshot=None,
    )

    assert (opened.is_new, opened.restarted) == (True, False)
    assert len(events(VIEW_ENDED)) == 1


def test_view_that_was_extended_first_stays_open() -> None:
    """Race: view heartbeat, the beat was first."""
    session = silent_session(minutes=12.5, views=1)
    view = session.views.get()
    assert extend_view(view_id=view.id, anonymous_id=session.anonymous_id)

    result = close_inactive()

    assert (result.closed_sessions, result.closed_views) == (0, 0)


def test_link_after_the_closing_finds_no_session_and_repeats_nothing_inv_ses_006() -> None:
    """Race: link, the closer was first."""
    session = silent_session(minutes=13)
    close_inactive()

    with pytest.raises(SessionNotFound):
        link_session(anonymous_id=session.anonymous_id, user_id=new_id())

    assert [event["SessionId"] for event in events(SESSION_ENDED)] == [str(session.id)]
    assert OutboxMessage.objects.count() == 1


def test_switch_under_way_closes_the_session_and_the_run_leaves_it_inv_ses_006() -> None:
    """Race: link (Switched), the switch was first.

    The switch holds the session: the closer skips it, and finds it closed afterwards.
    """
    session = silent_session(minutes=13, views=1, user_id=new_id())

    with transaction.atomic():
        link_session(anonymous_id=session.anonymous_id, user_id=new_id())
        with Background(close_inactive) as run:
            result = run.result()
        assert isinstance(result, ActivityCloserResult)
        # Phase A takes views alone: it skips this one, which the switch has closed.
        assert (result.closed_sessions, result.closed_views, result.failures) == (0, 0, 0)

    assert close_inactive().closed_sessions == 0
    assert Session.objects.get(id=session.id).close_reason == "Switched"
    assert [event["SessionId"] for event in events(SESSION_ENDED)] == [str(session.id)]
    assert len(events(VIEW_ENDED)) == 1


@pytest.mark.parametrize("skew", [timedelta(hours=1), timedelta(hours=-1)])
def test_clock_of_the_workers_host_closes_nothing_early_or_late_c20(skew: timedelta) -> None:
    live, due = make_session(silent=11 * MINUTE), silent_session(minutes=13)

    with time_machine.travel(datetime.now(UTC) + skew):
        result = close_inactive()

    assert (result.outcome, result.closed_sessions) == ("Succeeded", 1)
    assert Session.objects.get(id=live.id).status == "Active"
    closed = Session.objects.get(id=due.id)
    assert closed.ended_at is not None
    assert abs(statement_time() - closed.ended_at) < MINUTE
    run = ActivityCloserRun.objects.get()
    assert abs(statement_time() - run.started_at) < MINUTE


def test_closing_skips_a_heartbeat_in_flight_and_then_leaves_the_row_c3_ac9() -> None:
    """Race: the heartbeat was first.

    The beat holds the row uncommitted: the closer skips it, and finds it alive afterwards.
    """
    session = silent_session(minutes=12.5)
    beating = connection.copy()
    try:
        beating.set_autocommit(False)
        with beating.cursor() as cursor:
            cursor.execute(
                "UPDATE sessions SET last_activity_at = statement_timestamp() WHERE id = %s",
                [session.id],
            )
        with Background(close_inactive) as run:
            result = run.result()
        assert isinstance(result, ActivityCloserResult)
        assert result.closed_sessions == 0
        beating.commit()
    finally:
        beating.close()
    assert close_inactive().closed_sessions == 0
    assert Session.objects.get(id=session.id).status == "Active"
