"""What browsers need (design, section 13): CORS by an allow list, and beacons (C36)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from pinactivity.core.ids import new_id
from pinactivity.http.options import RateLimitOptions
from sessions.models import Session
from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    API,
    HEARTBEAT,
    LINK,
    OPEN,
    OWN_SESSIONS,
    START,
    assert_invalid,
    problem,
    view_heartbeat,
)
from tests.bad_input import BAD_IDS, BAD_JSON
from tests.concurrency import COMMITTED
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, make_view
from tests.outages import postgres_away
from tests.tokens import SECRET, bearer, development_token
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db

SITE = "https://pin.example"
CALLS = [
    ("POST", START),
    ("POST", HEARTBEAT),
    ("POST", LINK),
    ("POST", OPEN),
    ("PUT", view_heartbeat(new_id())),
    ("GET", OWN_SESSIONS),
]


@pytest.fixture(autouse=True)
def _allowed(settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = [SITE, "https://m.pin.example:8443"]


def ask_first(path: str, method: str, *, origin: str = SITE, headers: str = "") -> Any:
    """Send what a browser sends before a request that is not simple."""
    asked = {"Access-Control-Request-Headers": headers} if headers else {}
    return Client().options(
        path, headers={"Origin": origin, "Access-Control-Request-Method": method, **asked}
    )


def cors_headers(response: Any) -> dict[str, str]:
    return {
        name.lower(): value
        for name, value in response.headers.items()
        if name.lower().startswith("access-control-")
    }


def words(text: str) -> set[str]:
    return {word.strip().lower() for word in text.split(",")}


# -- CORS ----------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [SITE, "https://m.pin.example:8443"])
def test_allowed_origin_may_read_the_answer_and_retry_after_without_credentials(
    origin: str,
) -> None:
    response = Client().post(START, headers={"User-Agent": USER_AGENT, "Origin": origin})

    assert response.status_code == 201
    assert cors_headers(response) == {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": "Retry-After",
    }
    assert "origin" in words(response.headers["Vary"])


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://pin.example",
        "https://pin.example:8443",
        "https://pin.example.evil.example",
        "https://evilpin.example",
        "https://a.pin.example",
        "null",
        "*",
        "",
        "\x00",
        "https://[",
        "a" * 10_000,
    ],
)
def test_other_origin_may_read_nothing(origin: str) -> None:
    for response in (
        Client().post(START, headers={"User-Agent": USER_AGENT, "Origin": origin}),
        ask_first(START, "POST", origin=origin, headers="x-anonymous-id"),
    ):
        assert "access-control-allow-origin" not in cors_headers(response)
        assert "access-control-allow-credentials" not in cors_headers(response)


def test_no_origin_is_allowed_unless_named(settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = []
    assert cors_headers(ask_first(START, "POST")) == {}
    response = Client().post(START, headers={"User-Agent": USER_AGENT, "Origin": SITE})
    assert "access-control-allow-origin" not in cors_headers(response)


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_preflight_allows_the_methods_and_headers_of_the_api_before_any_sql(
    method: str, path: str, count_statements: Callable[[], Any]
) -> None:
    asked = "authorization,content-type,traceparent,x-anonymous-id"
    with count_statements() as statements:
        response = ask_first(path, method, headers=asked)

    assert response.status_code == 200
    found = cors_headers(response)
    assert found["access-control-allow-origin"] == SITE
    assert method.lower() in words(found["access-control-allow-methods"])
    assert words(found["access-control-allow-headers"]) == words(asked)
    assert int(found["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in found
    assert len(statements) == 0


def test_preflight_allows_nothing_else() -> None:
    found = cors_headers(ask_first(START, "DELETE", headers="cookie, x-csrftoken"))
    assert words(found["access-control-allow-methods"]) == {"get", "post", "put", "options"}
    assert not {"cookie", "x-csrftoken"} & words(found["access-control-allow-headers"])


@pytest.mark.parametrize("path", ["/admin/", "/admin/login/", "/health/ready", "/metrics", "/"])
def test_only_the_api_is_open_to_other_origins(path: str) -> None:
    assert "access-control-allow-origin" not in cors_headers(ask_first(path, "GET"))
    response = Client().get(path, headers={"Origin": SITE})
    assert "access-control-allow-origin" not in cors_headers(response)


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_page_may_read_a_problem_too(method: str, path: str) -> None:
    headers = {"Origin": SITE, "X-Anonymous-Id": "undefined"}
    response = Client().generic(method, path, headers=headers)
    assert problem(response)["status"] in {400, 401}
    assert cors_headers(response)["access-control-allow-origin"] == SITE


def test_page_may_read_that_a_path_is_unknown_or_a_method_wrong() -> None:
    for path, status in ((f"{API}/nothing", 404), (START, 405)):
        response = Client().get(path, headers={"Origin": SITE})
        assert response.status_code == status
        assert cors_headers(response)["access-control-allow-origin"] == SITE


def test_page_may_read_how_long_to_wait_after_429(settings: Any) -> None:
    settings.RATE_LIMITS = RateLimitOptions(heartbeats=1)
    session = make_session()
    headers = {
        "Origin": SITE,
        "User-Agent": USER_AGENT,
        "X-Anonymous-Id": str(session.anonymous_id),
    }

    def heartbeat() -> Any:
        body = {"SessionId": str(session.id)}
        return Client().post(HEARTBEAT, body, content_type="application/json", headers=headers)

    # Of three heartbeats at least two are in one minute.
    limited = [
        answer for answer in (heartbeat(), heartbeat(), heartbeat()) if answer.status_code == 429
    ]
    assert limited
    assert int(limited[0].headers["Retry-After"]) > 0
    assert "retry-after" in words(cors_headers(limited[0])["access-control-expose-headers"])
    assert cors_headers(limited[0])["access-control-allow-origin"] == SITE


@COMMITTED
def test_page_may_read_503_while_postgresql_is_away() -> None:
    with postgres_away():
        response = Client().post(START, headers={"User-Agent": USER_AGENT, "Origin": SITE})
    assert response.status_code == 503
    assert cors_headers(response)["access-control-allow-origin"] == SITE


def test_answers_set_no_cookie() -> None:
    headers = {"User-Agent": USER_AGENT, "Origin": SITE, "X-Anonymous-Id": str(new_id())}
    for method, path in CALLS:
        assert not Client().generic(method, path, headers=headers).cookies


# -- beacons -------------------------------------------------------------------------------

BEACON = "text/plain;charset=UTF-8"
"""What sendBeacon and fetch make of a string."""


def send(
    path: str,
    body: object,
    *,
    content_type: str = BEACON,
    anonymous_id: object = None,
    **headers: str,
) -> Any:
    """Send a beacon: no header that a page would have to set."""
    if anonymous_id is not None:
        headers["X-Anonymous-Id"] = str(anonymous_id)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Client().generic(
        "POST",
        path,
        raw,
        content_type=content_type,
        headers={"User-Agent": USER_AGENT, "Origin": SITE, **headers},
    )


def body_of(path: str, session: Session, **fields: object) -> dict[str, object]:
    """A body that succeeds; fields change it, and None takes one out."""
    body: dict[str, object] = {
        "SessionId": str(session.id),
        "AnonymousId": str(session.anonymous_id),
    }
    if path == OPEN:
        body |= {"PropertyObjectId": str(new_id()), "ViewSource": "Map"}
    return {name: value for name, value in (body | fields).items() if value is not None}


@pytest.mark.parametrize("content_type", [BEACON, "text/plain", "TEXT/PLAIN ; charset=utf-8"])
def test_beacon_is_a_heartbeat_of_the_device_that_its_body_names_c36(
    content_type: str,
) -> None:
    session = make_session(silent=3 * MINUTE)

    response = send(HEARTBEAT, body_of(HEARTBEAT, session), content_type=content_type)

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {"SessionId": str(session.id), "Restarted": False}
    assert cors_headers(response)["access-control-allow-origin"] == SITE
    assert Session.objects.get().last_activity_at > session.last_activity_at


def test_beacon_opens_a_view_of_the_device_that_its_body_names_c36() -> None:
    session = make_session()
    snapshot = {"Цена": {"Max": 12.5}, "Rooms": [1, 2]}

    response = send(OPEN, body_of(OPEN, session, FilterSnapshot=snapshot))

    view = PropertyObjectView.objects.get()
    assert response.status_code == 201
    assert response.json() == {
        "PropertyObjectViewId": str(view.id),
        "SessionId": str(session.id),
        "IsNew": True,
        "Restarted": False,
    }
    assert view.filter_snapshot == snapshot


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_text_with_the_header_is_the_same_as_json_c36(path: str) -> None:
    session = make_session()
    body = body_of(path, session, AnonymousId=None)
    answers = [
        send(path, body, content_type=content_type, anonymous_id=session.anonymous_id)
        for content_type in ("application/json", BEACON)
    ]
    assert [answer.json()["SessionId"] for answer in answers] == [str(session.id)] * 2


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_header_counts_where_a_beacon_has_both(path: str) -> None:
    session, other = make_session(silent=3 * MINUTE), make_session(silent=3 * MINUTE)
    response = send(
        path,
        body_of(path, session, AnonymousId=str(other.anonymous_id)),
        anonymous_id=session.anonymous_id,
    )
    assert response.json()["SessionId"] == str(session.id)
    assert Session.objects.get(id=other.id).last_activity_at == other.last_activity_at


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_bad_header_is_not_mended_by_a_good_body(path: str) -> None:
    session = make_session()
    response = send(path, body_of(path, session), anonymous_id="undefined")
    assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)


@pytest.mark.parametrize(
    "bad",
    [None, 12, True, [], {}, *BAD_IDS.values()],
    ids=["absent", "a number", "true", "a list", "an object", *BAD_IDS.keys()],
)
@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_beacon_needs_a_device_id_before_any_sql_c30(
    path: str, bad: object, count_statements: Callable[[], Any]
) -> None:
    body = body_of(path, make_session(), AnonymousId=bad)
    with count_statements() as statements:
        response = send(path, body)
    if isinstance(bad, str) and (len(bad) > 60_000 or "\x00" in bad):
        assert response.status_code in {400, 413}  # the body itself is refused
    else:
        assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)
    assert len(statements) == 0


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_json_may_not_name_the_device_in_its_body(path: str) -> None:
    """Only a beacon has no header: everything else has one place for the id."""
    response = send(path, body_of(path, make_session()), content_type="application/json")
    assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)


def test_start_takes_no_device_id_from_a_body() -> None:
    """A start answers an id, and nobody reads the answer to a beacon."""
    session = make_session()
    response = send(START, {"AnonymousId": str(session.anonymous_id)})
    assert response.status_code == 201
    assert response.json()["AnonymousId"] != str(session.anonymous_id)


def test_view_heartbeat_takes_no_device_id_from_a_body() -> None:
    view = make_view()
    for raw in (f'{{"AnonymousId": "{view.session.anonymous_id}"}}', "{", "x" * 100_000):
        response = Client().generic(
            "PUT", view_heartbeat(view.id), raw.encode(), content_type="text/plain"
        )
        assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)


@pytest.mark.parametrize("raw", BAD_JSON.values(), ids=BAD_JSON.keys())
@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
@pytest.mark.parametrize("with_header", [True, False])
def test_beacon_that_is_not_strict_json_is_invalid_before_any_sql(
    path: str, raw: bytes, with_header: bool, count_statements: Callable[[], Any]
) -> None:
    anonymous_id = make_session().anonymous_id if with_header else None
    with count_statements() as statements:
        response = send(path, raw, anonymous_id=anonymous_id)
    assert response.status_code == 400
    assert problem(response)["errors"].keys() <= {"body", "X-Anonymous-Id"}
    assert len(statements) == 0


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
@pytest.mark.parametrize("with_header", [True, False])
def test_oversized_beacon_is_too_large(path: str, with_header: bool) -> None:
    session = make_session()
    body = body_of(path, session, Filling="x" * 64 * 1024)
    response = send(path, body, anonymous_id=session.anonymous_id if with_header else None)
    assert (response.status_code, problem(response)["code"]) == (413, "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize("content_type", ["text/html", "text/plain2", "text", "text/plain/x"])
def test_other_texts_are_no_beacons(content_type: str) -> None:
    session = make_session()
    body = body_of(HEARTBEAT, session)
    response = send(HEARTBEAT, body, content_type=content_type, anonymous_id=session.anonymous_id)
    assert (response.status_code, problem(response)["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


def test_last_beacon_of_a_page_counts_against_the_limit_of_its_device(settings: Any) -> None:
    settings.RATE_LIMITS = RateLimitOptions(heartbeats=1)
    session = make_session()
    body = body_of(HEARTBEAT, session)
    assert 429 in [send(HEARTBEAT, body).status_code for _ in range(3)]


@pytest.mark.parametrize("path", [HEARTBEAT, OPEN])
def test_beacon_on_a_session_that_is_gone_restarts_with_the_token_it_came_with(
    settings: Any, path: str
) -> None:
    """fetch with keepalive may send a token; sendBeacon cannot, and is a guest's."""
    settings.JWT_DEVELOPMENT_SECRET = SECRET
    user_id, device = new_id(), new_id()
    body = body_of(path, make_session(), AnonymousId=str(device))

    response = send(path, body, **bearer(development_token(user_id)))

    assert response.json()["Restarted"] is True
    row = Session.objects.get(anonymous_id=device)
    assert (row.user_id, str(row.id)) == (user_id, response.json()["SessionId"])


def test_beacon_from_an_origin_that_is_not_allowed_is_served_and_not_readable() -> None:
    """It needs the device's own id, carries no cookie, and a browser asks nobody first."""
    session = make_session()
    response = send(HEARTBEAT, body_of(HEARTBEAT, session), Origin="https://evil.example")
    assert response.status_code == 200
    assert "access-control-allow-origin" not in cors_headers(response)


@COMMITTED
def test_beacon_leaves_no_open_transaction_when_its_body_is_bad() -> None:
    send(OPEN, b"{")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id_if_assigned()")
        assert cursor.fetchone() == (None,)
