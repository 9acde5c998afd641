"""The action *close now* of the admin (design, section 14), over its pages."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse

from outbox.models import OutboxMessage
from pinactivity.admin.close_now import CLOSED_AT_ONCE
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from tests.closer import SESSION_ENDED, VIEW_ENDED
from tests.concurrency import Background, beside, run_together
from tests.factories import (
    MINUTE,
    make_due_sessions,
    make_session,
    make_view,
    open_in,
    silent_session,
)
from tests.processes import wait_until
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db(transaction=True)

Row = Session | PropertyObjectView
PAGES: dict[type[Row], str] = {
    Session: "admin:activity_sessions_session_changelist",
    PropertyObjectView: "admin:views_propertyobjectview_changelist",
}


def staff(*permissions: str) -> Client:
    """Log in as staff who may view sessions and views, with the named permissions besides."""
    user = User.objects.create_user(f"staff-{new_id()}", is_staff=True)
    names = ("view_session", "view_propertyobjectview", *permissions)
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label__in=("activity_sessions", "views"), codename__in=names
        )
    )
    assert user.user_permissions.count() == len(names)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def permitted() -> Client:
    return staff("close_now")


def choose(client: Client, *rows: Row, **more: str) -> Any:
    """Send the action for some rows; without `confirmed` it asks for confirmation."""
    page = reverse(PAGES[type(rows[0])])
    chosen = [str(row.pk) for row in rows]
    return client.post(page, {"action": "close_now", "_selected_action": chosen, **more})


def close(client: Client, *rows: Row) -> list[str]:
    """Confirm the closing of some rows; return the messages of the next page."""
    response = choose(client, *rows, confirmed="yes")
    assert response.status_code == 302, response.content.decode()
    return said(client, rows[0])


def said(client: Client, row: Row) -> list[str]:
    page = client.get(reverse(PAGES[type(row)]))
    return [str(message) for message in page.context["messages"]]


def ended(topic: str) -> list[str]:
    return sorted(OutboxMessage.objects.filter(topic=topic).values_list("key", flat=True))


def ids(*rows: Row) -> list[str]:
    return sorted(str(row.pk) for row in rows)


def test_page_that_asks_says_what_will_close_and_closes_nothing(permitted: Client) -> None:
    one, two = silent_session(minutes=3, views=2), silent_session(minutes=1, views=1)
    closed = silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()

    response = choose(permitted, one, two, closed)

    content = " ".join(response.content.decode().split())
    assert response.status_code == 200
    assert "This ends 2 sessions with 3 open views." in content
    assert "1 of those chosen is closed already" in content
    assert all(f'value="{row.id}"' in content for row in (one, two, closed))
    assert Session.objects.active().count() == 2
    assert PropertyObjectView.objects.active().count() == 3


def test_session_closes_with_its_views_and_events_inv_ses_005_inv_lv_007(
    permitted: Client,
) -> None:
    session = silent_session(minutes=3, views=2, lasted=7 * MINUTE)
    other = silent_session(minutes=3, views=1)
    begun = statement_time()

    assert close(permitted, session) == ["Closed: 1 session, 2 open views."]

    row = Session.objects.get(id=session.id)
    assert (row.status, row.close_reason, row.version) == ("Inactive", "Manual", 2)
    assert row.ended_at is not None
    assert begun <= row.ended_at <= statement_time()
    assert row.last_activity_at == session.last_activity_at
    assert row.duration == 7 * MINUTE
    views = list(session.views.all())
    assert {(view.status, view.close_reason) for view in views} == {("Inactive", "Manual")}
    assert {view.ended_at for view in views} == {row.ended_at}
    assert ended(SESSION_ENDED) == ids(session)
    assert ended(VIEW_ENDED) == ids(*views)
    payload = json.loads(OutboxMessage.objects.get(topic=SESSION_ENDED).payload)
    assert payload["DurationSeconds"] == 420
    assert Session.objects.get(id=other.id).status == "Active"
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.get_change_message()) == (str(session.id), "Closed now.")
    assert str(entry.user_id) == permitted.session["_auth_user_id"]
    history = reverse("admin:activity_sessions_session_history", args=[session.id])
    assert "Closed now." in permitted.get(history).content.decode()


def test_view_closes_alone_inv_lv_004(permitted: Client) -> None:
    session = make_session()
    view, other = make_view(session=session), make_view(session=session)

    asked = choose(permitted, view).content.decode()
    assert "This ends 1 view, alone: their sessions go on." in asked
    assert close(permitted, view) == ["Closed: 1 property object view."]

    assert PropertyObjectView.objects.get(id=view.id).close_reason == "Manual"
    assert PropertyObjectView.objects.get(id=other.id).status == "Active"
    assert Session.objects.get(id=session.id).status == "Active"
    assert (ended(VIEW_ENDED), ended(SESSION_ENDED)) == (ids(view), [])
    assert [entry.object_id for entry in LogEntry.objects.all()] == ids(view)


@pytest.mark.parametrize("make", [make_session, make_view])
def test_rows_closed_already_are_reported_and_stay_as_they_are_inv_ses_006_inv_lv_008(
    permitted: Client, make: Callable[..., Row]
) -> None:
    first, second = make(), make()
    assert "Closed already" not in close(permitted, first)[0]
    before = type(first)._default_manager.filter(pk=first.pk).values().get()

    (mixed,) = close(permitted, first, second)
    (none,) = close(permitted, first, second)
    choose(permitted, first, second)
    (asked,) = said(permitted, first)

    assert mixed.startswith("Closed: 1 ")
    assert mixed.endswith(" Closed already: 1.")
    assert none.startswith("Closed: 0 ")
    assert none.endswith(" Closed already: 2.")
    assert asked == "All of them are closed already."
    assert type(first)._default_manager.filter(pk=first.pk).values().get() == before
    assert LogEntry.objects.count() == OutboxMessage.objects.count() == 2


def test_row_that_closed_since_the_page_asked_is_reported_in_a_filtered_list_too(
    permitted: Client,
) -> None:
    first, second = make_session(), make_session()
    page = f"{reverse(PAGES[Session])}?status__exact=Active"
    document = {"action": "close_now", "_selected_action": ids(first, second)}
    assert "This ends 2 sessions" in permitted.post(page, document).content.decode()
    close(permitted, first)

    permitted.post(page, {**document, "confirmed": "yes"})

    assert said(permitted, second) == ["Closed: 1 session. Closed already: 1."]


@pytest.mark.parametrize("make", [make_session, make_view])
def test_without_the_permission_the_action_is_not_offered_and_does_nothing(
    permitted: Client, make: Callable[..., Row]
) -> None:
    row, client = make(), staff()
    page = reverse(PAGES[type(row)])
    assert 'value="close_now"' in permitted.get(page).content.decode()
    assert "close_now" not in client.get(page).content.decode()

    choose(client, row, confirmed="yes")
    choose(Client(), row, confirmed="yes")

    row.refresh_from_db()
    assert row.status == "Active"
    assert not LogEntry.objects.exists()
    assert not OutboxMessage.objects.exists()


def test_post_of_another_site_is_refused() -> None:
    client, row = Client(enforce_csrf_checks=True), make_session()
    client.force_login(User.objects.create_superuser("root"))
    assert choose(client, row, confirmed="yes").status_code == 403
    assert Session.objects.get().status == "Active"


def test_as_many_rows_close_at_once_as_one_transaction_may_hold(permitted: Client) -> None:
    make_due_sessions(CLOSED_AT_ONCE + 1, views=1)
    rows = list(Session.objects.all())

    (refused,) = close(permitted, *rows)
    choose(permitted, rows[0], select_across="1")
    (refused_all,) = said(permitted, rows[0])
    assert refused == refused_all == f"Nothing was closed: choose {CLOSED_AT_ONCE} at most."
    assert Session.objects.active().count() == CLOSED_AT_ONCE + 1

    (message,) = close(permitted, *rows[1:])
    assert message == f"Closed: {CLOSED_AT_ONCE} sessions, {CLOSED_AT_ONCE} open views."
    assert Session.objects.active().get() == rows[0]


@pytest.mark.parametrize("page", PAGES.values())
def test_id_that_is_none_is_a_bad_request(permitted: Client, page: str) -> None:
    for bad in ("undefined", "1", "\x00", "9" * 5_000):
        document = {"action": "close_now", "_selected_action": [bad], "confirmed": "yes"}
        assert permitted.post(reverse(page), document).status_code == 400


def test_closer_and_support_at_once_close_each_row_once_inv_ses_006_inv_lv_008(
    permitted: Client,
) -> None:
    make_due_sessions(60, views=2)
    rows = list(Session.objects.order_by("?"))
    other = staff("close_now")

    def run_closer() -> int:
        options = ActivityCloserOptions(sessions_per_transaction=5)
        return ActivityCloser(options).run().closed_sessions

    def close_some(client: Client, part: list[Session]) -> int:
        choose(client, *part, confirmed="yes")
        return 0

    closed, *_ = run_together(
        [
            run_closer,
            lambda: close_some(permitted, rows[:40]),
            lambda: close_some(other, rows[20:]),
        ]
    )

    assert not Session.objects.active().exists()
    assert ended(SESSION_ENDED) == ids(*rows)
    assert ended(VIEW_ENDED) == ids(*PropertyObjectView.objects.all())
    by_hand = Session.objects.filter(close_reason="Manual")
    assert by_hand.count() == 60 - closed
    assert sorted(entry.object_id or "" for entry in LogEntry.objects.all()) == ids(*by_hand)


def test_waits_for_the_closer_and_leaves_what_it_closed(permitted: Client) -> None:
    """Another transaction has locked a view, for which the closer's transaction waits."""
    session = silent_session(minutes=13)
    view = make_view(session=session, silent=MINUTE)
    with beside() as other:
        other.execute("SELECT FROM user_activity.property_object_views FOR UPDATE")
        options = ActivityCloserOptions(sessions_per_transaction=1)
        with Background(lambda: ActivityCloser(options).run()) as closing_run:
            wait_for_waiting(1)
            with Background(lambda: close(permitted, session)) as by_hand:
                wait_for_waiting(2)
                other.rollback()
                messages = by_hand.result()
            closing_run.result()

    assert messages == ["Closed: 0 sessions. Closed already: 1."]
    assert Session.objects.get().close_reason == "Inactivity"
    assert (ended(SESSION_ENDED), ended(VIEW_ENDED)) == (ids(session), ids(view))
    assert not LogEntry.objects.exists()


