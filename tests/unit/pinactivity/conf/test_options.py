"""Options and their bounds (design, section 7): the bounds are valid, one step beyond is not."""

from datetime import timedelta
from typing import Any

import pytest

from devstats.options import DevStatsOptions
from outbox.options import OutboxOptions
from pinactivity.core.errors import InvalidOptions
from sessions.options import ActivityCloserOptions, ActivityRetentionOptions
from views.options import COUNTED_FOR, ViewStatsOptions

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
STEP = timedelta(microseconds=1)


def test_defaults_are_the_specifications() -> None:
    options = ActivityCloserOptions()
    assert options.inactivity_threshold == 12 * MINUTE
    assert options.polling_interval == MINUTE
    assert options.batch_size == 500
    assert options.max_run_duration == 5 * MINUTE
    assert options.unit_size == 100
    assert options.single_instance is False


@pytest.mark.parametrize(
    "valid",
    [
        {"inactivity_threshold": 10 * MINUTE},
        {"inactivity_threshold": 15 * MINUTE},
        {"polling_interval": SECOND},
        {"polling_interval": 10 * MINUTE},
        {"batch_size": 1},
        {"batch_size": 1_000_000},
        {"max_run_duration": STEP},
        {"max_run_duration": timedelta(days=1)},
        {"sessions_per_transaction": 1},
        {"sessions_per_transaction": 500},
        {"batch_size": 7, "sessions_per_transaction": 7},
        {"single_instance": True},
    ],
)
def test_bounds_of_the_closer_are_valid_themselves(valid: dict[str, Any]) -> None:
    options = ActivityCloserOptions(**valid)
    assert {name: getattr(options, name) for name in valid} == valid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inactivity_threshold", 10 * MINUTE - STEP),
        ("inactivity_threshold", 15 * MINUTE + STEP),
        ("inactivity_threshold", timedelta(0)),
        ("inactivity_threshold", -12 * MINUTE),
        ("polling_interval", SECOND - STEP),
        ("polling_interval", 10 * MINUTE + STEP),
        ("batch_size", 0),
        ("batch_size", -1),
        ("max_run_duration", timedelta(0)),
        ("max_run_duration", -STEP),
        ("sessions_per_transaction", 0),
        ("sessions_per_transaction", -1),
        ("sessions_per_transaction", 501),
    ],
)
def test_value_out_of_the_closers_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidOptions) as raised:
        ActivityCloserOptions(**{field: value})
    assert list(raised.value.reasons) == [field]
    assert field in str(raised.value)


def test_every_invalid_value_is_named_at_once() -> None:
    with pytest.raises(InvalidOptions) as raised:
        ActivityCloserOptions(
            inactivity_threshold=timedelta(0),
            polling_interval=timedelta(0),
            batch_size=0,
            max_run_duration=timedelta(0),
            sessions_per_transaction=0,
        )
    assert set(raised.value.reasons) == {
        "inactivity_threshold",
        "polling_interval",
        "batch_size",
        "max_run_duration",
        "sessions_per_transaction",
    }


@pytest.mark.parametrize(
    ("given", "unit_size"),
    [
        ({}, 100),
        ({"batch_size": 99}, 99),
        ({"batch_size": 1}, 1),
        ({"sessions_per_transaction": 1}, 1),
        ({"sessions_per_transaction": 250}, 250),
    ],
)
def test_unit_is_100_sessions_or_the_batch_by_default(
    given: dict[str, int], unit_size: int
) -> None:
    assert ActivityCloserOptions(**given).unit_size == unit_size  # type: ignore[arg-type]  # integers only


def test_row_is_abandoned_after_twice_the_threshold() -> None:
    options = ActivityCloserOptions(inactivity_threshold=10 * MINUTE)
    assert options.abandoned_after == 20 * MINUTE


