"""Calls of the API of dev-stats, as a developer's own client makes them."""

from typing import Any

import pytest
from django.test import Client

from pinactivity.core.ids import new_id
from tests.api import problem
from tests.facts import OWNER
from tests.tokens import bearer, development_token

SESSIONS = "/api/dev-stats/sessions/summary"
OBJECTS = "/api/dev-stats/property-objects/summary"
BOTH = pytest.mark.parametrize("path", [SESSIONS, OBJECTS])
MARCH = {"From": "2026-03-01", "To": "2026-04-01"}


def get(path: str, developer: object = OWNER, **query: Any) -> Any:
    claim = developer if developer is None or isinstance(developer, list) else str(developer)
    token = development_token(new_id(), developer_id=claim)
    return Client().get(path, query, headers=bearer(token))


def read(path: str, developer: object = OWNER, **query: Any) -> dict[str, Any]:
    response = get(path, developer, **(query or MARCH))
    assert response.status_code == 200, response.content
    body: dict[str, Any] = response.json()
    return body


def refused(response: Any, status: int, code: str) -> None:
    body = problem(response)
    assert (response.status_code, body["code"]) == (status, code)
