"""The committed schema against the service: thousands of generated calls on the real database.

Schemathesis makes calls out of `docs/openapi.yaml`, valid ones and broken ones, and holds each
answer to what the schema promises. The same calls in every run.
"""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
import schemathesis
import yaml
from clickhouse_connect.driver.client import Client as ClickHouse
from django.conf import settings as django_settings
from django.core.wsgi import get_wsgi_application
from django.urls import URLResolver, get_resolver
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    missing_required_header,
    negative_data_rejection,
    positive_data_acceptance,
)

from devstats.writer import FactWriter
from pinactivity.core.ids import new_id
from pinactivity.http.options import RateLimitOptions
from pinactivity.http.problems import PROBLEMS
from sessions.models import Session
from tests.dev_stats_api import MARCH
from tests.factories import make_session, make_view
from tests.facts import session_fact, store, view_fact
from tests.tokens import SECRET, bearer, development_token
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db(transaction=True)

USER, DEVELOPER = UUID(int=0xA), UUID(int=0xD)
LEAST_CALLS = 112
"""Of an operation with a kind of token: 18 of them make more than 2,000."""
DEV_STATS = "/api/dev-stats/"

COMMITTED = django_settings.BASE_DIR / "docs" / "openapi.yaml"
SCHEMA = schemathesis.openapi.from_path(COMMITTED, config=schemathesis.Config(seed=20260301))
SCHEMA.app = get_wsgi_application()
SCHEMA.config.generation.update(with_security_parameters=False)  # tokens are given below
OPERATIONS: dict[str, APIOperation[Any, Any, Any, Any]] = {
    SCHEMA[path][method].definition.raw["operationId"]: SCHEMA[path][method]
    for path in SCHEMA
    for method in SCHEMA[path]
}

OF_DEV_STATS = {
    name: operation
    for name, operation in OPERATIONS.items()
    if operation.path.startswith(DEV_STATS)
}

generated = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # a failure is told as it was met
    suppress_health_check=list(HealthCheck),
)

TOKENS: dict[str, Callable[[], dict[str, str]]] = {
    "no token": dict,
    "a valid token": lambda: bearer(development_token(USER, developer_id=str(DEVELOPER))),
    "a token that is not valid": lambda: bearer(development_token(USER, aud="favorites")),
}


@pytest.fixture(autouse=True)
def _without_limits(settings: Any, clickhouse: ClickHouse) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET
    settings.RATE_LIMITS = RateLimitOptions(
        start_per_address=0, per_anonymous_id=0, per_address=0, heartbeats=0
    )


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """Collect the statuses of the answers; there must be enough of them."""
    statuses: list[int] = []
    yield statuses
    assert len(statuses) >= LEAST_CALLS


def not_meant(case: Case[Any], response: schemathesis.Response) -> list[Any]:
    """Return the checks that a case does not fall under, for what a schema cannot say."""
    excluded: list[Any] = []
    if response.status_code == 400 and response.json().get("errors", {}).keys() <= {
        "Cursor",  # one that we did not write
        "From",  # one that is not before To
        "body",  # strict JSON: its numbers, its strings, its depth
        "FilterSnapshot",  # its size
        *(("To",) if case.path.startswith(DEV_STATS) else ()),  # one that is too late
    }:
        excluded.append(positive_data_acceptance)
    if case.media_type == "text/plain" and "AnonymousId" in (
        case.body if isinstance(case.body, dict) else ()
    ):
        excluded += [missing_required_header, negative_data_rejection]  # it needs no header then
    return excluded


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS.keys())
@SCHEMA.parametrize()
@generated
def test_every_answer_is_as_the_schema_says(
    case: Case[Any], token: Callable[[], dict[str, str]], calls: list[int]
) -> None:
    headers = token()
    response = case.call(headers=headers)
    calls.append(response.status_code)
    # All checks of schemathesis: no server error; status, media type, headers and body as
    # documented; what is valid is accepted, what is not is refused; the token is required where
    # it is said so; other methods are refused.
    case.validate_response(response, headers=headers, excluded_checks=not_meant(case, response))


def known_device(case: Case[Any], view: PropertyObjectView) -> None:
    """Make a generated call one of a device that has a session and a view."""
    case.headers["X-Anonymous-Id"] = str(view.session.anonymous_id)
    if "view_id" in case.path_parameters:
        case.path_parameters["view_id"] = str(view.id)
    if isinstance(case.body, dict):
        case.body["SessionId"] = str(view.session_id)
        case.body.pop("AnonymousId", None)


