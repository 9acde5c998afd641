"""Fixtures of tests that use the database."""

from typing import Any

import pytest

from tests.api import Visit
from tests.factories import MINUTE, make_session, make_view
from tests.tokens import SECRET


@pytest.fixture
def visit() -> Visit:
    """An Active session and its Active view, silent for three minutes."""
    view = make_view(session=make_session(silent=3 * MINUTE))
    return Visit(view.session, view)


@pytest.fixture
def secret(settings: Any) -> None:
    """Development: tokens are signed with the secret of the tests."""
    settings.JWT_DEVELOPMENT_SECRET = SECRET
