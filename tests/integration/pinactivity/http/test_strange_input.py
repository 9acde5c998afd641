"""No input, however strange, makes the service fail."""

import pytest

from tests.api import (
    Visit,
    assert_served_or_refused,
    send,
)
from tests.bad_input import STRANGE_BODIES, STRANGE_TEXTS
from tests.conftest import USER_AGENT

pytestmark = pytest.mark.django_db


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
