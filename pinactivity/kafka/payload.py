"""Reads the fields of a message by name, in any case; what breaks the contract is poison."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.record import Poison, Record

Value = TypeVar("Value")

_DEFAULT = datetime(1, 1, 1, tzinfo=UTC)
"""What .NET writes for a time that nobody has set."""


class Payload:
    """The fields of one message's JSON object.

    Codes are `<field>-missing` and `<field>-invalid`, the field in kebab case.
    """

    def __init__(self, record: Record) -> None:
        fields: Mapping[str, Any] = record.payload()
        self._fields = {name.lower(): value for name, value in fields.items()}
        if len(self._fields) != len(fields):
            raise Poison("value-repeats-a-field")

    def has(self, name: str) -> bool:
        """Return whether a field is present and not null."""
        return self._fields.get(name.lower()) is not None

    def id(self, name: str) -> UUID:
        """Read an id.

        Raises:
            Poison: missing, null, nil, or not a UUID.
        """
        return self._read(name, parse_id)

    def time(self, name: str, *, since: datetime | None = None) -> datetime:
        """Read a time, in UTC.

        Args:
            since: The earliest legal time. An earlier one is `<field>-default` if it is what .NET
                writes for a time that nobody has set, else `<field>-before-<year>`.

        Raises:
            Poison: missing, null, not ISO 8601 with an offset, or too early.
        """
        moment = self._read(name, parse_time)
        if since is not None and moment < since:
            problem = "default" if moment == _DEFAULT else f"before-{since.year}"
            raise Poison(f"{_kebab(name)}-{problem}")
        return moment

    def text(self, name: str, *, most: int) -> str:
        """Read a string of 1 to `most` characters.

        Raises:
            Poison: missing, null, empty, longer, or no string.
        """

        def parse(value: object) -> str:
            if not isinstance(value, str) or not 1 <= len(value) <= most:
                raise ValueError(f"Must be a string of 1 to {most} characters.")
            return value

        return self._read(name, parse)

    def nested(self, name: str) -> dict[str, Any]:
        """Read a JSON object.

        Raises:
            Poison: missing, null, or no object.
        """

        def parse(value: object) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise ValueError("Must be an object.")  # noqa: TRY004 - as the other parsers do
            return value

        return self._read(name, parse)

    def whole_number(self, name: str, *, most: int) -> int:
        """Read a whole number from 0 to `most`.

        Raises:
            Poison: missing, null, not a JSON integer (`12.0` and `true` are none), or beyond.
        """

        def parse(value: object) -> int:
            # isinstance would take a bool.
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"Must be from 0 to {most}.")
            return value

        return self._read(name, parse)

    def _read(self, name: str, parse: Callable[[object], Value]) -> Value:
        value = self._fields.get(name.lower())
        if value is None:
            raise Poison(f"{_kebab(name)}-missing")
        try:
            return parse(value)
        except ValueError:
            raise Poison(f"{_kebab(name)}-invalid") from None


def _kebab(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
