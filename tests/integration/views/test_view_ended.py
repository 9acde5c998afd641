"""Closing views: the user in the event, and the locks of the closer."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from outbox.models import OutboxMessage
from outbox.services import enqueue
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED
from sessions.models import Session
from sessions.services import link_session, record_heartbeat
from tests.closer import close_inactive
from tests.concurrency import Background
from tests.factories import DEVICE, MINUTE, make_session, make_view, open_in, silent_session
from views.models import PropertyObjectView
from views.services import extend_view

pytestmark = pytest.mark.django_db(transaction=True)

USER, OTHER = UUID(int=0xA), UUID(int=0xB)


# -- UserId of the event: the session's at closing time ------------------------------------


def by_phase_a(session: Session, view: PropertyObjectView) -> None:
    fall_silent(view, minutes=13)
    close_inactive()
    assert Session.objects.get(id=session.id).status == "Active"


def by_phase_b(session: Session, view: PropertyObjectView) -> None:
    fall_silent(session, minutes=13)  # the view is newer than the cutoff: phase A leaves it
    close_inactive()
    assert Session.objects.get(id=session.id).close_reason == "Inactivity"


def by_a_switch(session: Session, view: PropertyObjectView) -> None:
    link_session(anonymous_id=session.anonymous_id, user_id=OTHER)
    assert Session.objects.get(id=session.id).close_reason == "Switched"


def by_the_heartbeat_of_an_abandoned_view(session: Session, view: PropertyObjectView) -> None:
    fall_silent(view, minutes=30)
    assert not extend_view(view_id=view.id, anonymous_id=session.anonymous_id)


def by_the_heartbeat_of_an_abandoned_session(session: Session, view: PropertyObjectView) -> None:
    fall_silent(session, minutes=30)
    heartbeat = record_heartbeat(
        session_id=session.id,
        anonymous_id=session.anonymous_id,
        device=DEVICE,
    )
    assert heartbeat.restarted


def fall_silent(row: Session | PropertyObjectView, *, minutes: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {row._meta.db_table} SET created_at = created_at - %s::interval,"
            "   last_activity_at = created_at - %s::interval WHERE id = %s",
            ["2 h", f"{minutes} min", row.pk],
        )


WAYS: list[Callable[[Session, PropertyObjectView], None]] = [
    by_phase_a,
    by_phase_b,
    by_a_switch,
    by_the_heartbeat_of_an_abandoned_view,
    by_the_heartbeat_of_an_abandoned_session,
]


@pytest.mark.parametrize("close", WAYS, ids=lambda close: close.__name__)
def test_event_of_a_view_carries_the_sessions_user_at_closing_time(
    close: Callable[[Session, PropertyObjectView], None],
) -> None:
    """The view's own user is a snapshot of its opening: here a guest."""
    session = make_session(lasted=timedelta(0))
    view = make_view(session=session, lasted=timedelta(0))
    link_session(anonymous_id=session.anonymous_id, user_id=USER)

    close(session, view)

    message = OutboxMessage.objects.get(topic=PROPERTY_OBJECT_VIEW_ENDED)
    assert message.key == str(view.id)
    assert json.loads(message.payload)["UserId"] == str(USER)
    assert PropertyObjectView.objects.get(id=view.id).user_id is None


@pytest.mark.parametrize("close", [by_phase_a, by_phase_b], ids=lambda close: close.__name__)
def test_event_of_a_guests_view_carries_no_user(
    close: Callable[[Session, PropertyObjectView], None],
) -> None:
    session = make_session(lasted=timedelta(0))
    close(session, make_view(session=session, lasted=timedelta(0)))
    assert json.loads(OutboxMessage.objects.earliest("id").payload)["UserId"] is None


# -- what the closer locks -----------------------------------------------------------------


@contextmanager
def other_connection() -> Iterator[Any]:
    """Yield a cursor of another connection, whose transaction rolls back."""
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            yield cursor
    finally:
        other.close()


def read_locks(backend: int) -> tuple[set[tuple[str, str]], dict[str, set[UUID]]]:
    """Return a backend's locks on tables, and the rows that no other backend can lock."""
    with other_connection() as cursor:
        cursor.execute(
            "SELECT relation::regclass::text, mode FROM pg_locks"
            " JOIN pg_class ON pg_class.oid = relation"
            " WHERE pid = %s AND relkind = 'r' AND relnamespace = 'user_activity'::regnamespace",
            [backend],
        )
        tables = set(cursor.fetchall())
        locked = {}
        for table in ("sessions", "property_object_views"):
            cursor.execute(
                f"SELECT id FROM {table} EXCEPT ALL"
                f" SELECT id FROM (SELECT id FROM {table} FOR UPDATE SKIP LOCKED) AS free"
            )
            locked[table] = {row_id for (row_id,) in cursor.fetchall()}
    return tables, locked


def test_closer_locks_the_rows_that_it_closes_and_no_others_while_views_are_inserted_c18(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    browsing = make_session()
    live = silent_session(minutes=1)
    hanging = make_view(session=live, silent=13 * MINUTE)
    expired = silent_session(minutes=13)
    left = make_view(session=expired, silent=MINUTE)
    seen: list[tuple[set[tuple[str, str]], dict[str, set[UUID]]]] = []
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (backend,) = cursor.fetchone()

    def enqueue_and_read_locks(events: Any) -> None:
        enqueue(events)
        # In the closer's transaction, after its last lock.
        for session in (browsing, live):
            with Background(lambda session=session: open_in(session)) as opening:  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                opening.result(timeout=10)
        seen.append(read_locks(backend))

    monkeypatch.setattr("views.closing.enqueue", enqueue_and_read_locks)
    monkeypatch.setattr("sessions.transitions.enqueue", enqueue_and_read_locks)
    close_inactive()

    (phase_a, rows_a), (phase_b, rows_b) = seen
    assert rows_a == {"sessions": set(), "property_object_views": {hanging.id}}
    assert rows_b == {"sessions": {expired.id}, "property_object_views": {left.id}}
    for tables in (phase_a, phase_b):
        assert {table for table, _ in tables} == {
            "sessions",
            "property_object_views",
            "outbox_messages",
        }
        # No lock for which an insert, an update or a read would wait.
        assert {mode for _, mode in tables} <= {
            "AccessShareLock",
            "RowShareLock",
            "RowExclusiveLock",
        }
    assert PropertyObjectView.objects.filter(status="Active").count() == 4
