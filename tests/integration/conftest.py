"""Fixtures of tests that use the database."""

import pytest

from tests.api import Visit
from tests.factories import MINUTE, make_session, make_view


@pytest.fixture
def visit() -> Visit:
    """An Active session and its Active view, silent for three minutes."""
    view = make_view(session=make_session(silent=3 * MINUTE))
    return Visit(view.session, view)