@pytest.mark.parametrize("name", sorted(OF_DEV_STATS))
@pytest.mark.parametrize(
    ("claims", "accepted"),
    [({"developer_id": str(DEVELOPER)}, {200, 400, 403}), ({}, {403})],
    ids=["a developer", "nobody's"],
)
def test_developer_reads_his_own_whatever_is_asked(
    name: str, claims: dict[str, Any], accepted: set[int], pytestconfig: pytest.Config
) -> None:
    """Days that there are, and any other; their own id, anybody's and none."""
    store_visits(DEVELOPER, viewers=3)
    store_visits(UUID(int=0xE), viewers=90)
    headers = bearer(development_token(USER, **claims))
    is_long = pytestconfig.getoption("--dev-stats-scale") == "full"
    statuses: set[int] = set()
    counts: set[int] = set()

    @settings(generated, max_examples=2000 if is_long else 150)
    @given(
        st.one_of(
            *(OF_DEV_STATS[name].as_strategy(generation_mode=mode) for mode in GenerationMode)
        ),
        st.sampled_from([{}, MARCH, {"From": "2026-03-01"}]),
        st.sampled_from([{}, {"DeveloperId": str(DEVELOPER)}]),
    )
    def call(case: Case[Any], period: dict[str, str], named: dict[str, str]) -> None:
        case.query = {**case.query, **period, **named}
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        if response.status_code == 200:
            answer = response.json()
            for item in answer.get("Items", [answer.get("Total")]):
                counts.add(item.get("Views", item.get("Sessions")))
        # What was generated to be refused may have become sound.
        case.validate_response(
            response,
            headers=headers,
            excluded_checks=[positive_data_acceptance, negative_data_rejection],
        )

    call()

    assert accepted <= statuses <= accepted | {405}
    assert max(counts, default=0) == (3 if claims else 0)


def store_visits(developer: UUID, *, viewers: int) -> None:
    """Store guests' sessions of March 1st, each with a view of one object of a developer."""
    writer = FactWriter()
    sessions = [session_fact() for _ in range(viewers)]
    views = [
        view_fact(session, developer_id=developer, property_object_id=developer)
        for session in sessions
    ]
    store(writer, *sessions, *views)
    writer.close()


@pytest.mark.parametrize(
    "name", sorted(OPERATIONS.keys() - {"list_own_sessions"} - OF_DEV_STATS.keys())
)
def test_valid_call_of_a_known_device_succeeds_and_restarts_nothing(name: str) -> None:
    operation = OPERATIONS[name]
    view = make_view(session=make_session(user_id=USER))
    statuses: set[int] = set()

    @settings(generated, max_examples=30)
    @given(operation.as_strategy())
    def call(case: Case[Any]) -> None:
        known_device(case, view)
        headers = bearer(development_token(USER))
        response = case.call(headers=headers)
        excluded = not_meant(case, response)
        if positive_data_acceptance not in excluded:
            statuses.add(response.status_code)
            answer = response.json()
            assert answer.get("Restarted", False) is False
            assert answer.get("Accepted", True) is True
            assert answer.get("SessionId", str(view.session_id)) == str(view.session_id)
        case.validate_response(response, headers=headers, excluded_checks=excluded)

    call()

    assert statuses <= {200, 201}
    assert Session.objects.get().status == "Active"


def test_pages_of_own_sessions_are_as_the_schema_says_with_and_without_an_end() -> None:
    for number in range(7):
        make_session(user_id=USER, device_type="Unknown" if number else "Bot", browser="")
    operation = OPERATIONS["list_own_sessions"]
    headers = bearer(development_token(USER))
    cursor = None
    items: list[dict[str, Any]] = []
    while cursor is not None or not items:
        query = {"Limit": 2} if cursor is None else {"Limit": 2, "Cursor": cursor}
        case = operation.Case(query=query)
        response = case.call(headers=headers)
        case.validate_response(response, headers=headers)
        items += response.json()["Items"]
        cursor = response.json()["NextCursor"]
    assert len(items) == 7


def test_schema_has_every_path_of_the_api_and_no_other() -> None:
    served = {
        f"/{prefix.pattern}{route.pattern}".replace("<str:", "{").replace(">", "}")
        for prefix in get_resolver().url_patterns
        if isinstance(prefix, URLResolver)
        and str(prefix.pattern) in {"api/user-activity/", DEV_STATS.removeprefix("/")}
        for route in prefix.url_patterns
    }
    assert served == set(SCHEMA)


def test_schema_is_served_as_it_is_committed(client: Any) -> None:
    served = client.get("/api/schema")
    assert served.status_code == 200
    assert yaml.safe_load(served.content) == yaml.safe_load(COMMITTED.read_text())


def test_codes_of_problems_are_documented_by_status() -> None:
    """A description lists the codes; a code stands under the status that it is answered with."""
    for operation in OPERATIONS.values():
        for status, answer in operation.definition.raw["responses"].items():
            if status.startswith("2"):
                continue
            codes = answer["description"].split(" · ")
            assert {PROBLEMS[code].status for code in codes} == {int(status)}
            assert "Retry-After" in answer.get("headers", {}) or int(status) not in {409, 429, 503}


def test_unknown_device_is_in_no_operation_an_error_but_for_link() -> None:
    for name, operation in OPERATIONS.items():
        if name in OF_DEV_STATS:
            continue
        body: dict[str, Any] = {
            "SessionId": str(new_id()),
            "PropertyObjectId": str(new_id()),
            "ViewSource": "Map",
        }
        has_body = "requestBody" in operation.definition.raw
        case = operation.Case(
            headers={"X-Anonymous-Id": str(new_id())},
            path_parameters={"view_id": str(new_id()), "property_object_id": str(new_id())},
            body=body if has_body else schemathesis.core.NOT_SET,
            media_type="application/json" if has_body else None,
        )
        response = case.call(headers=bearer(development_token(USER)))
        assert response.status_code in ({404} if name == "link_session" else {200, 201})
