"""Reading the environment: every error at once, by name, and never a value."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox.options import OutboxOptions
from pinactivity.conf.env import Environment, InvalidEnvironment, between, http_url, one_of
from sessions.options import ActivityCloserOptions

REQUIRED: Any = ...
SECRET = "hunter2"  # stands for a value that must not be shown


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Environment]:
    """Set variables and give a reader; names begin with X_ to be nobody else's."""

    def read(**variables: str) -> Environment:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Environment()

    return read


def errors(reader: Environment) -> dict[str, list[str]]:
    """Finish the reading, which must fail; the report never shows the secret."""
    with pytest.raises(InvalidEnvironment) as raised:
        reader.finish()
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value)
    assert all(f"  {name}: " in str(raised.value) for name in raised.value.errors)
    assert all(messages and all(messages) for messages in raised.value.errors.values())
    return raised.value.errors


def test_sound_environment_finishes(env: Callable[..., Environment]) -> None:
    reader = env(X_NUMBER="7", X_WORD="a", X_SPAN="00:00:01")
    assert reader.int("X_NUMBER", default=1, validate=between(0, 10)) == 7
    assert reader.str("X_WORD", default="b", validate=one_of("a", "b")) == "a"
    assert reader.time_span("X_SPAN") == timedelta(seconds=1)
    reader.finish()


def test_all_errors_are_reported_together_by_name(env: Callable[..., Environment]) -> None:
    reader = env(
        X_BOOL=SECRET,
        X_INT=SECRET,
        X_BOUNDED="11",
        X_SPAN=SECRET,
        X_WORD=SECRET,
        X_URL=f"mysql://user:{SECRET}@host/name",
        X_CLOSER_BATCH_SIZE="0",
    )
    reader.str("X_ABSENT", default=REQUIRED)
    reader.bool("X_BOOL", default=False)
    reader.int("X_INT", default=1)
    reader.int("X_BOUNDED", default=1, validate=between(0, 10))
    reader.time_span("X_SPAN")
    reader.str("X_WORD", default="a", validate=one_of("a", "b"))
    reader.postgresql("X_URL")
    reader.options(
        "X_CLOSER",
        ActivityCloserOptions,
        batch_size=reader.int("X_CLOSER_BATCH_SIZE", default=None),
    )

    assert set(errors(reader)) == {
        "X_ABSENT",
        "X_BOOL",
        "X_INT",
        "X_BOUNDED",
        "X_SPAN",
        "X_WORD",
        "X_URL",
        "X_CLOSER_BATCH_SIZE",
    }


def test_errors_stand_in_order_of_their_names(env: Callable[..., Environment]) -> None:
    reader = env(X_C="c", X_A="a", X_B="b")
    for name in ("X_C", "X_A", "X_B"):
        reader.time_span(name)

    with pytest.raises(InvalidEnvironment) as raised:
        reader.finish()
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["X_A", "X_B", "X_C"]


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("00:12:00", timedelta(minutes=12)),
        ("0:00:01", timedelta(seconds=1)),
        ("23:59:59", timedelta(hours=23, minutes=59, seconds=59)),
        ("30.00:00:00", timedelta(days=30)),
        ("1.02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
    ],
)
def test_time_span_is_read(env: Callable[..., Environment], text: str, span: timedelta) -> None:
    reader = env(X_SPAN=text)
    assert reader.time_span("X_SPAN") == span
    reader.finish()


@pytest.mark.parametrize(
    "text", ["", "12", "12:00", "00:60:00", "00:00:60", "-00:12:00", "00:12:00.5", "PT12M", "12m"]
)
def test_time_span_of_another_form_is_an_error_and_reading_goes_on(
    env: Callable[..., Environment], text: str
) -> None:
    reader = env(X_SPAN=text)
    assert reader.time_span("X_SPAN", default=timedelta(hours=1)) is None
    assert set(errors(reader)) == {"X_SPAN"}


@pytest.mark.parametrize("text", ["-1", "11", "1.5", "", "ten", "9" * 5_000, "0x1"])
def test_number_out_of_bounds_is_an_error_and_reading_goes_on(
    env: Callable[..., Environment], text: str
) -> None:
    reader = env(X_NUMBER=text)
    assert reader.int("X_NUMBER", default=3, validate=between(0, 10)) is None
    assert set(errors(reader)) == {"X_NUMBER"}


@pytest.mark.parametrize("text", ["0", "10"])
def test_bounds_themselves_are_valid(env: Callable[..., Environment], text: str) -> None:
    reader = env(X_NUMBER=text)
    assert reader.int("X_NUMBER", default=3, validate=between(0, 10)) == int(text)
    reader.finish()


def test_options_that_parse_and_are_out_of_bounds_are_all_named(
    env: Callable[..., Environment],
) -> None:
    reader = env()
    options = reader.options(
        "X", OutboxOptions, batch_size=0, polling_interval=timedelta(0), delivery_timeout=None
    )
    assert options == OutboxOptions()
    assert set(errors(reader)) == {"X_BATCH_SIZE", "X_POLLING_INTERVAL"}


def test_option_that_does_not_parse_is_named_once(env: Callable[..., Environment]) -> None:
    reader = env(X_BATCH_SIZE=SECRET)
    reader.options("X", OutboxOptions, batch_size=reader.int("X_BATCH_SIZE", default=None))
    assert len(errors(reader)["X_BATCH_SIZE"]) == 1


# -- files ---------------------------------------------------------------------------------