@pytest.mark.parametrize(
    "valid",
    [
        {"batch_size": 1},
        {"batch_size": 10_000},
        {"polling_interval": SECOND},
        {"polling_interval": MINUTE},
        {"delivery_timeout": SECOND},
        {"delivery_timeout": 15 * SECOND},
        {"shards": 16},
        {"published_kept": timedelta(hours=1)},
        {"published_kept": timedelta(days=3650)},
    ],
)
def test_bounds_of_the_relay_are_valid_themselves(valid: dict[str, Any]) -> None:
    options = OutboxOptions(**valid)
    assert {name: getattr(options, name) for name in valid} == valid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 10_001),
        ("polling_interval", SECOND - STEP),
        ("polling_interval", MINUTE + STEP),
        ("delivery_timeout", SECOND - STEP),
        ("delivery_timeout", 15 * SECOND + STEP),
        ("shards", 0),
        ("shards", 3),
        ("shards", 32),
        ("published_kept", timedelta(hours=1) - STEP),
        ("published_kept", timedelta(days=3650) + STEP),
    ],
)
def test_value_out_of_the_relays_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidOptions) as raised:
        OutboxOptions(**{field: value})
    assert list(raised.value.reasons) == [field]


@pytest.mark.parametrize(
    "valid",
    [
        {"age": timedelta(days=90)},
        {"age": timedelta(days=3650)},
        {"max_run_duration": STEP},
        {"max_run_duration": 60 * MINUTE},
    ],
)
def test_bounds_of_retention_are_valid_themselves(valid: dict[str, Any]) -> None:
    options = ActivityRetentionOptions(**valid)
    assert {name: getattr(options, name) for name in valid} == valid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("age", timedelta(days=90) - STEP),
        ("age", timedelta(days=3650) + STEP),
        ("max_run_duration", timedelta(0)),
        ("max_run_duration", 60 * MINUTE + STEP),
    ],
)
def test_value_out_of_retentions_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidOptions) as raised:
        ActivityRetentionOptions(**{field: value})
    assert list(raised.value.reasons) == [field]


def test_activity_is_kept_for_a_year() -> None:
    assert ActivityRetentionOptions().age == timedelta(days=365)


def test_no_two_numbers_of_shards_have_a_shard_in_common() -> None:
    layouts = [OutboxOptions(shards=shards) for shards in (1, 2, 4, 8, 16)]
    keys = [str(number) for number in range(1000)]
    for options in layouts:
        assert {options.shard_of(key) for key in keys} == set(options.shard_numbers)
    every = [number for options in layouts for number in options.shard_numbers]
    assert len(every) == len(set(every)) == 31


@pytest.mark.parametrize("days", [90, 3650])
def test_bounds_of_the_view_statistics_are_valid_themselves(days: int) -> None:
    assert ViewStatsOptions(seen_kept=timedelta(days=days)).seen_kept == timedelta(days=days)


@pytest.mark.parametrize("kept", [timedelta(days=90) - STEP, timedelta(days=3650) + STEP])
def test_views_are_not_forgotten_while_their_events_still_count(kept: timedelta) -> None:
    with pytest.raises(InvalidOptions) as raised:
        ViewStatsOptions(seen_kept=kept)
    assert list(raised.value.reasons) == ["seen_kept"]


def test_a_view_is_remembered_for_longer_than_its_event_counts() -> None:
    assert ViewStatsOptions().seen_kept - COUNTED_FOR >= timedelta(days=10)


@pytest.mark.parametrize(
    ("field", "valid", "invalid"),
    [
        ("batch_size", [1, 1000], [0, 1001, -1]),
        ("flush_interval", [timedelta(0), MINUTE], [-STEP, MINUTE + STEP]),
        ("storage_timeout", [SECOND, MINUTE], [SECOND - STEP, MINUTE + STEP]),
        ("cluster", ["", "pin", "_a-1"], ["it's", "a b", "1a", "x" * 65]),
    ],
)
def test_bounds_of_dev_stats(field: str, valid: list[Any], invalid: list[Any]) -> None:
    for value in valid:
        assert getattr(DevStatsOptions(**{field: value}), field) == value
    for value in invalid:
        with pytest.raises(InvalidOptions) as raised:
            DevStatsOptions(**{field: value})
        assert set(raised.value.reasons) == {field}


def test_defaults_of_dev_stats_are_the_specifications() -> None:
    options = DevStatsOptions()
    assert (options.batch_size, options.flush_interval) == (1000, 5 * SECOND)
