"""Request bodies: fields, strict JSON, size, media type."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    NIL,
    Visit,
    assert_invalid,
    problem,
    send,
)
from tests.bad_input import BAD_JSON

pytestmark = pytest.mark.django_db


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
