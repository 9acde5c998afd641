"""The ActivityCloserJob when rows fail, are locked or revived, and when PostgreSQL fails."""

from typing import Any

import pytest
from django.db import connection

from outbox.models import OutboxMessage
from sessions.closer import ActivityCloser
from sessions.lifecycle import RunOutcome
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import record_heartbeat
from tests.closer import SESSION_ENDED, close_inactive, read_events
from tests.factories import (
    DEVICE,
    MINUTE,
    make_due_sessions,
    make_view,
    silent_session,
)
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_row_that_keeps_failing_is_tried_twice_a_run_and_retried_by_the_next_tick(
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
        # Run 1 tries it in its unit, then singly; later it is the whole unit.
        assert cursor.fetchone() == (2 + 1 + 1,)
        cursor.execute("DELETE FROM refused")
    assert close_inactive().closed_sessions == 1
    assert [event["SessionId"] for event in read_events(SESSION_ENDED)].count(str(bad.id)) == 1


def test_row_that_is_revived_while_its_unit_fails_stays_alive(refuse_one: Any) -> None:
    """The retry of a single row checks the whole predicate again."""
    bad, revived, closed = (silent_session(minutes=14 - number / 10) for number in range(3))
    refuse_one(bad)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == 4:  # phase A, the unit, `bad` singly; now `revived` singly
            record_heartbeat(
                session_id=revived.id,
                anonymous_id=revived.anonymous_id,
                device=DEVICE,
            )
        return False

    result = ActivityCloser(ActivityCloserOptions(), stop=stop).run()

    assert (result.closed_sessions, result.failures) == (1, 1)
    assert set(Session.objects.active().values_list("id", flat=True)) == {bad.id, revived.id}
    assert [event["SessionId"] for event in read_events(SESSION_ENDED)] == [str(closed.id)]


def test_database_that_cannot_write_fails_the_run_at_once() -> None:
    """It is no success, because the alert on the last success must fire."""
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


def test_locked_view_delays_its_session_by_one_tick_and_no_other() -> None:
    locked = silent_session(minutes=14)
    view = make_view(session=locked, silent=MINUTE)  # not due, so phase B locks it
    others = [silent_session(minutes=13) for _ in range(3)]
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT FROM property_object_views WHERE id = %s FOR UPDATE", [view.id])

        result = close_inactive()

        assert (result.outcome, result.failures) == ("Succeeded", 0)
        assert result.closed_sessions == len(others)
        assert Session.objects.get(id=locked.id).status == "Active"
    finally:
        holder.rollback()
        holder.close()
    assert close_inactive().closed_sessions == 1


def test_statement_timeout_goes_on_with_smaller_units_c21() -> None:
    """Closing two sessions exceeds the timeout, closing one does not."""
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


def test_locked_rows_wait_for_the_next_tick_c19() -> None:
    make_due_sessions(100)
    locked = list(Session.objects.values_list("id", flat=True))
    free = [silent_session(minutes=12.5) for _ in range(3)]
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT FROM sessions WHERE id = ANY(%s) FOR UPDATE", [locked])
        result = close_inactive()
        assert (result.closed_sessions, result.failures) == (len(free), 0)
        assert result.backlog_remaining == len(locked)
        assert set(Session.objects.active().values_list("id", flat=True)) == set(locked)
    finally:
        holder.rollback()
        holder.close()
    assert close_inactive().closed_sessions == len(locked)
