"""Durations as people say them."""

import pytest

from pinactivity.core.times import say_duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.5, "1 min"),
        (60, "1 min"),
        (260, "4 min 20 s"),
        (3_599.9, "1 h"),
        (3_601, "1 h"),
        (3_660, "1 h 1 min"),
        (86_399, "23 h 59 min"),
        (90_000, "1 d 1 h"),
        (2_592_000, "30 d"),
    ],
)
def test_duration_is_said_by_its_two_greatest_units(seconds: float, said: str) -> None:
    assert say_duration(seconds) == said
