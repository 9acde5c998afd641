"""Starting a session and its heartbeats over HTTP (design, sections 5, 6 and 12)."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from sessions.models import Session
from tests.api import (
    HEARTBEAT,
    START,
    Call,
    Visit,
    assert_invalid,
    send,
)
from tests.bad_input import BAD_IDS
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, silent_session

pytestmark = pytest.mark.django_db


def test_first_start_answers_201_with_the_ids_to_keep() -> None:
    response = send(Call("POST", START, None))

    session = Session.objects.get()
    assert response.status_code == 201
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {
        "SessionId": str(session.id),
        "AnonymousId": str(session.anonymous_id),
        "Status": "Active",
        "IsNew": True,
    }
    assert session.user_agent == USER_AGENT
    assert session.ip_address == "127.0.0.1"


def test_second_start_answers_200_and_extends_the_session(visit: Visit) -> None:
    response = send(visit.call("start"), anonymous_id=visit.anonymous_id)

    assert response.status_code == 200
    assert response.json() == {
        "SessionId": str(visit.session.id),
        "AnonymousId": visit.anonymous_id,
        "Status": "Active",
        "IsNew": False,
    }
    assert Session.objects.get().last_activity_at > visit.session.last_activity_at


def test_start_keeps_a_device_id_that_was_never_seen_ac8() -> None:
    anonymous_id = str(new_id())
    response = send(Call("POST", START, None), anonymous_id=anonymous_id)
    assert (response.status_code, response.json()["AnonymousId"]) == (201, anonymous_id)


def test_start_issues_a_time_ordered_device_id() -> None:
    issued = send(Call("POST", START, None)).json()["AnonymousId"]
    assert UUID(issued).version == 7


def test_heartbeat_answers_the_session_it_extended(visit: Visit) -> None:
    response = send(visit.call("heartbeat"), anonymous_id=visit.anonymous_id)

    assert response.status_code == 200
    assert response.json() == {"SessionId": str(visit.session.id), "Restarted": False}
    assert Session.objects.get().last_activity_at > visit.session.last_activity_at


def test_heartbeat_of_an_unknown_session_restarts_with_this_requests_device() -> None:
    anonymous_id = new_id()
    response = send(
        Call("POST", HEARTBEAT, {"SessionId": str(new_id())}), anonymous_id=str(anonymous_id)
    )

    session = Session.objects.get()
    assert response.status_code == 200
    assert response.json() == {"SessionId": str(session.id), "Restarted": True}
    assert session.anonymous_id == anonymous_id
    assert session.user_agent == USER_AGENT


def test_start_after_an_outage_of_three_hours_answers_a_new_session_c5() -> None:
    session = silent_session(minutes=180)
    response = send(Call("POST", START, None), anonymous_id=str(session.anonymous_id))

    assert (response.status_code, response.json()["IsNew"]) == (201, True)
    old = Session.objects.get(id=session.id)
    assert (old.close_reason, old.duration) == ("Abandoned", 5 * MINUTE)


def test_duration_of_30_days_fits_everywhere_c22() -> None:
    session = make_session(silent=60 * MINUTE, lasted=timedelta(days=30))
    response = send(Call("POST", START, None), anonymous_id=str(session.anonymous_id))

    assert response.status_code == 201
    assert Session.objects.get(id=session.id).duration == timedelta(days=30)
    payload = json.loads(OutboxMessage.objects.get().payload)
    assert payload["DurationSeconds"] == 30 * 86_400


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS.keys())
def test_start_with_a_bad_device_id_is_invalid_before_any_sql_c30(
    bad: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(Call("POST", START, None), anonymous_id=bad)

    assert_invalid(response, "X-Anonymous-Id")
    assert len(statements) == 0


@pytest.mark.parametrize("text", ["u", "u" * 1024, "Ünïcôde ÿ", "&as_qdr=all", "-"])
def test_user_agent_of_1_to_1024_characters_is_kept_whole(text: str) -> None:
    assert send(Call("POST", START, None), user_agent=text).status_code == 201
    assert Session.objects.get().user_agent == text
