"""Linking over HTTP, and sessions that start linked (design, section 5; A3, A5)."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client
from prometheus_client import REGISTRY

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from sessions.models import Session
from tests.api import (
    ANONYMOUS_ID_REQUIRED,
    HEARTBEAT,
    LINK,
    OPEN,
    START,
    assert_invalid,
    assert_unavailable,
    problem,
)
from tests.bad_input import BAD_IDS
from tests.concurrency import COMMITTED, locked, run_together
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, make_view, silent_session
from tests.outages import postgres_away
from tests.tokens import SECRET, bearer, development_token
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db

A, B = UUID(int=0xA), UUID(int=0xB)
LINKED = "pin.user-activity.session-linked.v1"


@pytest.fixture(autouse=True)
def _development_secret(settings: Any) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET


def link(
    anonymous_id: object = None, user_id: UUID | None = None, *, token: str | None = None
) -> Any:
    """Link a device to a user, or by a token; None leaves a header out."""
    headers = {"User-Agent": USER_AGENT}
    if anonymous_id is not None:
        headers["X-Anonymous-Id"] = str(anonymous_id)
    if user_id is not None:
        token = development_token(user_id)
    if token is not None:
        headers |= bearer(token)
    return Client().post(LINK, headers=headers)


def topics() -> list[str]:
    return list(OutboxMessage.objects.order_by("id").values_list("topic", flat=True))


def sign_ins(outcome: str) -> float:
    labels = {"source": "api", "outcome": outcome}
    return REGISTRY.get_sample_value("activity_sign_ins_total", labels) or 0.0


# -- outcomes ------------------------------------------------------------------------------


def test_first_link_answers_linked_and_the_same_session() -> None:
    session = silent_session(minutes=3)
    before = sign_ins("Linked")

    response = link(session.anonymous_id, A)

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {"Outcome": "Linked", "SessionId": str(session.id)}
    row = Session.objects.get()
    assert (row.user_id, row.version) == (A, 2)
    assert row.last_activity_at > session.last_activity_at
    assert topics() == [LINKED]
    assert sign_ins("Linked") == before + 1


def test_second_link_answers_already_linked_without_an_event_ac3() -> None:
    session = make_session()
    link(session.anonymous_id, A)
    before = Session.objects.values("version", "linked_at", "last_activity_at").get()

    response = link(session.anonymous_id, A)

    assert response.json() == {"Outcome": "AlreadyLinked", "SessionId": str(session.id)}
    assert Session.objects.values("version", "linked_at", "last_activity_at").get() == before
    assert topics() == [LINKED]


def test_link_of_another_user_answers_switched_and_the_new_session_ac4_a3() -> None:
    session = make_session(user_id=A)
    view = make_view(session=session)

    response = link(session.anonymous_id, B)

    new = Session.objects.get(status="Active")
    assert response.json() == {"Outcome": "Switched", "SessionId": str(new.id)}
    assert (new.user_id, new.anonymous_id) == (B, session.anonymous_id)
    old = Session.objects.get(id=session.id)
    assert (old.status, old.close_reason, old.duration) == ("Inactive", "Switched", 5 * MINUTE)
    assert PropertyObjectView.objects.get(id=view.id).close_reason == "Switched"


@pytest.mark.parametrize("spelling", ["{}", "{{{}}}", "urn:uuid:{}"])
def test_other_spelling_of_the_device_links_the_same_session_c31(spelling: str) -> None:
    session = make_session()
    response = link(spelling.format(str(session.anonymous_id).upper()), A)
    assert response.json() == {"Outcome": "Linked", "SessionId": str(session.id)}


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"AnonymousId": 1}', b"x" * 100_000])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "x/y", ""])
def test_link_reads_no_body(raw: bytes, content_type: str) -> None:
    session = make_session()
    response = Client().generic(
        "POST",
        LINK,
        raw,
        content_type=content_type,
        headers={"X-Anonymous-Id": str(session.anonymous_id), **bearer(development_token(A))},
    )
    assert response.status_code == 200


def test_link_needs_no_user_agent() -> None:
    headers = {"X-Anonymous-Id": str(make_session().anonymous_id), **bearer(development_token(A))}
    assert Client().post(LINK, headers=headers).status_code == 200


@COMMITTED
def test_30_parallel_links_over_http_link_once_c13() -> None:
    session = make_session()
    answers = run_together([lambda: link(session.anonymous_id, A).json()] * 30)
    assert {answer["SessionId"] for answer in answers} == {str(session.id)}
    outcomes = [answer["Outcome"] for answer in answers]
    assert (outcomes.count("Linked"), outcomes.count("AlreadyLinked")) == (1, 29)
    assert topics() == [LINKED]


# -- refusals: 401, then 400, then 404 -----------------------------------------------------


@pytest.mark.parametrize("token", [None, "a.b.c"], ids=["none", "not valid"])
@pytest.mark.parametrize("anonymous_id", [None, "undefined", new_id()])
def test_token_comes_before_everything_else(
    token: str | None, anonymous_id: object, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = link(anonymous_id, token=token)
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHORIZED")
    assert len(statements) == 0


@pytest.mark.parametrize("bad", [None, *BAD_IDS.values()], ids=["absent", *BAD_IDS.keys()])
def test_device_id_comes_before_the_session_c30(
    bad: str | None, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = link(bad, A)
    assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)
    assert len(statements) == 0


def test_link_takes_no_device_id_from_a_body(count_statements: Callable[[], Any]) -> None:
    """A beacon cannot send a token, so a call that links always can set headers."""
    for raw in (f'{{"AnonymousId": "{make_session().anonymous_id}"}}', "{", "x" * 100_000):
        response = Client().generic(
            "POST",
            LINK,
            raw.encode(),
            content_type="text/plain",
            headers=bearer(development_token(A)),
        )
        assert_invalid(response, "X-Anonymous-Id", code=ANONYMOUS_ID_REQUIRED)


def test_device_that_was_never_seen_has_no_session_to_link() -> None:
    response = link(new_id(), A)
    code = problem(response)["code"]
    assert (response.status_code, code) == (404, "USER_ACTIVITY_SESSION_NOT_FOUND")
    assert not Session.objects.exists()


def test_abandoned_session_is_closed_and_not_found_c5() -> None:
    session = silent_session(minutes=180, views=1)
    response = link(session.anonymous_id, A)
    code = problem(response)["code"]
    assert (response.status_code, code) == (404, "USER_ACTIVITY_SESSION_NOT_FOUND")
    row = Session.objects.get()
    assert (row.status, row.close_reason, row.user_id) == ("Inactive", "Abandoned", None)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
def test_wrong_method_is_refused_with_the_right_one(method: str) -> None:
    response = Client().generic(method, LINK)
    assert response.status_code == 405
    assert response.headers["Allow"].split(", ") == ["POST", "OPTIONS"]


@COMMITTED
def test_link_answers_503_while_postgresql_is_away_and_then_works_again() -> None:
    session = make_session()
    with postgres_away():
        away = link(session.anonymous_id, A)
        unauthorized = link(session.anonymous_id)
    assert_unavailable(away)
    assert unauthorized.status_code == 401
    assert link(session.anonymous_id, A).json()["Outcome"] == "Linked"


@COMMITTED
def test_link_that_waits_too_long_for_the_session_answers_503() -> None:
    session = make_session()
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
    try:
        with locked("SELECT FROM sessions WHERE id = %s FOR UPDATE", session.id):
            waited = link(session.anonymous_id, A)
    finally:
        connection.close()
    assert_unavailable(waited)
    assert link(session.anonymous_id, A).json()["Outcome"] == "Linked"


# -- sessions that start linked ------------------------------------------------------------


def call(name: str, token: str | None, anonymous_id: UUID | None = None) -> Any:
    """Start, send a heartbeat or open a view as a device without an Active session."""
    headers = {"User-Agent": USER_AGENT, "X-Anonymous-Id": str(anonymous_id or new_id())}
    if token is not None:
        headers |= bearer(token)
    path, body = {
        "start": (START, None),
        "heartbeat": (HEARTBEAT, {"SessionId": str(new_id())}),
        "open": (
            OPEN,
            {
                "SessionId": str(new_id()),
                "PropertyObjectId": str(new_id()),
                "ViewSource": "Map",
            },
        ),
    }[name]
    return Client().post(path, body, content_type="application/json", headers=headers)


@pytest.mark.parametrize("name", ["start", "heartbeat", "open"])
def test_session_that_begins_with_a_token_is_born_linked_without_an_event_a5(name: str) -> None:
    assert call(name, development_token(A)).status_code in {200, 201}
    row = Session.objects.get()
    assert row.user_id == A
    assert row.linked_at == row.signed_in_at == row.created_at
    assert row.version == 1
    assert topics() == []
    assert all(view.user_id == A for view in PropertyObjectView.objects.all())


@pytest.mark.parametrize("name", ["start", "heartbeat", "open"])
@pytest.mark.parametrize(
    "token",
    [None, "a.b.c", lambda: development_token(A, exp=1), lambda: development_token("nobody")],
    ids=["none", "malformed", "expired", "of nobody"],
)
def test_session_that_begins_without_a_valid_token_is_a_guests(
    name: str, token: str | Callable[[], str] | None
) -> None:
    assert call(name, token() if callable(token) else token).status_code in {200, 201}
    row = Session.objects.get()
    assert (row.user_id, row.linked_at, row.signed_in_at) == (None, None, None)


@pytest.mark.parametrize("name", ["start", "heartbeat", "open"])
@pytest.mark.parametrize("owner", [None, A], ids=["a guest's", "another user's"])
def test_restoring_a_session_never_changes_its_user(name: str, owner: UUID | None) -> None:
    session = make_session(user_id=owner)
    response = call(name, development_token(B), session.anonymous_id)
    assert response.json()["SessionId"] == str(session.id)
    row = Session.objects.get()
    assert (row.user_id, row.version) == (owner, 1)
    assert topics() == []


def test_link_after_a_born_linked_start_answers_already_linked() -> None:
    anonymous_id = new_id()
    call("start", development_token(A), anonymous_id)
    assert link(anonymous_id, A).json()["Outcome"] == "AlreadyLinked"
    assert link(anonymous_id, B).json()["Outcome"] == "Switched"
