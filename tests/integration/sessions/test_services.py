"""Start and heartbeat of a session (design, section 5)."""

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from django.db import IntegrityError, connection, transaction

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from sessions.closer import ActivityCloser
from sessions.errors import SessionActiveRace
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import StartedSession, record_heartbeat, start_session
from tests.concurrency import Background, run_together
from tests.factories import DEVICE, MINUTE, make_session, silent_session
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db(transaction=True)


def start(anonymous_id: UUID | None = None, **arguments: object) -> StartedSession:
    return start_session(
        **{"anonymous_id": anonymous_id, "user_id": None, "device": DEVICE, **arguments}  # type: ignore[arg-type]  # a test's shorthand
    )


def send_heartbeat(session: Session, **arguments: object) -> tuple[UUID, bool]:
    heartbeat = record_heartbeat(
        **{  # type: ignore[arg-type]  # a test's shorthand
            "session_id": session.id,
            "anonymous_id": session.anonymous_id,
            "device": DEVICE,
            **arguments,
        }
    )
    return heartbeat.session.session_id, heartbeat.restarted


def test_first_start_makes_an_active_session_with_times_of_the_database_ac1() -> None:
    started = start()

    session = Session.objects.get()
    assert started.is_new
    assert session.id == started.session.session_id
    assert session.anonymous_id == started.session.anonymous_id
    assert (session.status, session.version, session.user_id) == ("Active", 1, None)
    assert session.created_at == session.last_activity_at == started.session.moment
    assert (session.browser, session.ip_address) == (DEVICE.browser, DEVICE.ip_address)


def test_second_start_restores_and_extends_inv_ses_001_ac1_a1(now: datetime) -> None:
    first = start(now=now)
    second = start(first.session.anonymous_id, now=now + 3 * MINUTE)

    assert not second.is_new
    assert second.session.session_id == first.session.session_id
    assert Session.objects.get().last_activity_at == now + 3 * MINUTE


def test_unseen_anonymous_id_is_kept_ac8() -> None:
    anonymous_id = new_id()
    assert start(anonymous_id).session.anonymous_id == anonymous_id


def test_start_with_a_user_is_born_linked_without_an_event_a5() -> None:
    user_id = new_id()
    start(user_id=user_id)

    session = Session.objects.get()
    assert session.user_id == user_id
    assert session.linked_at == session.signed_in_at == session.created_at
    assert not OutboxMessage.objects.exists()


def test_restoring_never_changes_the_user() -> None:
    session = make_session(user_id=new_id())
    start(session.anonymous_id, user_id=new_id())
    assert Session.objects.get().user_id == session.user_id


def test_50_parallel_first_starts_give_one_session_and_no_error_in_the_log_c1(
    postgres_log: Callable[[], list[str]],
) -> None:
    anonymous_id = new_id()

    results = run_together([lambda: start(anonymous_id)] * 50)

    assert {result.session.session_id for result in results} == {Session.objects.get().id}
    assert sum(result.is_new for result in results) == 1
    assert postgres_log() == []


def test_heartbeat_extends_in_one_statement_inv_ses_003_ac2(count_statements: Callable) -> None:  # type: ignore[type-arg]  # a fixture
    session = make_session(silent=2 * MINUTE)

    with count_statements() as statements:
        result = send_heartbeat(session)

    assert result == (session.id, False)
    assert len(statements) == 1
    extended = Session.objects.get()
    assert extended.last_activity_at > session.last_activity_at
    assert extended.version == session.version


def test_older_heartbeat_after_a_newer_one_moves_nothing_back_c8(now: datetime) -> None:
    started = start(now=now)
    session = Session.objects.get(id=started.session.session_id)
    send_heartbeat(session, now=now + 5 * MINUTE)
    send_heartbeat(session, now=now + 2 * MINUTE)
    assert Session.objects.get().last_activity_at == now + 5 * MINUTE


def test_start_dated_before_the_session_moves_nothing_back_c8(now: datetime) -> None:
    started = start(now=now)
    again = start(started.session.anonymous_id, now=now - MINUTE)
    assert again.session.moment == now
    assert Session.objects.get().last_activity_at == now


def test_heartbeat_after_the_closing_restarts_and_leaves_the_closed_row_c4_a2() -> None:
    session = silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    closed = Session.objects.filter(id=session.id).values().get()

    session_id, restarted = send_heartbeat(session)

    assert restarted
    assert session_id != session.id
    assert Session.objects.filter(id=session.id).values().get() == closed
    assert OutboxMessage.objects.count() == 1


def test_heartbeat_of_another_tabs_closed_session_joins_the_active_one() -> None:
    closed = silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    current = start(closed.anonymous_id).session.session_id

    assert send_heartbeat(closed) == (current, True)
    assert Session.objects.count() == 2


def test_foreign_session_id_changes_nothing_of_its_owner() -> None:
    owner = make_session(silent=3 * MINUTE)
    stranger = make_session(silent=3 * MINUTE)

    session_id, restarted = send_heartbeat(owner, anonymous_id=stranger.anonymous_id)

    assert (session_id, restarted) == (stranger.id, True)
    assert Session.objects.get(id=owner.id).last_activity_at == owner.last_activity_at


