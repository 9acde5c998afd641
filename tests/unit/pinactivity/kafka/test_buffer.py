"""The buffer of the consumers' loop: when it is ready, and what it lets go."""

from datetime import timedelta
from typing import Any

import pytest

from pinactivity.core.errors import InvalidOptions
from pinactivity.kafka.buffer import Batch, BatchLimits
from pinactivity.kafka.options import ConsumerOptions
from tests.consuming import Clock


def make_batch(clock: Clock, *, rows: int = 3, age: float = 5) -> Batch[str]:
    return Batch(BatchLimits(rows=rows, age=timedelta(seconds=age)), clock=clock)


def test_empty_batch_is_never_ready() -> None:
    clock = Clock()
    batch = make_batch(clock, age=0)
    clock.now += 3600
    assert batch.is_empty
    assert not batch.is_ready


def test_full_batch_is_ready() -> None:
    batch = make_batch(Clock())
    batch.append("a")
    batch.append("b")
    assert (batch.room, batch.is_ready) == (1, False)
    batch.append("c")
    assert (batch.room, batch.is_ready) == (0, True)


def test_batch_is_ready_when_its_first_item_is_old_enough() -> None:
    clock = Clock()
    batch = make_batch(clock)
    clock.now += 100
    batch.append("a")
    clock.now += 4
    batch.append("b")
    assert batch.seconds_left == 1
    assert not batch.is_ready
    clock.now += 1
    assert batch.is_ready


def test_age_starts_anew_after_a_flush() -> None:
    clock = Clock()
    batch = make_batch(clock)
    batch.append("a")
    clock.now += 5
    batch.clear()
    batch.append("b")
    assert not batch.is_ready


def test_keep_and_truncate_drop_the_rest_in_order() -> None:
    batch = make_batch(Clock(), rows=10)
    for letter in "abcdef":
        batch.append(letter)
    assert batch.keep(lambda letter: letter not in "bd") == 2
    assert list(batch) == ["a", "c", "e", "f"]
    batch.truncate(1)
    assert (list(batch), len(batch)) == (["a"], 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rows": 0}, "rows"),
        ({"age": timedelta(seconds=-1)}, "age"),
        ({"age": timedelta(minutes=6)}, "age"),
    ],
)
def test_limits_out_of_bounds_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidOptions) as raised:
        BatchLimits(**options)
    assert set(raised.value.reasons) == {field}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"poison_limit": -1}, "poison_limit"),
        ({"first_wait": timedelta(0)}, "first_wait"),
        ({"longest_wait": timedelta(milliseconds=1)}, "longest_wait"),
        ({"max_poll_interval": timedelta(0)}, "max_poll_interval"),
        ({"session_timeout": timedelta(seconds=5)}, "session_timeout"),
        ({"delivery_timeout": timedelta(0)}, "delivery_timeout"),
    ],
)
def test_options_out_of_bounds_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidOptions) as raised:
        ConsumerOptions(**options)
    assert set(raised.value.reasons) == {field}
