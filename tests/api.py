"""The API as tests call it: paths, calls on a visit, and what an answer must look like."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from django.http import HttpResponseBase
from django.test import Client

from sessions.models import Session
from tests.conftest import USER_AGENT
from views.models import PropertyObjectView

API = "/api/user-activity"
START = f"{API}/sessions"
HEARTBEAT = f"{API}/sessions/heartbeat"
LINK = f"{API}/sessions/link"
OPEN = f"{API}/property-object-views"
OWN_SESSIONS = f"{API}/me/sessions"
OWN_VIEWS = f"{API}/me/property-object-views"

ANONYMOUS_ID_REQUIRED = "USER_ACTIVITY_ANONYMOUS_ID_REQUIRED"
MARKER = "do-not-quote-me"
"""A value that no answer and no log may repeat."""
NIL = str(UUID(int=0))


def view_heartbeat(view_id: object) -> str:
    return f"{OPEN}/{view_id}/heartbeat"


class Call(NamedTuple):
    """A call that would succeed on the Active session and view of `visit`."""

    method: str
    path: str
    body: dict[str, Any] | None


class Visit(NamedTuple):
    session: Session
    view: PropertyObjectView

    @property
    def anonymous_id(self) -> str:
        return str(self.session.anonymous_id)

    def call(self, name: str) -> Call:
        session_id = str(self.session.id)
        return {
            "start": Call("POST", START, None),
            "heartbeat": Call("POST", HEARTBEAT, {"SessionId": session_id}),
            "open": Call(
                "POST",
                OPEN,
                {
                    "SessionId": session_id,
                    "PropertyObjectId": str(self.view.property_object_id),
                    "ViewSource": "Catalog",
                },
            ),
            "view heartbeat": Call("PUT", view_heartbeat(self.view.id), None),
        }[name]


def send(
    call: Call,
    *,
    anonymous_id: str | None = None,
    user_agent: str | None = USER_AGENT,
    raw: bytes | None = None,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    address: str = "127.0.0.1",
) -> Any:
    """Send a call from an address; `raw` replaces its body."""
    given = {"User-Agent": user_agent, "X-Anonymous-Id": anonymous_id, **(headers or {})}
    body = raw if raw is not None else b"" if call.body is None else json.dumps(call.body).encode()
    return Client(REMOTE_ADDR=address).generic(
        call.method,
        call.path,
        body,
        content_type=content_type,
        headers={name: value for name, value in given.items() if value is not None},
    )


def problem(response: HttpResponseBase) -> dict[str, Any]:
    """Read a problem, holding it to RFC 9457 and to the names that it may have."""
    assert response.headers["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = json.loads(response.content)  # type: ignore[attr-defined]  # not streaming
    assert body.keys() <= {"type", "title", "status", "detail", "code", "errors"}
    assert body["type"] == "about:blank"
    assert body["title"]
    assert body["status"] == response.status_code
    return body


def assert_invalid(response: Any, *named: str, code: str = "VALIDATION_FAILED") -> None:
    """Hold an answer to 400 with exactly these headers or fields named, each with reasons."""
    body = problem(response)
    assert (response.status_code, body["code"]) == (400, code)
    assert set(body["errors"]) == set(named)
    assert all(reasons and all(reasons) for reasons in body["errors"].values())


def assert_unavailable(response: Any) -> None:
    body = problem(response)
    assert (response.status_code, body["code"]) == (503, "USER_ACTIVITY_STORAGE_UNAVAILABLE")
    assert "errors" not in body
    assert int(response.headers["Retry-After"]) > 0


def assert_served_or_refused(response: Any) -> None:
    """Hold an answer to a success in JSON, or a problem that is the client's."""
    if response.status_code in {200, 201}:
        assert response.headers["Content-Type"] == "application/json"
    else:
        assert 400 <= response.status_code < 500
        assert problem(response)["code"]
