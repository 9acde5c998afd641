"""The ActivityCloserJob: the rows of the specification's test table."""

from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from django.db import connection

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from pinactivity.postgres.locks import CLOSER, REPLAY, advisory_lock
from sessions.closer import ActivityCloser
from sessions.lifecycle import RunOutcome
from sessions.models import ActivityCloserRun, Session
from sessions.options import ActivityCloserOptions
from tests.closer import SESSION_ENDED, VIEW_ENDED, close_inactive, read_events
from tests.concurrency import run_together
from tests.factories import (
    MINUTE,
    make_due_sessions,
    make_session,
    make_view,
    silent_session,
)
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db(transaction=True)

MICROSECOND = timedelta(microseconds=1)


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
    (ended,) = read_events(SESSION_ENDED)
    assert ended == {
        "SessionId": str(session.id),
        "AnonymousId": str(session.anonymous_id),
        "UserId": str(user_id),
        "CreatedAt": session.created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "LastActivityAt": session.last_activity_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "DurationSeconds": 300,
    }
    by_id = {event["PropertyObjectViewId"]: event for event in read_events(VIEW_ENDED)}
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
    """Only a race can leave a view that is newer than the cutoff in a due session."""
    session = silent_session(minutes=13)
    view = make_view(session=session, silent=MINUTE)

    close_inactive()

    assert PropertyObjectView.objects.get(id=view.id).status == "Inactive"
    assert Session.objects.get(id=session.id).status == "Inactive"
    assert [event["PropertyObjectViewId"] for event in read_events(VIEW_ENDED)] == [str(view.id)]


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
    assert [event["PropertyObjectViewId"] for event in read_events(VIEW_ENDED)] == [str(hanging.id)]


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
    assert [event["UserId"] for event in read_events(VIEW_ENDED)] == [str(user_id)]


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

    ended = [*read_events(SESSION_ENDED), *read_events(VIEW_ENDED)]
    assert [event["DurationSeconds"] for event in ended] == [seconds, seconds]
    assert all(type(event["DurationSeconds"]) is int for event in ended)
    assert Session.objects.get().duration == PropertyObjectView.objects.get().duration == lasted


@pytest.mark.parametrize("day", ["2026-02-28", "2026-03-28", "2025-10-25", "2025-12-31"])
def test_session_across_midnight_lasts_its_420_seconds_c23(day: str) -> None:
    """On last days of months, and on nights when clocks change."""
    start = datetime.fromisoformat(f"{day}T23:58:00Z")
    make_session(created_at=start, last_activity_at=start + timedelta(seconds=420))

    close_inactive()

    (ended,) = read_events(SESSION_ENDED)
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


def test_units_find_their_rows_by_indexes_whatever_the_statistics_of_the_tables_are() -> None:
    """For small tables the planner would otherwise prefer sequential scans."""

    def sequential_scans() -> dict[str, int]:
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
    before = sequential_scans()

    result = close_inactive(batch_size=5, sessions_per_transaction=2)

    assert (result.closed_sessions, result.closed_views) == (20, 40)
    assert sequential_scans() == before


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