@pytest.mark.parametrize("touch", ["start", "heartbeat"])
def test_session_silent_through_an_outage_is_closed_with_its_own_duration_c5(touch: str) -> None:
    session = silent_session(minutes=180, views=2)

    if touch == "start":
        started = start(session.anonymous_id)
        new_session_id = started.session.session_id
        assert started.is_new
    else:
        new_session_id, restarted = send_heartbeat(session)
        assert restarted

    old = Session.objects.get(id=session.id)
    assert (old.status, old.close_reason, old.duration) == ("Inactive", "Abandoned", 5 * MINUTE)
    assert new_session_id != session.id
    assert Session.objects.get(status="Active").id == new_session_id
    assert not PropertyObjectView.objects.filter(status="Active").exists()
    assert OutboxMessage.objects.count() == 3
    assert ActivityCloser(ActivityCloserOptions()).run().closed_sessions == 0


def test_session_silent_for_exactly_twice_the_threshold_is_still_revived(now: datetime) -> None:
    first = start(now=now)
    anonymous_id = first.session.anonymous_id
    assert not start(anonymous_id, now=now + 24 * MINUTE).is_new
    assert start(anonymous_id, now=now + 48 * MINUTE + timedelta(microseconds=1)).is_new


def test_20_parallel_heartbeats_on_an_abandoned_session_close_it_once() -> None:
    session = silent_session(minutes=60, views=1)

    results = run_together([lambda: send_heartbeat(session)] * 20)

    (active,) = Session.objects.filter(status="Active")
    assert {session_id for session_id, _ in results} == {active.id}
    assert Session.objects.count() == 2
    assert OutboxMessage.objects.count() == 2


def test_start_gives_up_after_three_abandoned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race is not reproducible, so the test disables the closing between the attempts."""
    session = silent_session(minutes=60)
    monkeypatch.setattr("sessions.services.close_sessions", lambda *_, **__: None)
    with pytest.raises(SessionActiveRace):
        start(session.anonymous_id)
    assert Session.objects.count() == 1


def test_start_waits_for_a_closing_under_way_and_then_begins_anew() -> None:
    session = silent_session(minutes=13)
    closing = connection.copy()
    try:
        closing.set_autocommit(False)
        with closing.cursor() as cursor:
            cursor.execute(
                "UPDATE sessions SET status = 'Inactive', ended_at = statement_timestamp(),"
                " duration = last_activity_at - created_at, close_reason = 'Inactivity'"
                " WHERE id = %s",
                [session.id],
            )
        with Background(lambda: start(session.anonymous_id)) as starting:
            with pytest.raises(TimeoutError):
                starting.result(timeout=0.5)
            closing.commit()
            started = starting.result()
    finally:
        closing.close()
    assert isinstance(started, StartedSession)
    assert started.is_new


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ({"last_activity_at": "created_at - interval '1 s'"}, "chk_sessions_activity_order"),
        ({"status": "'Inactive'"}, "chk_sessions_status_fields"),
        ({"ended_at": "created_at"}, "chk_sessions_status_fields"),
        ({"user_id": "gen_random_uuid()"}, "chk_sessions_linked"),
        ({"duration": "interval '-1 s'"}, "chk_sessions_duration_nonneg"),
    ],
)
def test_database_refuses_nonsense_c9(change: dict[str, str], constraint: str) -> None:
    make_session()
    assignments = ", ".join(f"{column} = {value}" for column, value in change.items())
    with (
        pytest.raises(IntegrityError, match=constraint),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"UPDATE sessions SET {assignments}")


def test_one_bad_row_never_blocks_the_batch_c9() -> None:
    """The row violates a constraint, which the test drops to make it."""
    bad = silent_session(minutes=20)
    good = [silent_session(minutes=13) for _ in range(3)]
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE sessions DROP CONSTRAINT chk_sessions_activity_order")
        cursor.execute(
            "UPDATE sessions SET created_at = last_activity_at + interval '1 s' WHERE id = %s",
            [bad.id],
        )
    try:
        result = ActivityCloser(ActivityCloserOptions()).run()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM sessions WHERE id = %s", [bad.id])
            cursor.execute(
                "ALTER TABLE sessions ADD CONSTRAINT chk_sessions_activity_order"
                " CHECK (last_activity_at >= created_at)"
            )
    assert (result.closed_sessions, result.failures) == (len(good), 1)


@pytest.mark.parametrize(
    "assignment",
    [
        "last_activity_at = last_activity_at + interval '1 s'",
        "status = 'Active', ended_at = NULL, duration = NULL, close_reason = NULL",
        "version = version + 1",
        "user_id = gen_random_uuid(), linked_at = created_at",
    ],
)
def test_closed_row_is_immutable_inv_ses_006(assignment: str) -> None:
    silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    with (
        pytest.raises(IntegrityError, match="closed rows are immutable"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"UPDATE sessions SET {assignment}")


def test_closed_row_may_lose_its_device_and_be_deleted() -> None:
    silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    assert Session.objects.update(ip_address=None, user_agent="", browser="") == 1
    assert Session.objects.all().delete()[0] == 1
