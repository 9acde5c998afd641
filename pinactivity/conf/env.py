"""The environment, read once by `settings.py`; all errors are reported together, by name.

A variable NAME may be given as a file by NAME_FILE (secrets). Messages never quote a value.
"""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured
from environs import EnvValidationError, FileAwareEnv, validate
from marshmallow import ValidationError, fields

from pinactivity.core.errors import InvalidOptions

T = TypeVar("T")

_TIME_SPAN = re.compile(r"(?:(?P<days>\d{1,5})\.)?(?P<h>\d{1,2}):(?P<m>[0-5]\d):(?P<s>[0-5]\d)")
_INVALID = {"int": "Must be a whole number.", "bool": "Must be true or false."}

filled = validate.Length(min=1, error="Must not be empty.")


def between(least: Any, most: Any) -> validate.Range:
    """Return a validator of a number or a time span; both bounds are valid themselves."""
    return validate.Range(least, most, error=f"Must be from {least} to {most}.")


def one_of(*words: str) -> validate.OneOf:
    """Return a validator of a word."""
    return validate.OneOf(words, error="Must be one of {choices}.")


def http_url(text: str) -> None:
    """Validate an http:// or https:// URL with a host; a host may be any name of a network's."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValidationError("Must be http://user:password@host:port/, or https.")


class TimeSpan(fields.Field[timedelta]):
    """A time span as the specification writes it: `hh:mm:ss`, or `d.hh:mm:ss` with days."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **kwargs: Any) -> timedelta:
        match = _TIME_SPAN.fullmatch(value)
        if match is None:
            raise ValidationError("Must be a time span, hh:mm:ss or d.hh:mm:ss.")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _parse_postgresql(url: str) -> dict[str, Any]:
    try:
        database: dict[str, Any] = dict(dj_database_url.parse(url))
    except ValueError:
        database = {}
    if database.get("ENGINE") != "django.db.backends.postgresql" or not database["NAME"]:
        raise ValidationError("Must be postgresql://user:password@host:port/name.")
    return database


class InvalidEnvironment(ImproperlyConfigured):
    """Names every variable that is missing or not valid, one a line, with what to do.

    Args:
        errors: {variable: messages}.
    """

    def __init__(self, errors: dict[str, list[str]]) -> None:
        self.errors = errors
        lines = [f"  {name}: {' '.join(messages)}" for name, messages in sorted(errors.items())]
        super().__init__("\n".join(["The environment is not valid:", *lines]))


class Environment:
    """Reads variables by environs, and notes what is not valid until `finish`.

    Its parsers are those of environs (`str`, `int`, `bool`, `list`) and two more: `time_span`
    returns a timedelta, `postgresql` a database's settings in Django's form. All take a name, a
    `default` and `validate`; without a default the variable is required. They return None for a
    variable that is not valid, so that the reading goes on.
    """

    def __init__(self) -> None:
        self._env = FileAwareEnv(eager=False, strip_whitespace=True)
        self._env.add_parser_from_field("time_span", TimeSpan)
        self._env.add_parser("postgresql", _parse_postgresql)
        self._errors: dict[str, list[str]] = {}

    def __getattr__(self, parser: str) -> Callable[..., Any]:
        read = getattr(self._env, parser)

        def read_variable(name: str, **options: Any) -> Any:
            if parser in _INVALID:
                options["error_messages"] = {"invalid": _INVALID[parser]}
            try:
                return read(name, **options)
            except (ValueError, OSError):  # environs raises them at once, for NAME_FILE only
                self.add_error(f"{name}_FILE", "Must name a readable text file.")
                return None

        return read_variable

    @property
    def variables(self) -> set[str]:
        """The names that have been read so far."""
        return set(self._env.dump())

    def add_error(self, name: str, message: str) -> None:
        """Note what is wrong with a variable; `finish` reports it with the others."""
        self._errors.setdefault(name, []).append(message)

    def options(self, prefix: str, build: Callable[..., T], **values: Any) -> T:
        """Build an options class of variables PREFIX_FIELD.

        Args:
            prefix: Of the variables' names.
            build: The class. What it refuses is noted, and its defaults are returned.
            values: By field. None, also of a variable that is not valid, keeps the default.
        """
        given = {field: value for field, value in values.items() if value is not None}
        try:
            return build(**given)
        except InvalidOptions as exc:
            for field, reason in exc.reasons.items():
                self.add_error(f"{prefix}_{field.upper()}", reason)
            return build()

    def finish(self) -> None:
        """End the reading.

        Raises:
            InvalidEnvironment: at least one variable is missing or not valid.
        """
        try:
            self._env.seal()
        except EnvValidationError as exc:
            found: Any = exc.error_messages  # declared wider than `seal` fills it
            for name, messages in found.items():
                is_set = name in os.environ or f"{name}_FILE" in os.environ
                unset = [f"Is required: set it, or {name}_FILE to a file that has it."]
                for message in messages if is_set else unset:
                    self.add_error(name, message)
        if self._errors:
            raise InvalidEnvironment(self._errors)
