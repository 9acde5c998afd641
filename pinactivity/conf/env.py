"""The environment, read once by `settings.py`; all faults are reported together, by name.

A variable NAME may be given as a file by NAME_FILE (secrets). Messages never quote a value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured
from environs import EnvValidationError, FileAwareEnv

from pinactivity.core.errors import InvalidOptions

T = TypeVar("T")

_TIME_SPAN = re.compile(r"(?:(?P<days>\d{1,5})\.)?(?P<h>\d{1,2}):(?P<m>[0-5]\d):(?P<s>[0-5]\d)")

_KEEPALIVES_IDLE, _KEEPALIVES_INTERVAL, _KEEPALIVES_COUNT = 30, 10, 3
"""Seconds, seconds and probes until either end of a connection misses the other."""
_TCP_USER_TIMEOUT = 60_000
"""Milliseconds that what was sent may go unacknowledged."""


class EnvironmentFaults(ImproperlyConfigured):
    """Say every fault of the environment, one line each."""

    def __init__(self, faults: dict[str, list[str]]) -> None:
        self.faults = faults
        lines = [
            f"  {name}: {' '.join(messages)}"
            for name, messages in sorted(faults.items(), key=lambda fault: fault[0])
        ]
        super().__init__("\n".join(["The environment is not valid:", *lines]))


class Environment(FileAwareEnv):
    """environs' reader, plus time spans, options classes and one report at the end."""

    def __init__(self) -> None:
        super().__init__(eager=False, strip_whitespace=True)
        self._faults: dict[str, list[str]] = {}

    def _get_value(self, env_key: str, default: Any) -> Any:
        try:
            return super()._get_value(env_key, default)
        except (ValueError, OSError):
            self.fault(f"{env_key}_FILE", "Must name a readable text file.")
            return default

    def fault(self, name: str, message: str) -> None:
        """Note a fault; `finish` reports it with the others."""
        self._faults.setdefault(name, []).append(message)

    @overload
    def time_span(
        self, name: str, default: timedelta, *, least: timedelta = ..., most: timedelta = ...
    ) -> timedelta: ...
    @overload
    def time_span(self, name: str, default: None = None) -> timedelta | None: ...
    def time_span(
        self,
        name: str,
        default: timedelta | None = None,
        *,
        least: timedelta = timedelta(0),
        most: timedelta = timedelta.max,
    ) -> timedelta | None:
        """Read `hh:mm:ss` or `d.hh:mm:ss`; a fault keeps the default so that reading goes on."""
        text = self.str(name, default=None)
        if text is None:
            return default
        match = _TIME_SPAN.fullmatch(text)
        if match is None:
            self.fault(name, "Must be a time span, hh:mm:ss or d.hh:mm:ss.")
            return default
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if not least <= value <= most:
            self.fault(name, f"Must be from {least} to {most}.")
            return default
        return value

    def wait(self, name: str, default: timedelta) -> timedelta:
        """Read a time-out of PostgreSQL's: 0 would be none, and it counts 32 bits of ms."""
        return self.time_span(name, default, least=timedelta(seconds=1), most=timedelta(days=1))

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """Read a whole number within bounds; a fault keeps the default."""
        value: int | None = self.int(name, default=default)
        if value is None:  # it did not parse
            return default
        if not least <= value <= most:
            self.fault(name, f"Must be from {least} to {most}.")
            return default
        return value

    def choice(self, name: str, default: str, *, among: Sequence[str]) -> str:
        """Read one of a few words; a fault keeps the default."""
        value = self.str(name, default=default)
        if value not in among:
            self.fault(name, f"Must be one of {', '.join(among)}.")
            return default
        return value

    def http_address(self, name: str) -> str:
        """Read a required http:// or https:// URL with a host."""
        text: str | None = self.str(name)
        try:
            parts = urlsplit(text or "")
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if text is not None and not sound:
            self.fault(name, "Must be http://user:password@host:port/, or https.")
        return text or ""

    def database(self, name: str, *, session: Mapping[str, str | timedelta]) -> dict[str, Any]:
        """Read a PostgreSQL URL into Django's form; `session` are its connections' parameters.

        Waits are bounded on the connection itself, and by TCP keepalives of both ends: a
        half-open connection would otherwise hang for hours, here or, with the locks of a host
        that is gone, in PostgreSQL.
        """
        url = self.str(name)
        try:
            database: dict[str, Any] = dict(dj_database_url.parse(url or ""))
        except ValueError:
            database = {}
        if database.get("ENGINE") != "django.db.backends.postgresql" or not database["NAME"]:
            if url is not None:
                self.fault(name, "Must be postgresql://user:password@host:port/name.")
            return {}
        parameters = {
            parameter: value // timedelta(milliseconds=1) if isinstance(value, timedelta) else value
            for parameter, value in session.items()
        } | {
            "tcp_keepalives_idle": _KEEPALIVES_IDLE,
            "tcp_keepalives_interval": _KEEPALIVES_INTERVAL,
            "tcp_keepalives_count": _KEEPALIVES_COUNT,
            "tcp_user_timeout": _TCP_USER_TIMEOUT,
        }
        return {
            **database,
            "CONN_MAX_AGE": None,
            "OPTIONS": {
                **database.get("OPTIONS", {}),
                "options": " ".join(f"-c {name}={value}" for name, value in parameters.items()),
                "application_name": "pinactivity",
                "connect_timeout": 5,
                "keepalives": 1,
                "keepalives_idle": _KEEPALIVES_IDLE,
                "keepalives_interval": _KEEPALIVES_INTERVAL,
                "keepalives_count": _KEEPALIVES_COUNT,
                "tcp_user_timeout": _TCP_USER_TIMEOUT,
            },
        }

    def options(self, prefix: str, build: Callable[..., T], **values: Any) -> T:
        """Build an options class; its faults are reported as PREFIX_FIELD, and the defaults go on.

        A value that did not parse at all is None and keeps the class's default here: it has
        its own line in the report.
        """
        given = {field: value for field, value in values.items() if value is not None}
        try:
            return build(**given)
        except InvalidOptions as error:
            for field, reason in error.faults.items():
                self.fault(f"{prefix}_{field.upper()}", reason)
            return build()

    def finish(self) -> None:
        """End the reading.

        Raises:
            EnvironmentFaults: at least one variable is missing or not valid.
        """
        try:
            self.seal()
        except EnvValidationError as error:
            found: Any = error.error_messages  # declared wider than `seal` fills it
            for name, messages in found.items():
                for message in messages:
                    self.fault(name, message)
        if self._faults:
            raise EnvironmentFaults(self._faults)
