"""The ActivityRetentionJob: deletes sessions that ended long ago, and no others."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from prometheus_client import REGISTRY

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from pinactivity.postgres.locks import REPLAY, advisory_lock
from sessions.lifecycle import RunOutcome
from sessions.models import Session
from sessions.options import ActivityRetentionOptions
from sessions.retention import ActivityRetention, ActivityRetentionResult
from sessions.tasks import delete_old_activity
from tests.concurrency import run_together
from tests.factories import MINUTE, id_of_age, make_session, make_view
from views.models import PropertyObjectView
from views.stats import EndedView, count_views, rebuild_stats, stats_of

pytestmark = pytest.mark.django_db(transaction=True)

YEAR = timedelta(days=365)


def delete_old(**options: Any) -> ActivityRetentionResult:
    return ActivityRetention(ActivityRetentionOptions(**options)).run()


def closed_session(*, ended: timedelta, views: int = 0, **fields: Any) -> Session:
    """Make a session that ended some time ago, with closed views of a minute."""
    ended_at = statement_time() - ended
    closed = {"status": "Inactive", "ended_at": ended_at, "close_reason": "Inactivity"}
    session = make_session(
        **{
            "id": id_of_age(ended + 17 * MINUTE),
            "last_activity_at": ended_at - 12 * MINUTE,
            "duration": 5 * MINUTE,
            **closed,
            **fields,
        }
    )
    for _ in range(views):
        make_view(id=id_of_age(ended + 13 * MINUTE), session=session, duration=MINUTE, **closed)
    return session


def count_all() -> None:
    """Count every closed view in the statistics, as its event would."""
    count_views(
        [
            EndedView(view.id, view.property_object_id, view.created_at, 60, statement_time())
            for view in PropertyObjectView.objects.filter(status="Inactive")
        ]
    )


def test_sessions_that_ended_longer_ago_than_the_age_go_with_their_views() -> None:
    old = [closed_session(ended=YEAR + age, views=2) for age in (MINUTE, timedelta(days=400))]
    young = closed_session(ended=YEAR - MINUTE, views=1)
    active = make_session(created_at=statement_time() - 2 * YEAR, id=id_of_age(2 * YEAR))
    make_view(session=active, silent=2 * YEAR)

    result = delete_old()

    assert (result.outcome, result.failures) == (RunOutcome.SUCCEEDED, 0)
    assert (result.deleted_sessions, result.deleted_views) == (len(old), 4)
    assert set(Session.objects.values_list("id", flat=True)) == {young.id, active.id}
    assert set(PropertyObjectView.objects.values_list("session_id", flat=True)) == {
        young.id,
        active.id,
    }


def test_empty_run_is_a_success() -> None:
    assert delete_old().outcome is RunOutcome.SUCCEEDED


def test_age_is_an_option_and_exact() -> None:
    session = closed_session(ended=timedelta(days=100))
    assert session.ended_at is not None
    retention = ActivityRetention(ActivityRetentionOptions(age=timedelta(days=90)))

    kept = retention.run(now=session.ended_at + timedelta(days=90))
    gone = retention.run(now=session.ended_at + timedelta(days=90, microseconds=1))

    assert (kept.deleted_sessions, gone.deleted_sessions) == (0, 1)


def test_backlog_goes_in_many_transactions_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel runs too. All sessions ended at the same moment, so only ids distinguish them."""
    monkeypatch.setattr("sessions.retention._BATCH", 4)
    ended_at = statement_time() - 2 * YEAR
    for _ in range(30):
        closed_session(ended=2 * YEAR, views=2, ended_at=ended_at)

    results = run_together([delete_old] * 3)

    assert sum(result.deleted_sessions for result in results) == 30
    assert sum(result.deleted_views for result in results) == 60
    assert all(result.failures == 0 for result in results)
    assert not Session.objects.exists()


def test_statistics_keep_what_the_deleted_views_added_and_the_rebuild_finds_no_drift() -> None:
    property_object_id = new_id()
    for ended in (2 * YEAR, 2 * YEAR, MINUTE):
        session = closed_session(ended=ended)
        make_view(
            id=id_of_age(ended + 13 * MINUTE),
            session=session,
            property_object_id=property_object_id,
            status="Inactive",
            ended_at=session.ended_at,
            duration=MINUTE,
            close_reason="Inactivity",
        )
    count_all()
    before = stats_of(property_object_id)

    delete_old()

    after = stats_of(property_object_id)
    assert (after.views_count, after.total_duration_seconds) == (3, 180)
    assert after.last_viewed_at == before.last_viewed_at
    assert (after.purged_views_count, after.purged_duration_seconds) == (2, 120)
    assert rebuild_stats(repair=False).drifting == []