def test_heartbeat_under_way_counts_and_the_next_one_restarts(permitted: Client) -> None:
    session = silent_session(minutes=3)
    with beside() as other:
        (moment,) = other.execute(
            "UPDATE user_activity.sessions SET last_activity_at = now() RETURNING last_activity_at"
        ).fetchone() or (None,)
        with Background(lambda: close(permitted, session)) as by_hand:
            wait_for_waiting(1)
            other.commit()
            assert by_hand.result() == ["Closed: 1 session."]

    row = Session.objects.get(id=session.id)
    assert row.last_activity_at == moment
    assert row.duration == row.last_activity_at - row.created_at
    assert open_in(session).restarted


def test_row_that_stays_locked_is_reported_and_nothing_closes(permitted: Client) -> None:
    locked, free = sorted((make_session(), make_session()), key=lambda row: row.id, reverse=True)
    connection.close()  # the next connection waits for a lock only as long as this setting allows
    options = connection.settings_dict["OPTIONS"]
    usual = options["options"]
    options["options"] = usual + " -c lock_timeout=100ms"
    try:
        with beside() as other:
            other.execute(
                "SELECT FROM user_activity.sessions WHERE id = %s FOR UPDATE", [locked.id]
            )
            (message,) = close(permitted, locked, free)
    finally:
        options["options"] = usual
        connection.close()

    assert message == "Nothing was closed: somebody else is at work on one of them. Try again."
    assert Session.objects.active().count() == 2
    assert not LogEntry.objects.exists()


