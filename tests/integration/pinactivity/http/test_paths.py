"""Methods, paths and hosts."""

import pytest

from tests.api import (
    API,
    HEARTBEAT,
    NIL,
    OPEN,
    START,
    Call,
    problem,
    send,
    view_heartbeat,
)

pytestmark = pytest.mark.django_db


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
def test_wrong_method_is_answered_with_the_right_one(path: str, allowed: str, method: str) -> None:
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


def test_strange_host_is_refused_as_a_problem() -> None:
    response = send(Call("POST", START, None), headers={"Host": "evil.example"})
    assert (response.status_code, problem(response)["code"]) == (400, "VALIDATION_FAILED")
