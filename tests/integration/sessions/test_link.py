"""Linking a device's session to a user, from the front end and from identity's event."""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.http.cursors import Page
from pinactivity.http.periods import Period
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.errors import SessionNotFound
from sessions.lifecycle import LinkOutcome, LinkState, decide_link
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import LinkedSession, link_session, record_heartbeat, start_session
from tests.concurrency import Background, run_together
from tests.factories import DEVICE, MINUTE, make_session, make_view, open_in, silent_session
from tests.processes import wait_until
from views.models import PropertyObjectView
from views.selectors import views_of_user
from views.services import extend_view

pytestmark = pytest.mark.django_db(transaction=True)

A, B = UUID(int=0xA), UUID(int=0xB)
LINKED, ENDED, VIEW_ENDED = (
    "pin.user-activity.session-linked.v1",
    "pin.user-activity.session-ended.v1",
    "pin.user-activity.property-object-view-ended.v1",
)


def topics() -> list[str]:
    return list(OutboxMessage.objects.order_by("id").values_list("topic", flat=True))


def link(session: Session, user_id: UUID, **arguments: Any) -> LinkedSession:
    return link_session(anonymous_id=session.anonymous_id, user_id=user_id, **arguments)


def test_guest_session_gets_its_user_once_with_its_event_ac3() -> None:
    session = silent_session(minutes=3)

    linked = link(session, A)
    again = link(session, A)

    assert (linked.outcome, linked.session_id) == (LinkOutcome.LINKED, session.id)
    assert (again.outcome, again.session_id) == (LinkOutcome.ALREADY_LINKED, session.id)
    row = Session.objects.get()
    assert (row.user_id, row.version, row.status) == (A, 2, "Active")
    assert row.linked_at is not None
    assert row.last_activity_at == row.linked_at > session.last_activity_at
    assert row.signed_in_at is not None
    assert row.signed_in_at > row.linked_at  # the second sign-in moved it forward
    assert topics() == [LINKED]


def test_link_is_rolled_back_with_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session()

    def fail(_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("sessions.services.enqueue", fail)
    with pytest.raises(RuntimeError):
        link(session, A)
    assert Session.objects.get().user_id is None
    assert topics() == []


def test_another_user_switches_the_device_ac4_a3() -> None:
    session = silent_session(minutes=3, user_id=A)
    views = [make_view(session=session) for _ in range(2)]

    switched = link(session, B)

    assert switched.outcome is LinkOutcome.SWITCHED
    old = Session.objects.get(id=session.id)
    assert (old.status, old.close_reason, old.user_id) == ("Inactive", "Switched", A)
    assert old.duration == 5 * MINUTE
    assert set(
        PropertyObjectView.objects.filter(close_reason="Switched").values_list("id", flat=True)
    ) == {view.id for view in views}
    new = Session.objects.get(id=switched.session_id)
    assert (new.status, new.user_id, new.version) == ("Active", B, 1)
    assert new.anonymous_id == session.anonymous_id
    assert new.created_at == new.last_activity_at == new.linked_at
    assert new.signed_in_at is not None
    assert session.last_activity_at < new.signed_in_at <= new.created_at
    assert old.ended_at is not None
    assert new.created_at >= old.ended_at
    for column in Session.DEVICE_COLUMNS:
        assert getattr(new, column) == getattr(old, column)


def test_guest_views_before_the_sign_in_are_in_the_users_history_ac7() -> None:
    session = make_session()
    before = make_view(session=session)
    other = make_view()
    link(session, A)

    everything = Page(None, 50), Period(None, None)
    assert [view.id for view in views_of_user(A, *everything)[0]] == [before.id]
    assert PropertyObjectView.objects.get(id=before.id).user_id is None
    assert views_of_user(B, *everything) == ([], None)
    assert other.session.user_id is None


def test_switch_ends_the_first_users_session_before_the_seconds_begins_c10() -> None:
    session = make_session(user_id=A)
    make_view(session=session)

    link(session, B)

    assert topics() == [VIEW_ENDED, ENDED, LINKED]
    ended, linked = OutboxMessage.objects.order_by("id")[1:]
    assert f'"UserId":"{A}"' in ended.payload
    assert f'"UserId":"{B}"' in linked.payload


def test_switching_back_makes_a_third_session_and_the_first_stays_closed_c11() -> None:
    first = make_session()
    link(first, A)
    second = link(first, B)
    closed = Session.objects.filter(id=first.id).values().get()
    third = link(first, A)

    assert third.outcome is LinkOutcome.SWITCHED
    assert len({first.id, second.session_id, third.session_id}) == 3
    assert Session.objects.filter(id=first.id).values().get() == closed


def test_one_user_on_two_devices_has_two_active_sessions_c12() -> None:
    for session in (make_session(), make_session()):
        assert link(session, A).outcome is LinkOutcome.LINKED
    assert Session.objects.filter(user_id=A, status="Active").count() == 2


def test_30_parallel_links_of_one_user_link_once_c13() -> None:
    session = make_session()

    outcomes = [linked.outcome for linked in run_together([lambda: link(session, A)] * 30)]

    assert outcomes.count(LinkOutcome.LINKED) == 1
    assert outcomes.count(LinkOutcome.ALREADY_LINKED) == 29
    assert topics() == [LINKED]


def test_parallel_links_of_two_users_end_in_some_serial_order() -> None:
    session = make_session()

    results = run_together([lambda: link(session, A), lambda: link(session, B)] * 10)

    switches = sum(result.outcome is LinkOutcome.SWITCHED for result in results)
    assert Session.objects.filter(status="Active").count() == 1
    assert Session.objects.count() == 1 + switches
    assert topics().count(ENDED) == switches
    assert topics().count(LINKED) == 1 + switches


def test_front_end_and_event_link_once_whichever_comes_first_ac6_a4() -> None:
    session = make_session()
    signed_in_at = statement_time()

    results = run_together(
        [lambda: link(session, A), lambda: link(session, A, signed_in_at=signed_in_at)]
    )

    assert {result.outcome for result in results} == {
        LinkOutcome.LINKED,
        LinkOutcome.ALREADY_LINKED,
    }
    assert topics() == [LINKED]


def test_event_links_without_moving_the_last_activity() -> None:
    session = silent_session(minutes=3)
    link(session, A, signed_in_at=statement_time())
    row = Session.objects.get()
    assert (row.user_id, row.last_activity_at) == (A, session.last_activity_at)


def test_event_older_than_the_sessions_sign_in_is_stale_c14() -> None:
    session = make_session()
    earlier = statement_time()
    link(session, B)

    late = link(session, A, signed_in_at=earlier)

    assert (late.outcome, late.session_id) == (LinkOutcome.STALE, session.id)
    row = Session.objects.get()
    assert (row.user_id, row.version) == (B, 2)
    assert topics() == [LINKED]


def test_event_from_the_future_counts_as_now() -> None:
    """Otherwise every real sign-in of the next hour would be stale."""
    session = make_session()
    link(session, A, signed_in_at=statement_time() + timedelta(minutes=50))
    row = Session.objects.get()
    assert row.signed_in_at is not None
    assert row.signed_in_at <= statement_time()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1, 0, 2)])
