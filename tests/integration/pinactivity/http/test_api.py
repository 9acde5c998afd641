"""The HTTP calls on sessions and views (design, sections 5, 6, 12): shapes, codes, precedence."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id, parse_id
from sessions.models import Session
from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    API,
    HEARTBEAT,
    MARKER,
    NIL,
    OPEN,
    START,
    Call,
    Visit,
    assert_invalid,
    assert_served_or_refused,
    assert_unavailable,
    problem,
    send,
    view_heartbeat,
)
from tests.bad_input import BAD_IDS, BAD_JSON, STRANGE_BODIES, STRANGE_TEXTS
from tests.concurrency import COMMITTED, locked
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, silent_session
from tests.outages import postgres_away
from views.lifecycle import FILTER_SNAPSHOT_BYTES
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db


# -- what succeeds, exactly ----------------------------------------------------------------


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
    """One does all of the work; that of the limit comes before an opening."""
    with count_statements() as statements:
        send(visit.call(name), anonymous_id=visit.anonymous_id)
    assert len(statements) == count


def test_view_heartbeat_needs_no_user_agent(visit: Visit) -> None:
    response = send(visit.call("view heartbeat"), anonymous_id=visit.anonymous_id, user_agent=None)
    assert response.json() == {"Accepted": True}


def test_start_after_an_outage_of_three_hours_answers_a_new_session_c5() -> None:
    session = silent_session(minutes=180)
    response = send(Call("POST", START, None), anonymous_id=str(session.anonymous_id))

    assert (response.status_code, response.json()["IsNew"]) == (201, True)
    old = Session.objects.get(id=session.id)
    assert (old.close_reason, old.duration) == ("Abandoned", 5 * MINUTE)


# -- the headers ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS.keys())
def test_start_with_a_bad_device_id_is_invalid_before_any_sql_c30(
    bad: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(Call("POST", START, None), anonymous_id=bad)

    assert_invalid(response, "X-Anonymous-Id")
    assert len(statements) == 0


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


@pytest.mark.parametrize("text", ["u", "u" * 1024, "Ünïcôde ÿ", "&as_qdr=all", "-"])
def test_user_agent_of_1_to_1024_characters_is_kept_whole(text: str) -> None:
    assert send(Call("POST", START, None), user_agent=text).status_code == 201
    assert Session.objects.get().user_agent == text


# -- the bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["heartbeat", "open"])
def test_device_id_is_checked_before_the_body(visit: Visit, name: str) -> None:
    response = send(visit.call(name), raw=b"{not json")
    assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)


NOT_IDS: dict[str, Any] = {
    "nil": NIL,
    "null": None,
    "a number": 12,
    "true": True,
    "a list": ["0190a0b0-0000-7000-8000-000000000001"],
    "an object": {},
    "empty": "",
    "junk": "undefined",
    "blanks around": " 0190a0b0-0000-7000-8000-000000000001",
}


@pytest.mark.parametrize("value", NOT_IDS.values(), ids=NOT_IDS.keys())
@pytest.mark.parametrize(
    ("name", "field"),
    [("heartbeat", "SessionId"), ("open", "SessionId"), ("open", "PropertyObjectId")],
)
def test_field_that_is_no_id_is_named_before_any_sql(
    visit: Visit, name: str, field: str, value: Any, count_statements: Callable[[], Any]
) -> None:
    call = visit.call(name)
    with count_statements() as statements:
        response = send(
            call._replace(body={**(call.body or {}), field: value}),
            anonymous_id=visit.anonymous_id,
        )

    assert_invalid(response, field)
    assert len(statements) == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [("heartbeat", ["SessionId"]), ("open", ["SessionId", "PropertyObjectId", "ViewSource"])],
)
@pytest.mark.parametrize("raw", [b"", b"{}", b'{"sessionId": "x", "SESSIONID": "x"}'])
def test_missing_fields_are_all_named_before_any_sql(
    visit: Visit, name: str, fields: list[str], raw: bytes, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(visit.call(name), anonymous_id=visit.anonymous_id, raw=raw)

    assert_invalid(response, *fields)
    assert len(statements) == 0


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


@pytest.mark.parametrize("raw", BAD_JSON.values(), ids=BAD_JSON.keys())
@pytest.mark.parametrize("name", ["heartbeat", "open"])
def test_body_that_is_not_strict_json_is_invalid_before_any_sql(
    visit: Visit, name: str, raw: bytes, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(visit.call(name), anonymous_id=visit.anonymous_id, raw=raw)

    assert_invalid(response, "body")
    assert len(statements) == 0


@pytest.mark.parametrize("name", ["heartbeat", "open"])
def test_oversized_body_is_too_large(
    visit: Visit, name: str, count_statements: Callable[[], Any]
) -> None:
    raw = json.dumps({**(visit.call(name).body or {}), "Filling": "x" * 64 * 1024}).encode()
    with count_statements() as statements:
        response = send(visit.call(name), anonymous_id=visit.anonymous_id, raw=raw)

    assert (response.status_code, problem(response)["code"]) == (413, "PAYLOAD_TOO_LARGE")
    assert len(statements) == 0


@pytest.mark.parametrize(
    "content_type",
    [
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "application/problem+json",
        "json",
        "",
        "/",
        "\x00",
    ],
)
@pytest.mark.parametrize("name", ["heartbeat", "open"])
def test_other_media_types_are_unsupported(
    visit: Visit, name: str, content_type: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = send(
            visit.call(name), anonymous_id=visit.anonymous_id, content_type=content_type
        )

    assert (response.status_code, problem(response)["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")
    assert len(statements) == 0


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-16", "Application/JSON", "application/json ;x"]
)
def test_json_may_be_announced_with_parameters_and_in_any_case(
    visit: Visit, content_type: str
) -> None:
    response = send(
        visit.call("heartbeat"), anonymous_id=visit.anonymous_id, content_type=content_type
    )
    assert response.status_code == 200


def test_answer_is_json_whatever_the_client_would_accept(visit: Visit) -> None:
    response = send(
        visit.call("heartbeat"),
        anonymous_id=visit.anonymous_id,
        headers={"Accept": "text/html;q=1, */*;q=0"},
    )
    assert (response.status_code, response.headers["Content-Type"]) == (200, "application/json")


def test_unknown_fields_are_ignored(visit: Visit) -> None:
    call = visit.call("heartbeat")
    response = send(
        call._replace(body={**(call.body or {}), "CreatedAt": "2001-01-01T00:00:00Z", "Id": 1}),
        anonymous_id=visit.anonymous_id,
    )
    assert response.json() == {"SessionId": str(visit.session.id), "Restarted": False}


@pytest.mark.parametrize("name", ["start", "view heartbeat"])
def test_call_without_a_body_reads_none(visit: Visit, name: str) -> None:
    response = send(
        visit.call(name), anonymous_id=visit.anonymous_id, raw=b"\xff{", content_type="x/y"
    )
    assert response.status_code == 200


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


# -- methods and paths ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "allowed", "method"),
    [
        (path, allowed, method)
        for path, allowed in [
            (START, "POST"),
            (HEARTBEAT, "POST"),
            (OPEN, "POST"),
            (view_heartbeat(NIL), "PUT"),
        ]
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "X"]
        if method != allowed
    ],
)
def test_wrong_method_is_told_the_right_one(path: str, allowed: str, method: str) -> None:
    response = send(Call(method, path, None))

    assert response.status_code == 405
    assert allowed in response.headers["Allow"].split(", ")
    assert method not in response.headers["Allow"].split(", ")
    if method != "HEAD":
        assert problem(response)["code"] == "METHOD_NOT_ALLOWED"


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/api",
        API,
        f"{API}/",
        f"{START}/",
        f"{START}/%00",
        f"{START}%00",
        f"{API}/%ff%fe",
        f"{API}/%ed%a0%bd",
        f"{HEARTBEAT}/heartbeat",
        f"{OPEN}/",
        f"{OPEN}//heartbeat",
        f"{OPEN}/{NIL}",
        f"{OPEN}/{NIL}/heartbeat/",
        f"{API}/../user-activity/sessions",
        "/" + "a" * 10_000,
        "/%2e%2e/etc/passwd",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_unknown_path_is_not_found_c32(path: str, method: str) -> None:
    response = send(Call(method, path, None))
    assert (response.status_code, problem(response)["code"]) == (404, "NOT_FOUND")


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


def test_strange_host_is_refused_as_a_problem() -> None:
    response = send(Call("POST", START, None), headers={"Host": "evil.example"})
    assert (response.status_code, problem(response)["code"]) == (400, "VALIDATION_FAILED")


# -- addresses, correlation ----------------------------------------------------------------


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


# -- PostgreSQL is away, or waits too long -------------------------------------------------


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
def test_invalid_request_is_told_so_even_while_postgresql_is_away(visit: Visit, name: str) -> None:
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


# -- whatever comes in ---------------------------------------------------------------------

HEADERS = [
    "User-Agent",
    "X-Anonymous-Id",
    "Accept",
    "Accept-Encoding",
    "Accept-Language",
    "Authorization",
    "Content-Encoding",
    "Cookie",
    "Host",
    "If-None-Match",
    "Origin",
    "Range",
    "Referer",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Http-Method-Override",
    "X-Request-Id",
    "traceparent",
    "tracestate",
    "baggage",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("name", ["start", "open"])
def test_no_header_whatever_makes_the_service_fail(visit: Visit, name: str, header: str) -> None:
    for text in STRANGE_TEXTS.values():
        if any(character > "\xff" for character in text):
            continue  # WSGI hands over headers as Latin-1: no such thing can arrive
        headers = {"X-Anonymous-Id": visit.anonymous_id, "User-Agent": USER_AGENT, header: text}
        anonymous_id, user_agent = headers.pop("X-Anonymous-Id"), headers.pop("User-Agent")
        assert_served_or_refused(
            send(
                visit.call(name), anonymous_id=anonymous_id, user_agent=user_agent, headers=headers
            )
        )


@pytest.mark.parametrize("name", ["heartbeat", "open"])
def test_no_body_whatever_makes_the_service_fail(visit: Visit, name: str) -> None:
    for raw in STRANGE_BODIES:
        assert_served_or_refused(send(visit.call(name), anonymous_id=visit.anonymous_id, raw=raw))


@pytest.mark.parametrize("name", ["start", "heartbeat", "open", "view heartbeat"])
def test_no_query_string_whatever_makes_the_service_fail(visit: Visit, name: str) -> None:
    call = visit.call(name)
    for query in ("format=xml", "format=%00", "page=-1&x[]=1", "%ff=%ff", "a" * 10_000):
        response = send(call._replace(path=f"{call.path}?{query}"), anonymous_id=visit.anonymous_id)
        assert response.status_code == 200


def test_duration_of_30_days_fits_everywhere_c22() -> None:
    session = make_session(silent=60 * MINUTE, lasted=timedelta(days=30))
    response = send(Call("POST", START, None), anonymous_id=str(session.anonymous_id))

    assert response.status_code == 201
    assert Session.objects.get(id=session.id).duration == timedelta(days=30)
    payload = json.loads(OutboxMessage.objects.get().payload)
    assert payload["DurationSeconds"] == 30 * 86_400


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


def test_fault_of_our_own_is_a_problem_without_its_text(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError(MARKER)

    monkeypatch.setattr("sessions.api.beat_session", fail)
    response = Client(raise_request_exception=False).post(
        HEARTBEAT,
        visit.call("heartbeat").body,
        "application/json",
        headers={"User-Agent": USER_AGENT, "X-Anonymous-Id": visit.anonymous_id},
    )

    assert (response.status_code, problem(response)["code"]) == (500, "INTERNAL_ERROR")
    assert MARKER not in response.content.decode()
