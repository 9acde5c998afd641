"""Opening views and their heartbeats over HTTP (design, sections 5, 6 and 12)."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from pinactivity.core.ids import new_id
from sessions.models import Session
from tests.api import (
    NIL,
    OPEN,
    START,
    Call,
    Visit,
    assert_invalid,
    assert_unavailable,
    problem,
    send,
    view_heartbeat,
)
from tests.concurrency import COMMITTED, locked
from tests.factories import silent_session
from views.lifecycle import FILTER_SNAPSHOT_BYTES
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db


def test_opening_a_view_answers_201(visit: Visit) -> None:
    object_id = new_id()
    call = visit.call("open")
    response = send(
        call._replace(body={**(call.body or {}), "PropertyObjectId": str(object_id)}),
        anonymous_id=visit.anonymous_id,
    )

    view = PropertyObjectView.objects.get(property_object_id=object_id)
    assert response.status_code == 201
    assert response.json() == {
        "PropertyObjectViewId": str(view.id),
        "SessionId": str(visit.session.id),
        "IsNew": True,
        "Restarted": False,
    }
    assert (view.view_source, view.filter_snapshot) == ("Catalog", None)


def test_opening_a_view_that_is_open_answers_200_and_extends_it(visit: Visit) -> None:
    response = send(visit.call("open"), anonymous_id=visit.anonymous_id)

    assert response.status_code == 200
    assert response.json() == {
        "PropertyObjectViewId": str(visit.view.id),
        "SessionId": str(visit.session.id),
        "IsNew": False,
        "Restarted": False,
    }
    assert PropertyObjectView.objects.get().last_activity_at > visit.view.last_activity_at


def test_opening_a_view_in_an_unknown_session_restarts(visit: Visit) -> None:
    response = send(visit.call("open"), anonymous_id=str(new_id()))

    assert response.status_code == 201
    body = response.json()
    assert (body["IsNew"], body["Restarted"]) == (True, True)
    assert body["SessionId"] != str(visit.session.id)


@pytest.mark.parametrize(
    "source",
    ["Catalog", "Search", "Map", "Recommendation", "Favorites", "Share", "Direct", "Other"],
)
def test_every_view_source_of_the_contract_is_accepted(visit: Visit, source: str) -> None:
    body = {
        "SessionId": str(visit.session.id),
        "PropertyObjectId": str(new_id()),
        "ViewSource": source,
    }
    response = send(Call("POST", OPEN, body), anonymous_id=visit.anonymous_id)

    assert response.status_code == 201
    view = PropertyObjectView.objects.get(id=response.json()["PropertyObjectViewId"])
    assert view.view_source == source


def test_filter_snapshot_is_kept_as_it_came(visit: Visit) -> None:
    snapshot = {"Цена": {"Max": 12.5, "Min": None}, "Rooms": [1, 2], "😀": True, "Big": 2**53 + 1}
    body = {
        "SessionId": str(visit.session.id),
        "PropertyObjectId": str(new_id()),
        "ViewSource": "Map",
        "FilterSnapshot": snapshot,
    }
    response = send(Call("POST", OPEN, body), anonymous_id=visit.anonymous_id)

    view = PropertyObjectView.objects.get(id=response.json()["PropertyObjectViewId"])
    assert view.filter_snapshot == snapshot


def test_view_heartbeat_answers_accepted_and_extends_view_and_session(visit: Visit) -> None:
    response = send(visit.call("view heartbeat"), anonymous_id=visit.anonymous_id)

    assert response.status_code == 200
    assert response.json() == {"Accepted": True}
    assert PropertyObjectView.objects.get().last_activity_at > visit.view.last_activity_at
    assert Session.objects.get().last_activity_at > visit.session.last_activity_at


@pytest.mark.parametrize("whose", ["unknown", "foreign"])
def test_view_heartbeat_on_an_unknown_or_foreign_view_writes_nothing_lv_003(
    visit: Visit, whose: str
) -> None:
    view_id = new_id() if whose == "unknown" else visit.view.id
    anonymous_id = visit.anonymous_id if whose == "unknown" else str(new_id())

    response = send(Call("PUT", view_heartbeat(view_id), None), anonymous_id=anonymous_id)

    assert (response.status_code, response.json()) == (200, {"Accepted": False})
    assert PropertyObjectView.objects.get().last_activity_at == visit.view.last_activity_at
    assert Session.objects.get().last_activity_at == visit.session.last_activity_at


def test_view_heartbeat_on_a_closed_view_writes_nothing_c6() -> None:
    session = silent_session(minutes=60, views=1)
    send(Call("POST", START, None), anonymous_id=str(session.anonymous_id))
    closed = PropertyObjectView.objects.values().get()
    assert closed["status"] == "Inactive"

    response = send(
        Call("PUT", view_heartbeat(closed["id"]), None), anonymous_id=str(session.anonymous_id)
    )

    assert (response.status_code, response.json()) == (200, {"Accepted": False})
    assert PropertyObjectView.objects.values().get() == closed


@pytest.mark.parametrize(("name", "count"), [("open", 2), ("view heartbeat", 1)])
def test_opening_takes_two_statements_and_a_view_heartbeat_one(
    visit: Visit, name: str, count: int, count_statements: Callable[[], Any]
) -> None:
    """The service needs one statement; the rate limit of an opening needs another before it."""
    with count_statements() as statements:
        send(visit.call(name), anonymous_id=visit.anonymous_id)
    assert len(statements) == count


def test_view_heartbeat_needs_no_user_agent(visit: Visit) -> None:
    response = send(visit.call("view heartbeat"), anonymous_id=visit.anonymous_id, user_agent=None)
    assert response.json() == {"Accepted": True}


@pytest.mark.parametrize("source", [None, "", "catalog", "Catalog ", "Banner", 1, True, [], {}])
def test_view_source_outside_the_contract_is_named(visit: Visit, source: Any) -> None:
    call = visit.call("open")
    response = send(
        call._replace(body={**(call.body or {}), "ViewSource": source}),
        anonymous_id=visit.anonymous_id,
    )
    assert_invalid(response, "ViewSource")


@pytest.mark.parametrize("snapshot", ["text", 1, True, [], [{"Price": 1}]])
def test_filter_snapshot_that_is_no_object_is_named(visit: Visit, snapshot: Any) -> None:
    call = visit.call("open")
    response = send(
        call._replace(body={**(call.body or {}), "FilterSnapshot": snapshot}),
        anonymous_id=visit.anonymous_id,
    )
    assert_invalid(response, "FilterSnapshot")


@pytest.mark.parametrize(
    ("filling", "status"),
    [
        ("x" * (FILTER_SNAPSHOT_BYTES - len('{"A":""}')), 200),
        ("x" * (FILTER_SNAPSHOT_BYTES - len('{"A":""}') + 1), 400),
        ("ж" * (FILTER_SNAPSHOT_BYTES // 2), 400),
    ],
    ids=["8 KiB", "a byte more", "fewer characters but more bytes"],
)
def test_filter_snapshot_takes_8_kib_at_most(visit: Visit, filling: str, status: int) -> None:
    call = visit.call("open")
    response = send(
        call._replace(body={**(call.body or {}), "FilterSnapshot": {"A": filling}}),
        anonymous_id=visit.anonymous_id,
    )
    assert response.status_code == status
    if status == 400:
        assert_invalid(response, "FilterSnapshot")


@pytest.mark.parametrize(
    "view_id", ["%00", f"{NIL[:-1]}%00", "%ff", "undefined", "1", "a" * 5_000, NIL]
)
def test_path_with_something_that_is_no_view_id_is_not_found_c32(
    visit: Visit, view_id: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(Call("PUT", view_heartbeat(view_id), None), anonymous_id=visit.anonymous_id)

    assert (response.status_code, problem(response)["code"]) == (404, "NOT_FOUND")
    assert len(statements) == 0


@COMMITTED
def test_view_heartbeat_that_cannot_lock_its_view_leaves_the_session_as_it_was(
    visit: Visit,
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
    try:
        with locked("SELECT FROM property_object_views WHERE id = %s FOR UPDATE", visit.view.id):
            response = send(visit.call("view heartbeat"), anonymous_id=visit.anonymous_id)
    finally:
        connection.close()

    assert_unavailable(response)
    assert Session.objects.get().last_activity_at == visit.session.last_activity_at
