"""Problems: 409, 500 and 503, and that none quotes what came in."""

from typing import Any

import pytest
from django.db import connection
from django.test import Client

from pinactivity.core.ids import new_id
from sessions.models import Session
from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    API,
    HEARTBEAT,
    MARKER,
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
from tests.conftest import USER_AGENT
from tests.factories import silent_session
from tests.outages import postgres_away
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("heartbeat", "SessionId"),
        ("open", "SessionId"),
        ("open", "PropertyObjectId"),
        ("open", "ViewSource"),
        ("open", "FilterSnapshot"),
    ],
)
def test_no_answer_quotes_a_value_of_the_body(visit: Visit, name: str, field: str) -> None:
    call = visit.call(name)
    response = send(
        call._replace(body={**(call.body or {}), field: MARKER}), anonymous_id=visit.anonymous_id
    )
    assert response.status_code == 400
    assert MARKER not in response.content.decode()


def test_no_answer_quotes_a_header_or_a_path(visit: Visit) -> None:
    answers = [
        send(visit.call("start"), anonymous_id=MARKER),
        send(visit.call("heartbeat"), anonymous_id=MARKER),
        send(visit.call("start"), user_agent=f"{MARKER}\x01"),
        send(visit.call("heartbeat"), anonymous_id=visit.anonymous_id, content_type=MARKER),
        send(visit.call("heartbeat"), anonymous_id=visit.anonymous_id, raw=MARKER.encode()),
        send(Call("PUT", view_heartbeat(MARKER), None), anonymous_id=visit.anonymous_id),
        send(Call("POST", f"{API}/{MARKER}", None)),
        send(Call(MARKER, START, None)),
    ]
    assert [answer.status_code for answer in answers if MARKER in answer.content.decode()] == []
    assert all(400 <= answer.status_code < 500 for answer in answers)


def test_race_that_never_ends_is_409_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be made at will: the closing of the abandoned row is taken out instead."""
    monkeypatch.setattr("sessions.services.close_sessions", lambda *_, **__: None)
    session = silent_session(minutes=60)
    start = Call("POST", START, None)
    heartbeat = Call("POST", HEARTBEAT, {"SessionId": str(session.id)})
    opening = Call(
        "POST",
        OPEN,
        {
            "SessionId": str(session.id),
            "PropertyObjectId": str(new_id()),
            "ViewSource": "Catalog",
        },
    )

    for call in (start, heartbeat, opening):
        response = send(call, anonymous_id=str(session.anonymous_id))
        assert (response.status_code, problem(response)["code"]) == (
            409,
            "USER_ACTIVITY_SESSION_ACTIVE_RACE",
        )
        assert response.headers["Retry-After"] == "1"
    assert Session.objects.count() == 1
    assert not PropertyObjectView.objects.exists()


def test_error_of_our_own_is_a_problem_without_its_text(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError(MARKER)

    monkeypatch.setattr("sessions.api.record_heartbeat", fail)
    response = Client(raise_request_exception=False).post(
        HEARTBEAT,
        visit.call("heartbeat").body,
        "application/json",
        headers={"User-Agent": USER_AGENT, "X-Anonymous-Id": visit.anonymous_id},
    )

    assert (response.status_code, problem(response)["code"]) == (500, "INTERNAL_ERROR")
    assert MARKER not in response.content.decode()


@COMMITTED
@pytest.mark.parametrize("name", ["start", "heartbeat", "open", "view heartbeat"])
def test_call_answers_503_while_postgresql_is_away_and_then_works_again(
    visit: Visit, name: str
) -> None:
    with postgres_away():
        away = send(visit.call(name), anonymous_id=visit.anonymous_id)
    back = send(visit.call(name), anonymous_id=visit.anonymous_id)

    assert_unavailable(away)
    assert back.status_code == 200


@COMMITTED
@pytest.mark.parametrize("name", ["start", "heartbeat", "open", "view heartbeat"])
def test_invalid_request_is_reported_even_while_postgresql_is_away(visit: Visit, name: str) -> None:
    with postgres_away():
        response = send(visit.call(name), anonymous_id="undefined")
    assert_invalid(
        response,
        "X-Anonymous-Id",
        code="VALIDATION_FAILED" if name == "start" else ANONYMOUS_ID_REQUIRED,
    )


@COMMITTED
@pytest.mark.parametrize("name", ["start", "heartbeat", "open", "view heartbeat"])
def test_call_after_its_connection_was_cut_is_served_on_a_new_one(visit: Visit, name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    operator = connection.copy()
    try:
        with operator.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    finally:
        operator.close()

    response = send(visit.call(name), anonymous_id=visit.anonymous_id)

    assert response.status_code in {200, 201}


@COMMITTED
@pytest.mark.parametrize("name", ["start", "heartbeat", "open", "view heartbeat"])
@pytest.mark.parametrize("timeout", ["lock_timeout", "statement_timeout"])
def test_wait_for_a_lock_that_lasts_too_long_answers_503_and_writes_nothing(
    visit: Visit, name: str, timeout: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET {timeout} = '100ms'")
    try:
        with locked("SELECT FROM sessions WHERE id = %s FOR UPDATE", visit.session.id):
            waited = send(visit.call(name), anonymous_id=visit.anonymous_id)
        assert Session.objects.get().last_activity_at == visit.session.last_activity_at
        again = send(visit.call(name), anonymous_id=visit.anonymous_id)
    finally:
        connection.close()  # and with it the timeout

    assert_unavailable(waited)
    assert again.status_code == 200