def test_error_of_postgresql_is_reported_and_nothing_closes(permitted: Client) -> None:
    session = make_session()
    with connection.cursor() as cursor:
        # A constraint on the log entries, which come last: the closing rolls back with them.
        cursor.execute("ALTER TABLE django_admin_log ADD CHECK (object_id = 'nothing')")
        try:
            (message,) = close(permitted, session)
        finally:
            cursor.execute(
                "ALTER TABLE django_admin_log DROP CONSTRAINT django_admin_log_object_id_check"
            )

    assert message == "Nothing was closed: PostgreSQL refused (23514)."
    assert Session.objects.get().status == "Active"
    assert not OutboxMessage.objects.exists()


def test_postgresql_that_goes_away_in_the_middle_is_reported(permitted: Client) -> None:
    session = make_session()
    with beside() as other:
        other.execute("SELECT FROM user_activity.sessions FOR UPDATE")
        with Background(lambda: close(permitted, session)) as by_hand:
            (waiting,) = wait_for_waiting(1)
            other.execute("SELECT pg_terminate_backend(%s)", [waiting])
            messages = by_hand.result()

    assert messages == ["PostgreSQL went away: whether anything was closed, the list will show."]
    assert Session.objects.get().status == "Active"


def wait_for_waiting(count: int) -> list[int]:
    """Wait until some number of backends waits for a lock; return their process ids."""

    def waiting() -> list[int]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return [pid for (pid,) in cursor.fetchall()]

    wait_until(lambda: len(waiting()) == count, what=f"{count} waiting backends")
    return waiting()
