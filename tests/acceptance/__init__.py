"""Tests of the whole service against the specification."""

import pytest

# A failing assertion in these modules shows its values, as one in a test module does.
pytest.register_assert_rewrite("tests.acceptance.compared_calls", "tests.acceptance.stored_rows")