def test_events_in_any_order_end_in_the_newest(order: tuple[int, ...]) -> None:
    session = make_session()
    base = statement_time()
    events = [(UUID(int=n + 1), base - timedelta(seconds=30 - n)) for n in range(3)]

    for number in order:
        user_id, signed_in_at = events[number]
        link(session, user_id, signed_in_at=signed_in_at)

    assert Session.objects.get(status="Active").user_id == events[2][0]


CREATED = datetime.fromisoformat("2026-03-01T12:00:00+00:00")


@pytest.mark.parametrize(
    ("user_id", "newest_sign_in", "signed_in_at", "late", "outcome"),
    [
        (None, None, CREATED, True, LinkOutcome.LINKED),
        (None, None, CREATED - 60 * timedelta(seconds=1), True, LinkOutcome.STALE),
        (None, None, CREATED - 59 * timedelta(seconds=1), True, LinkOutcome.LINKED),
        (None, None, CREATED - timedelta(hours=1), False, LinkOutcome.LINKED),
        (A, CREATED, CREATED - timedelta(days=1), True, LinkOutcome.ALREADY_LINKED),
        (B, CREATED, CREATED, True, LinkOutcome.STALE),
        (B, CREATED, CREATED + timedelta(microseconds=1), True, LinkOutcome.SWITCHED),
        (B, CREATED, CREATED, False, LinkOutcome.SWITCHED),
    ],
)
def test_decision_over_a_sign_in(
    user_id: UUID | None,
    newest_sign_in: datetime | None,
    signed_in_at: datetime,
    late: bool,
    outcome: LinkOutcome,
) -> None:
    state = LinkState(user_id, CREATED, newest_sign_in)
    decided = decide_link(state, user_id=A, signed_in_at=signed_in_at, may_be_late=late)
    assert decided is outcome


@pytest.mark.parametrize("path", ["front end", "event"])
def test_device_without_an_active_session_is_not_found(path: str) -> None:
    session = silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    arguments = {} if path == "front end" else {"signed_in_at": statement_time()}
    with pytest.raises(SessionNotFound):
        link(session, A, **arguments)
    assert topics() == [ENDED]


