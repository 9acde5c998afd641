"""The ActivityCloserJob against heartbeats, links and switches of the same rows."""

from uuid import UUID

import pytest
from django.db import connection, transaction

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from sessions.closer import ActivityCloserResult
from sessions.errors import SessionNotFound
from sessions.models import Session
from sessions.services import link_session, record_heartbeat
from tests.closer import SESSION_ENDED, VIEW_ENDED, close_inactive, read_events
from tests.concurrency import Background, run_together
from tests.factories import (
    DEVICE,
    MINUTE,
    make_view,
    silent_session,
)
from views.lifecycle import ViewSource
from views.services import extend_view, open_view

pytestmark = pytest.mark.django_db(transaction=True)


def test_heartbeats_and_closers_at_the_threshold_leave_one_outcome_each_ac9_a6() -> None:
    """Race: heartbeat against closing.

    Either the heartbeat came first and the session lives, or the closer did and it restarted.
    """
    sessions = [silent_session(minutes=12, views=1) for _ in range(60)]

    def extend_all() -> list[tuple[UUID, bool]]:
        return [
            (heartbeat.session.session_id, heartbeat.restarted)
            for heartbeat in (
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

    heartbeats, *_ = run_together([extend_all, close_all, close_all])

    restarted = 0
    for session, (session_id, was_restarted) in zip(sessions, heartbeats, strict=True):
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
    assert len(read_events(SESSION_ENDED)) == restarted


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
    assert len(read_events(VIEW_ENDED)) == 1


def test_view_that_was_extended_first_stays_open() -> None:
    """Race: view heartbeat, the heartbeat was first."""
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

    assert [event["SessionId"] for event in read_events(SESSION_ENDED)] == [str(session.id)]
    assert OutboxMessage.objects.count() == 1


def test_switch_under_way_closes_the_session_and_the_run_leaves_it_inv_ses_006() -> None:
    """Race: link (Switched), the switch was first.

    The switch has locked the session: the closer skips it, and finds it closed afterwards.
    """
    session = silent_session(minutes=13, views=1, user_id=new_id())

    with transaction.atomic():
        link_session(anonymous_id=session.anonymous_id, user_id=new_id())
        with Background(close_inactive) as run:
            result = run.result()
        assert isinstance(result, ActivityCloserResult)
        # Phase A skips the view, which the switch has locked and closed.
        assert (result.closed_sessions, result.closed_views, result.failures) == (0, 0, 0)

    assert close_inactive().closed_sessions == 0
    assert Session.objects.get(id=session.id).close_reason == "Switched"
    assert [event["SessionId"] for event in read_events(SESSION_ENDED)] == [str(session.id)]
    assert len(read_events(VIEW_ENDED)) == 1


def test_closing_skips_a_heartbeat_in_flight_and_then_leaves_the_row_c3_ac9() -> None:
    """Race: the heartbeat was first.

    The uncommitted heartbeat has locked the row: the closer skips it, and finds it live afterwards.
    """
    session = silent_session(minutes=12.5)
    heartbeat = connection.copy()
    try:
        heartbeat.set_autocommit(False)
        with heartbeat.cursor() as cursor:
            cursor.execute(
                "UPDATE sessions SET last_activity_at = statement_timestamp() WHERE id = %s",
                [session.id],
            )
        with Background(close_inactive) as run:
            result = run.result()
        assert isinstance(result, ActivityCloserResult)
        assert result.closed_sessions == 0
        heartbeat.commit()
    finally:
        heartbeat.close()
    assert close_inactive().closed_sessions == 0
    assert Session.objects.get(id=session.id).status == "Active"