def test_view_that_nobody_counted_is_found_by_the_rebuild_after_it_was_deleted() -> None:
    session = closed_session(ended=2 * YEAR, views=1)
    property_object_id = session.views.get().property_object_id

    delete_old()
    rebuild_stats(repair=True)

    stats = stats_of(property_object_id)
    assert (stats.views_count, stats.total_duration_seconds) == (1, 60)
    assert stats.last_viewed_at is not None


def test_what_a_replay_has_made_today_stays_whatever_its_own_time() -> None:
    """The statistics may not have counted the events of its views yet."""
    closed_session(ended=3 * YEAR, id=new_id(), views=1)
    assert delete_old().deleted_sessions == 0


def test_undelivered_event_outlives_its_session() -> None:
    session = closed_session(ended=2 * YEAR)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO outbox_messages (message_id, topic, key, headers, payload)"
            " VALUES (gen_random_uuid(), 't', %s, '{}', '{}')",
            [str(session.id)],
        )
    delete_old()
    assert OutboxMessage.objects.pending().get().key == str(session.id)


def test_locked_session_is_left_to_the_next_run() -> None:
    locked, free = closed_session(ended=3 * YEAR), closed_session(ended=2 * YEAR)
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT FROM sessions WHERE id = %s FOR UPDATE", [locked.id])
        assert delete_old().deleted_sessions == 1
        assert not Session.objects.filter(id=free.id).exists()
    finally:
        holder.rollback()
        holder.close()
    assert delete_old().deleted_sessions == 1


@pytest.fixture
def refused() -> Any:
    """Make a session among others that PostgreSQL refuses to delete; lift this afterwards."""
    sessions = [closed_session(ended=2 * YEAR - number * MINUTE, views=1) for number in range(7)]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (id uuid REFERENCES sessions ON DELETE RESTRICT)")
        cursor.execute("INSERT INTO kept VALUES (%s)", [sessions[3].id])
    yield sessions[3]
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE kept")


def test_failing_session_is_left_behind_and_blocks_nobody(refused: Session) -> None:
    result = delete_old()

    assert (result.outcome, result.failures) == (RunOutcome.SUCCEEDED, 1)
    assert (result.deleted_sessions, result.deleted_views) == (6, 6)
    assert [session.id for session in Session.objects.all()] == [refused.id]
    assert refused.views.count() == 1  # rolled back with it


def test_batch_that_is_too_much_for_the_statement_timeout_goes_in_smaller_ones_c21() -> None:
    for _ in range(6):
        closed_session(ended=2 * YEAR)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            CREATE FUNCTION work_slowly() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_sleep(0.1); RETURN old; END $$;
            CREATE TRIGGER work_slowly BEFORE DELETE ON sessions
            FOR EACH ROW EXECUTE FUNCTION work_slowly();
            SET statement_timeout = '350ms'
            """
        )
    try:
        result = delete_old()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET statement_timeout")
            cursor.execute("DROP TRIGGER work_slowly ON sessions; DROP FUNCTION work_slowly")

    assert (result.outcome, result.deleted_sessions, result.failures) == ("Succeeded", 6, 0)


def test_database_that_cannot_write_fails_the_run_at_once() -> None:
    closed_session(ended=2 * YEAR, views=1)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE property_object_view_stats RENAME TO gone")
    try:
        result = delete_old()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE gone RENAME TO property_object_view_stats")

    assert (result.outcome, result.failures) == (RunOutcome.FAILED, 1)
    assert delete_old().deleted_sessions == 1


def test_run_ends_between_transactions_when_the_worker_stops_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sessions.retention._BATCH", 2)
    for _ in range(5):
        closed_session(ended=2 * YEAR)
    answers = iter([False, True])

    cancelled = ActivityRetention(
        ActivityRetentionOptions(), stop=lambda: next(answers, True)
    ).run()
    late = delete_old(max_run_duration=timedelta(microseconds=1))

    assert (cancelled.outcome, cancelled.deleted_sessions) == (RunOutcome.CANCELLED, 2)
    assert (late.outcome, late.deleted_sessions) == (RunOutcome.OUT_OF_TIME, 0)
    assert delete_old().deleted_sessions == 3


def test_run_skips_while_a_replay_is_under_way() -> None:
    closed_session(ended=2 * YEAR)
    with advisory_lock(REPLAY):
        assert delete_old().outcome is RunOutcome.SKIPPED
    assert Session.objects.count() == 1


def test_daily_task_deletes_and_counts() -> None:
    def counted(name: str) -> float:
        return REGISTRY.get_sample_value(f"activity_retention_{name}_deleted_total") or 0.0

    before = counted("sessions"), counted("views")
    closed_session(ended=2 * YEAR, views=3)

    delete_old_activity.apply(throw=True)

    assert (counted("sessions") - before[0], counted("views") - before[1]) == (1, 3)