def test_value_comes_from_a_file_without_its_line_end(
    env: Callable[..., Environment], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    reader = env(X_KEY_FILE=str(file))
    assert reader.str("X_KEY") == SECRET
    reader.finish()


def test_every_kind_of_variable_may_be_a_file(
    env: Callable[..., Environment], tmp_path: Path
) -> None:
    contents = {
        "X_NUMBER": "7\n",
        "X_SPAN": "00:00:07\n",
        "X_WORD": "b\n",
        "X_URL": "postgresql://user:pass@host:5433/name\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    reader = env(**{f"{name}_FILE": str(tmp_path / name) for name in contents})

    assert reader.int("X_NUMBER", default=1, validate=between(0, 10)) == 7
    assert reader.time_span("X_SPAN") == timedelta(seconds=7)
    assert reader.str("X_WORD", default="a", validate=one_of("a", "b")) == "b"
    assert reader.postgresql("X_URL")["PASSWORD"] == "pass"
    reader.finish()


def unreadable(folder: Path, how: str) -> str:
    path = folder / SECRET
    if how == "a folder":
        path.mkdir()
    elif how == "not text":
        path.write_bytes(b"\xff\xfe")
    elif how == "beneath a file":
        path.write_text("x")
        return str(path / SECRET)
    elif how == "too long a name":
        return str(path) * 100
    return str(path)


@pytest.mark.parametrize(
    "how", ["absent", "a folder", "not text", "beneath a file", "too long a name"]
)
@pytest.mark.parametrize("default", ["a default", REQUIRED], ids=["optional", "required"])
def test_file_that_cannot_be_read_is_an_error_of_its_own_name(
    env: Callable[..., Environment], tmp_path: Path, how: str, default: Any
) -> None:
    reader = env(X_KEY_FILE=unreadable(tmp_path, how), X_OTHER="ten")
    reader.str("X_KEY", default=default)
    reader.int("X_OTHER", default=1)

    assert set(errors(reader)) - {"X_KEY"} == {"X_KEY_FILE", "X_OTHER"}


def test_value_in_a_file_that_does_not_parse_is_not_quoted(
    env: Callable[..., Environment], tmp_path: Path
) -> None:
    (tmp_path / "number").write_text(SECRET)
    reader = env(X_NUMBER_FILE=str(tmp_path / "number"))
    reader.int("X_NUMBER", default=1, validate=between(0, 10))
    assert set(errors(reader)) == {"X_NUMBER"}


# -- the database --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "postgresql://",
        "postgresql://host",
        "postgresql://host/",
        f"mysql://user:{SECRET}@host/name",
        f"sqlite:///{SECRET}",
        f"user:{SECRET}@host/name",
        f"postgresql://user:{SECRET}@host:port/name",
        f"postgresql://user:{SECRET}@host:70000/name",
        f"postgresql://user:{SECRET}@[host/name",
        SECRET,
    ],
)
def test_url_that_names_no_postgresql_database_is_an_error(
    env: Callable[..., Environment], url: str
) -> None:
    reader = env(X_URL=url)
    assert reader.postgresql("X_URL") is None
    assert set(errors(reader)) == {"X_URL"}


def test_absent_url_is_named_once(env: Callable[..., Environment]) -> None:
    reader = env()
    reader.postgresql("X_URL")
    assert len(errors(reader)["X_URL"]) == 1


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_url_is_read_with_its_escapes_and_parameters(
    env: Callable[..., Environment], scheme: str
) -> None:
    reader = env(X_URL=f"{scheme}://us%40er:p%2Fss%23@[::1]:6543/na%20me?sslmode=require")
    database = reader.postgresql("X_URL")
    reader.finish()

    assert {
        name: database[name] for name in ("ENGINE", "USER", "PASSWORD", "HOST", "PORT", "NAME")
    } == {
        "ENGINE": "django.db.backends.postgresql",
        "USER": "us@er",
        "PASSWORD": "p/ss#",
        "HOST": "::1",
        "PORT": 6543,
        "NAME": "na me",
    }
    assert database["OPTIONS"]["sslmode"] == "require"


# -- other forms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://host", "https://host:8443/", "http://user:p%2Fss@click_house:8123", "http://[::1]:80"],
)
def test_http_url_with_a_host_is_read(env: Callable[..., Environment], url: str) -> None:
    reader = env(X_URL=url)
    assert reader.str("X_URL", validate=http_url) == url
    reader.finish()


@pytest.mark.parametrize(
    "url",
    ["", "host", "tcp://host", "http://", "http://host:0", "http://host:70000", "http://[host"],
)
def test_other_url_is_an_error(env: Callable[..., Environment], url: str) -> None:
    reader = env(X_URL=url)
    reader.str("X_URL", validate=http_url)
    assert set(errors(reader)) == {"X_URL"}


@pytest.mark.parametrize(
    ("parser", "advice"),
    [
        ("int", "Must be a whole number."),
        ("bool", "Must be true or false."),
        ("time_span", "Must be a time span, hh:mm:ss or d.hh:mm:ss."),
        ("postgresql", "Must be postgresql://user:password@host:port/name."),
    ],
)
def test_error_says_what_to_do(env: Callable[..., Environment], parser: str, advice: str) -> None:
    reader = env(X_VALUE=SECRET)
    getattr(reader, parser)("X_VALUE")
    getattr(reader, parser)("X_ABSENT")
    assert errors(reader) == {
        "X_VALUE": [advice],
        "X_ABSENT": ["Is required: set it, or X_ABSENT_FILE to a file that has it."],
    }
