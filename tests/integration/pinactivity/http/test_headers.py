"""What requests carry in headers: device id, User-Agent, client address, request id."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id, parse_id
from sessions.models import Session
from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    HEARTBEAT,
    NIL,
    OPEN,
    START,
    Call,
    Visit,
    assert_invalid,
    send,
    view_heartbeat,
)
from tests.bad_input import BAD_IDS
from tests.conftest import USER_AGENT
from tests.factories import silent_session

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("bad", [None, *BAD_IDS.values()], ids=["absent", *BAD_IDS.keys()])
@pytest.mark.parametrize("name", ["heartbeat", "open", "view heartbeat"])
def test_other_calls_require_the_device_id_before_any_sql_c30(
    visit: Visit, name: str, bad: str | None, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(visit.call(name), anonymous_id=bad)

    assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)
    assert len(statements) == 0


SPELLINGS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "no dashes": lambda text: text.replace("-", ""),
    "braces": lambda text: f"{{{text}}}",
    "URN": lambda text: f"urn:uuid:{text}",
    "upper-case URN": lambda text: f"urn:uuid:{text}".upper(),
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_other_spellings_of_an_id_mean_the_same_device_and_rows_c31(
    visit: Visit, spell: Callable[[str], str]
) -> None:
    anonymous_id = spell(visit.anonymous_id)

    started = send(visit.call("start"), anonymous_id=anonymous_id)
    heartbeat = send(
        Call("POST", HEARTBEAT, {"SessionId": spell(str(visit.session.id))}),
        anonymous_id=anonymous_id,
    )
    opened = send(
        Call(
            "POST",
            OPEN,
            {
                "SessionId": spell(str(visit.session.id)),
                "PropertyObjectId": spell(str(visit.view.property_object_id)),
                "ViewSource": "Map",
            },
        ),
        anonymous_id=anonymous_id,
    )
    extended = send(
        Call("PUT", view_heartbeat(spell(str(visit.view.id))), None), anonymous_id=anonymous_id
    )

    assert started.json()["AnonymousId"] == visit.anonymous_id
    assert started.json()["SessionId"] == str(visit.session.id)
    assert heartbeat.json() == {"SessionId": str(visit.session.id), "Restarted": False}
    assert opened.json()["PropertyObjectViewId"] == str(visit.view.id)
    assert extended.json() == {"Accepted": True}
    assert Session.objects.count() == 1


BAD_USER_AGENTS = {
    "absent": None,
    "empty": "",
    "blank": "  \t ",
    "1025 characters": "u" * 1025,
    "a megabyte": "u" * 1_000_000,
    "NUL": "Mozilla\x00/5.0",
    "a control character": "Mozilla\x1b[31m",
}


@pytest.mark.parametrize("bad", BAD_USER_AGENTS.values(), ids=BAD_USER_AGENTS.keys())
@pytest.mark.parametrize("name", ["start", "heartbeat", "open"])
def test_user_agent_is_checked_before_any_sql_even_where_nothing_restarts(
    visit: Visit, name: str, bad: str | None, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(visit.call(name), anonymous_id=visit.anonymous_id, user_agent=bad)

    assert_invalid(response, "User-Agent")
    assert len(statements) == 0


@pytest.mark.parametrize(
    ("socket_address", "kept"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("", None),
        ("unix:", None),
    ],
)
def test_address_is_the_sockets_in_canonical_form_or_null_c35(
    socket_address: str, kept: str | None
) -> None:
    response = Client(REMOTE_ADDR=socket_address).post(
        START, headers={"User-Agent": USER_AGENT, "X-Forwarded-For": "198.51.100.1"}
    )
    assert response.status_code == 201
    assert Session.objects.get().ip_address == kept


@pytest.mark.parametrize(
    ("forwarded", "kept"),
    [
        ("10.1.2.3:88", "10.1.2.3"),
        ("unknown", None),
        ("198.51.100.1, 203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, [2001:db8::1]:443", "2001:db8::1"),
        ("' OR 1=1 --", None),
        ("\x00", None),
        ("9" * 100_000, None),
        ("", None),
    ],
)
def test_address_behind_a_proxy_is_what_the_proxy_saw_c35(
    settings: Any, forwarded: str, kept: str | None
) -> None:
    settings.TRUSTED_PROXY_COUNT = 1
    response = send(Call("POST", START, None), headers={"X-Forwarded-For": forwarded})

    assert response.status_code == 201
    assert Session.objects.get().ip_address == kept


def test_request_id_comes_back_and_reaches_the_events() -> None:
    session = silent_session(minutes=60)
    request_id = new_id()

    response = send(
        Call("POST", START, None),
        anonymous_id=str(session.anonymous_id),
        headers={"X-Request-Id": str(request_id).upper()},
    )

    assert response.headers["X-Request-Id"] == str(request_id)
    headers = json.loads(OutboxMessage.objects.get().headers)
    assert headers["CorrelationId"] == str(request_id)


def test_request_without_a_usable_request_id_gets_one() -> None:
    ids = {
        send(Call("POST", START, None), headers={"X-Request-Id": given}).headers["X-Request-Id"]
        for given in ("", "1", NIL, "\r\nX: y", "a" * 10_000)
    }
    assert len(ids) == 5
    assert all(parse_id(each).version == 7 for each in ids)