@pytest.mark.parametrize("path", ["front end", "event"])
def test_abandoned_session_is_closed_and_not_linked_c5(path: str) -> None:
    session = silent_session(minutes=180, views=1)
    arguments = {} if path == "front end" else {"signed_in_at": statement_time()}

    with pytest.raises(SessionNotFound):
        link(session, A, **arguments)

    row = Session.objects.get()
    assert (row.status, row.close_reason, row.user_id) == ("Inactive", "Abandoned", None)
    assert row.duration == 5 * MINUTE
    assert topics() == [VIEW_ENDED, ENDED]


@pytest.mark.parametrize("switches", [1, 6])
def test_link_that_waited_behind_switches_finds_the_newest_session(switches: int) -> None:
    """A locking read that waited returns no row, so the service repeats it."""
    session = make_session(user_id=A)
    others = [Switching(session.anonymous_id) for _ in range(switches)]

    def get_in_first(execute: Any, sql: str, *arguments: Any) -> Any:
        if "FOR NO KEY UPDATE" in sql and others:
            others.pop().hold_until_waited_for()
        return execute(sql, *arguments)

    def link_behind() -> LinkedSession:
        with connection.execute_wrapper(get_in_first):
            return link(session, B)

    with Background(link_behind) as linking:
        linked = linking.result()

    assert not others
    assert isinstance(linked, LinkedSession)
    assert linked.outcome is LinkOutcome.ALREADY_LINKED
    assert linked.session_id == Session.objects.get(status="Active").id


class Switching:
    """Another transaction that switches a device's session to B."""

    def __init__(self, anonymous_id: UUID) -> None:
        self._anonymous_id = anonymous_id

    def hold_until_waited_for(self) -> None:
        """Switch now, and commit in a thread once another backend waits for the old session."""
        switching = connection.copy()
        switching.set_autocommit(False)
        with switching.cursor() as cursor:
            cursor.execute(
                "UPDATE sessions SET status = 'Inactive', close_reason = 'Switched',"
                " ended_at = statement_timestamp(), duration = last_activity_at - created_at"
                " WHERE anonymous_id = %s AND status = 'Active'",
                [self._anonymous_id],
            )
            cursor.execute(
                "INSERT INTO sessions (id, anonymous_id, user_id, linked_at, signed_in_at,"
                " created_at, last_activity_at, user_agent, browser, os, device_type)"
                " VALUES (%s, %s, %s, now(), now(), now(), now(), '', '', '', 'Unknown')",
                [new_id(), self._anonymous_id, B],
            )
        switching.inc_thread_sharing()
        threading.Thread(target=self._commit, args=[switching]).start()

    def _commit(self, switching: BaseDatabaseWrapper) -> None:
        def is_waited_for() -> bool:
            with switching.cursor() as cursor:
                cursor.execute(
                    "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted"
                    " AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
                )
                return bool(cursor.fetchone()[0])

        try:
            wait_until(is_waited_for)
            switching.commit()
        finally:
            switching.close()


def test_closing_and_link_at_once_close_the_session_once() -> None:
    """The specification's race: the loser sees Inactive, and each row closes once."""
    for _ in range(10):
        session = silent_session(minutes=13, user_id=A, views=1)

        def switch(session: Session = session) -> LinkOutcome | None:
            try:
                return link(session, B).outcome
            except SessionNotFound:
                return None

        calls: list[Callable[[], Any]] = [switch, ActivityCloser(ActivityCloserOptions()).run]
        outcome, _ = run_together(calls)

        closed = Session.objects.get(id=session.id)
        assert closed.close_reason == ("Switched" if outcome else "Inactivity")
        assert OutboxMessage.objects.filter(key=str(session.id)).count() == 1
        assert OutboxMessage.objects.filter(topic=VIEW_ENDED).count() == 1
        OutboxMessage.objects.all().delete()


def test_20_parallel_heartbeats_openings_and_links_equal_some_serial_order_c2() -> None:
    session = make_session()
    view = make_view(session=session)

    def send_heartbeat() -> object:
        return record_heartbeat(
            session_id=session.id, anonymous_id=session.anonymous_id, device=DEVICE
        )

    def extend_one() -> object:
        return extend_view(view_id=view.id, anonymous_id=session.anonymous_id)

    def start() -> object:
        return start_session(anonymous_id=session.anonymous_id, user_id=None, device=DEVICE)

    run_together(
        [
            send_heartbeat,
            lambda: open_in(session),
            extend_one,
            start,
            lambda: link(session, A),
            lambda: link(session, B),
        ]
        * 4
    )

    active = Session.objects.get(status="Active")
    assert active.user_id in {A, B}
    for closed in Session.objects.filter(status="Inactive"):
        assert not closed.views.filter(status="Active").exists()
    # Every opening succeeded: four new views, in whichever session was Active.
    assert PropertyObjectView.objects.count() == 5
    latest = max(v.last_activity_at for v in PropertyObjectView.objects.all())
    assert Session.objects.order_by("-last_activity_at")[0].last_activity_at >= latest
