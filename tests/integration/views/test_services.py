"""Opening and extending property object views (design, section 6)."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from outbox.models import OutboxMessage
from pinactivity.core import strict_json
from pinactivity.core.ids import new_id
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import record_heartbeat
from tests.closer import close_inactive
from tests.concurrency import Background, run_together
from tests.factories import (
    DEVICE,
    MINUTE,
    make_session,
    make_view,
    silent_session,
)
from views.lifecycle import ViewSource
from views.models import PropertyObjectView
from views.services import OpenedView, extend_view, open_view

pytestmark = pytest.mark.django_db(transaction=True)


def open_on(session: Session, **arguments: Any) -> OpenedView:
    return open_view(
        **{
            "session_id": session.id,
            "anonymous_id": session.anonymous_id,
            "device": DEVICE,
            "property_object_id": new_id(),
            "view_source": ViewSource.SEARCH,
            "filter_snapshot": None,
            **arguments,
        }
    )


def test_opening_makes_a_view_and_extends_the_session(count_statements: Callable) -> None:  # type: ignore[type-arg]  # a fixture
    session = make_session(silent=3 * MINUTE, user_id=new_id())

    with count_statements() as statements:
        opened = open_on(session, filter_snapshot={"Price": {"Max": 1.5}})

    assert len(statements) == 1
    view = PropertyObjectView.objects.get()
    assert (opened.view_id, opened.session_id) == (view.id, session.id)
    assert (opened.is_new, opened.restarted) == (True, False)
    assert (view.status, view.version, view.view_source) == ("Active", 1, "Search")
    assert view.user_id == session.user_id
    assert view.filter_snapshot == {"Price": {"Max": 1.5}}
    assert view.created_at == view.last_activity_at
    assert Session.objects.get().last_activity_at == view.created_at


def test_opening_the_same_object_again_extends_its_view(now: datetime) -> None:
    session = make_session(last_activity_at=now)
    first = open_on(session, now=now)
    object_id = PropertyObjectView.objects.get().property_object_id

    again = open_on(
        session,
        property_object_id=object_id,
        view_source=ViewSource.SHARE,
        filter_snapshot={"Rooms": 2},
        now=now + 2 * MINUTE,
    )

    assert (again.view_id, again.is_new) == (first.view_id, False)
    view = PropertyObjectView.objects.get()
    assert view.last_activity_at == now + 2 * MINUTE
    # The first opening determines the source and the snapshot.
    assert (view.view_source, view.filter_snapshot) == ("Search", None)


def test_opening_in_a_closed_session_restarts_in_the_same_transaction() -> None:
    session = silent_session(minutes=13)
    close_inactive()

    opened = open_on(session)

    assert opened.restarted
    assert opened.session_id == Session.objects.get(status="Active").id != session.id
    assert PropertyObjectView.objects.get().session_id == opened.session_id


def test_restart_does_not_stand_without_its_view() -> None:
    session = silent_session(minutes=13)
    close_inactive()
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE property_object_views ADD CONSTRAINT refuse_all CHECK (false) NOT VALID"
        )
    try:
        with pytest.raises(IntegrityError, match="refuse_all"):
            open_on(session)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE property_object_views DROP CONSTRAINT refuse_all")
    assert not Session.objects.active().exists()


def test_opening_with_the_id_of_an_older_session_goes_into_the_active_one() -> None:
    """Another tab has restarted; both tabs go on in one session (INV-SES-001)."""
    old = silent_session(minutes=13)
    close_inactive()
    active = make_session(anonymous_id=old.anonymous_id)

    opened = open_on(old)

    assert (opened.session_id, opened.restarted, opened.is_new) == (active.id, True, True)


def test_opening_in_another_devices_session_leaves_that_alone() -> None:
    theirs = silent_session(minutes=3)
    own = new_id()

    opened = open_on(theirs, anonymous_id=own)

    assert opened.restarted
    assert Session.objects.get(id=opened.session_id).anonymous_id == own
    assert Session.objects.get(id=theirs.id).last_activity_at == theirs.last_activity_at
    assert not PropertyObjectView.objects.filter(session_id=theirs.id).exists()


def test_opening_in_an_abandoned_session_closes_it_with_its_views_c5() -> None:
    session = silent_session(minutes=180, views=1)

    opened = open_on(session)

    old = Session.objects.get(id=session.id)
    assert (old.close_reason, old.duration) == ("Abandoned", 5 * MINUTE)
    assert opened.restarted
    assert PropertyObjectView.objects.get(status="Active").id == opened.view_id
    assert OutboxMessage.objects.count() == 2


def test_opening_an_object_whose_view_is_abandoned_closes_that_and_opens_anew() -> None:
    session = silent_session(minutes=1)
    old = make_view(session=session, silent=30 * MINUTE)

    opened = open_on(session, property_object_id=old.property_object_id)

    assert (opened.is_new, opened.restarted) == (True, False)
    closed = PropertyObjectView.objects.get(id=old.id)
    assert (closed.close_reason, closed.duration) == ("Abandoned", MINUTE)
    assert OutboxMessage.objects.get().key == str(old.id)


def test_30_parallel_openings_of_one_object_give_one_view() -> None:
    session = make_session()
    object_id = new_id()

    results = run_together([lambda: open_on(session, property_object_id=object_id)] * 30)

    assert {result.view_id for result in results} == {PropertyObjectView.objects.get().id}
    assert sum(result.is_new for result in results) == 1


def test_30_parallel_calls_on_one_view_lose_nothing_c2() -> None:
    session = silent_session(minutes=5)
    view = make_view(session=session)

    def send_heartbeat() -> bool:
        return extend_view(view_id=view.id, anonymous_id=session.anonymous_id)

    def reopen() -> bool:
        return open_on(session, property_object_id=view.property_object_id).view_id == view.id

    def extend() -> bool:
        return not record_heartbeat(
            session_id=session.id, anonymous_id=session.anonymous_id, device=DEVICE
        ).restarted

    assert all(run_together([send_heartbeat, reopen, extend] * 10))

    extended = PropertyObjectView.objects.get()
    assert extended.last_activity_at > view.last_activity_at
    assert Session.objects.get().last_activity_at >= extended.last_activity_at


def test_heartbeat_extends_the_view_and_its_session(count_statements: Callable) -> None:  # type: ignore[type-arg]  # a fixture
    session = silent_session(minutes=5)
    view = make_view(session=session)

    with count_statements() as statements:
        accepted = extend_view(view_id=view.id, anonymous_id=session.anonymous_id)

    assert accepted
    assert len(statements) == 1
    extended = PropertyObjectView.objects.get()
    assert extended.last_activity_at > view.last_activity_at
    assert Session.objects.get().last_activity_at == extended.last_activity_at
    assert extended.version == 1


def test_heartbeat_of_a_closed_view_is_not_accepted_and_writes_nothing_inv_lv_003_c6() -> None:
    session = silent_session(minutes=1)
    view = make_view(session=session, silent=13 * MINUTE)
    close_inactive()
    before = (Session.objects.values().get(), PropertyObjectView.objects.values().get())

    assert not extend_view(view_id=view.id, anonymous_id=session.anonymous_id)
    assert (Session.objects.values().get(), PropertyObjectView.objects.values().get()) == before
    assert OutboxMessage.objects.count() == 1


def test_heartbeat_the_day_after_the_session_closed_changes_nothing_inv_lv_003_c6(
    now: datetime,
) -> None:
    session = make_session(last_activity_at=now)
    opened = open_on(session, now=now)
    assert extend_view(view_id=opened.view_id, anonymous_id=session.anonymous_id, now=now + MINUTE)
    close_inactive(now=now + 14 * MINUTE)
    before = (Session.objects.values().get(), PropertyObjectView.objects.values().get())
    assert before[1]["duration"] == MINUTE

    assert not extend_view(
        view_id=opened.view_id, anonymous_id=session.anonymous_id, now=now + timedelta(days=1)
    )

    assert (Session.objects.values().get(), PropertyObjectView.objects.values().get()) == before
    assert OutboxMessage.objects.count() == 2


def test_view_left_silent_closes_while_its_session_lives_on_inv_lv_004(now: datetime) -> None:
    session = make_session(last_activity_at=now)
    left = open_on(session, now=now)
    looked_at = open_on(session, now=now)
    closer = ActivityCloser(ActivityCloserOptions())
    for minute in range(1, 15):
        moment = now + minute * MINUTE
        assert extend_view(view_id=looked_at.view_id, anonymous_id=session.anonymous_id, now=moment)
        closer.run(now=moment)

    closed = PropertyObjectView.objects.get(id=left.view_id)
    assert (closed.status, closed.close_reason) == ("Inactive", "Inactivity")
    assert (closed.duration, closed.ended_at) == (timedelta(0), now + 13 * MINUTE)
    assert PropertyObjectView.objects.get(id=looked_at.view_id).status == "Active"
    assert Session.objects.get().status == "Active"
    assert OutboxMessage.objects.get().key == str(left.view_id)

    again = open_on(session, property_object_id=closed.property_object_id, now=moment)
    assert (again.is_new, again.restarted, again.session_id) == (True, False, session.id)


def test_view_that_many_would_close_at_once_closes_once_inv_lv_008() -> None:
    """Closers, heartbeats and openings compete for abandoned views of a live session."""
    for _ in range(5):
        session = silent_session(minutes=1)
        old = make_view(session=session, silent=30 * MINUTE)

        def send_heartbeat(session: Session = session, old: PropertyObjectView = old) -> None:
            assert not extend_view(view_id=old.id, anonymous_id=session.anonymous_id)

        def reopen(session: Session = session, old: PropertyObjectView = old) -> None:
            open_on(session, property_object_id=old.property_object_id)

        calls: list[Callable[[], object]] = [close_inactive, send_heartbeat, reopen]
        run_together(calls * 3)

        closed = PropertyObjectView.objects.get(id=old.id)
        assert (closed.status, closed.duration, closed.version) == ("Inactive", MINUTE, 2)
        assert OutboxMessage.objects.filter(key=str(old.id)).count() == 1
        assert PropertyObjectView.objects.active().get(session=session).id != old.id


@pytest.mark.parametrize("whose", ["unknown", "foreign"])
def test_heartbeat_of_a_view_that_is_not_the_devices_is_not_accepted(whose: str) -> None:
    view = make_view(session=silent_session(minutes=5))
    view_id = new_id() if whose == "unknown" else view.id

    assert not extend_view(view_id=view_id, anonymous_id=new_id())
    assert PropertyObjectView.objects.get().last_activity_at == view.last_activity_at
    assert Session.objects.get().last_activity_at == view.session.last_activity_at


def test_heartbeat_of_an_abandoned_view_closes_it_with_its_own_duration() -> None:
    session = silent_session(minutes=1)
    view = make_view(session=session, silent=30 * MINUTE)

    assert not extend_view(view_id=view.id, anonymous_id=session.anonymous_id)

    closed = PropertyObjectView.objects.get()
    assert (closed.close_reason, closed.duration) == ("Abandoned", MINUTE)
    assert OutboxMessage.objects.get().key == str(view.id)
    assert Session.objects.get().status == "Active"


def test_stranger_cannot_close_an_abandoned_view() -> None:
    view = make_view(session=silent_session(minutes=1), silent=30 * MINUTE)
    assert not extend_view(view_id=view.id, anonymous_id=new_id())
    assert PropertyObjectView.objects.get().status == "Active"


def test_view_heartbeats_alone_keep_the_session_alive_c7(now: datetime) -> None:
    session = make_session(last_activity_at=now)
    opened = open_on(session, now=now)
    closer = ActivityCloser(ActivityCloserOptions())
    for minute in range(1, 21):
        moment = now + minute * MINUTE
        closer.run(now=moment)
        assert extend_view(view_id=opened.view_id, anonymous_id=session.anonymous_id, now=moment)
    assert Session.objects.get().status == "Active"
    assert Session.objects.get().last_activity_at == now + 20 * MINUTE


def test_heartbeat_that_loses_to_the_closing_of_its_view_leaves_the_session_untouched() -> None:
    """Phase A closes the view while the heartbeat, which has locked the session, waits for it."""
    session = silent_session(minutes=5)
    view = make_view(session=session, silent=13 * MINUTE)
    closing = connection.copy()
    try:
        closing.set_autocommit(False)
        with closing.cursor() as cursor:
            cursor.execute(
                "UPDATE property_object_views SET status = 'Inactive', close_reason = 'Inactivity',"
                " ended_at = statement_timestamp(), duration = last_activity_at - created_at"
                " WHERE id = %s",
                [view.id],
            )
        with Background(
            lambda: extend_view(view_id=view.id, anonymous_id=session.anonymous_id)
        ) as beating:
            with pytest.raises(TimeoutError):
                beating.result(timeout=0.5)
            closing.commit()
            assert beating.result() is False
    finally:
        closing.close()
    assert Session.objects.get().last_activity_at == session.last_activity_at


def test_opening_waits_for_a_session_that_closes_and_never_slips_in_inv_lv_007() -> None:
    session = silent_session(minutes=13)
    closing = connection.copy()
    try:
        closing.set_autocommit(False)
        with closing.cursor() as cursor:
            cursor.execute("SELECT FROM sessions WHERE id = %s FOR NO KEY UPDATE", [session.id])
            with Background(lambda: open_on(session)) as opening:
                with pytest.raises(TimeoutError):
                    opening.result(timeout=0.5)
                cursor.execute(
                    "UPDATE sessions SET status = 'Inactive', close_reason = 'Inactivity',"
                    " ended_at = statement_timestamp(), duration = last_activity_at - created_at"
                    " WHERE id = %s",
                    [session.id],
                )
                closing.commit()
                opened = opening.result()
    finally:
        closing.close()
    assert isinstance(opened, OpenedView)
    assert opened.restarted
    assert not PropertyObjectView.objects.filter(session_id=session.id).exists()


def test_closed_view_is_immutable_inv_lv_008() -> None:
    make_view(session=silent_session(minutes=1), silent=13 * MINUTE)
    close_inactive()
    with (
        pytest.raises(IntegrityError, match="closed rows are immutable"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("UPDATE property_object_views SET view_source = 'Map'")


def test_session_with_views_cannot_be_deleted() -> None:
    make_view()
    with (
        pytest.raises(IntegrityError, match="fk_property_object_views_session"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("DELETE FROM sessions")


@pytest.mark.parametrize(
    "number", ["9.2e18", "1e18", "1e-15", "0.1", "-1.5E3", "9223372036854775807"]
)
def test_any_accepted_number_is_read_back_from_its_event(number: str) -> None:
    """jsonb writes numbers in full, and the consumers must accept every accepted number."""
    session = silent_session(minutes=13)
    snapshot = strict_json.loads(f'{{"N": {number}}}'.encode())
    make_view(session=session, filter_snapshot=snapshot)
    close_inactive()

    payload = OutboxMessage.objects.get(topic__contains="view-ended").payload
    assert strict_json.loads(payload.encode())["FilterSnapshot"] == snapshot
