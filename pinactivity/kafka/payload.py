"""Reading the fields of a message: by name in any case; what breaks a rule is poison, with a code.

`Payload` reads whatever is legal and says what is not. `PlainReader` reads what is written as our
own events are, in a tenth of the time, and leaves everything else to it (adr/0014).
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec

from pinactivity.core import strict_json
from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.record import Poison, Record

Value = TypeVar("Value")
Fields = TypeVar("Fields", bound="Plain")


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
        """Return whether a field is there and not null."""
        return self._fields.get(name.lower()) is not None

    def id(self, name: str) -> UUID:
        """Read an id.

        Raises:
            Poison: missing, null, nil, or not a UUID.
        """
        return self._read(name, parse_id)

    def time(self, name: str) -> datetime:
        """Read a time, in UTC.

        Raises:
            Poison: missing, null, or not ISO 8601 with an offset.
        """
        return self._read(name, parse_time)

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


class Plain(msgspec.Struct, rename="pascal", forbid_unknown_fields=True, gc=False):
    """The fields of a payload, each of them there: ids, texts, bounded whole numbers, raw JSON.

    An id may be None. Times are texts, for `parse_time`; msgspec would round a seventh digit.
    """


class PlainReader(Generic[Fields]):
    """Reads payloads with exactly the given fields, plainly written; of no other it says a thing.

    Args:
        fields: What they are.

    Raises:
        TypeError: a field is of a kind that is not known here.
    """

    def __init__(self, fields: type[Fields]) -> None:
        self._decoder = msgspec.json.Decoder(fields)
        self._quotes = 0
        self._optional: list[str] = []
        self._nested: list[str] = []
        for field in msgspec.structs.fields(fields):
            self._quotes += 2
            match msgspec.inspect.type_info(field.type):
                case msgspec.inspect.UUIDType() | msgspec.inspect.StrType():
                    self._quotes += 2
                case msgspec.inspect.UnionType(
                    (msgspec.inspect.UUIDType(), msgspec.inspect.NoneType())
                ):
                    self._optional.append(field.name)
                case msgspec.inspect.RawType():
                    self._nested.append(field.name)
                case msgspec.inspect.IntType():
                    pass
                case _:
                    raise TypeError(f"{fields.__qualname__}.{field.name} cannot be read plainly.")

    def read(self, value: bytes) -> Fields | None:
        """Return the fields, each what `Payload` makes of it; None leaves the message to that.

        msgspec takes the last of two fields of a name. But without escapes a value has two
        quotation marks for each name and each text, so a field too many is two marks too many.
        """
        if b"\\" in value or _ZEROS in value:
            return None
        try:
            fields = self._decoder.decode(value)
        except (ValueError, RecursionError):
            return None
        quotes = self._quotes
        for name in self._optional:
            if getattr(fields, name) is not None:
                quotes += 2
        for name in self._nested:
            quotes += bytes(getattr(fields, name)).count(b'"')
        if value.count(b'"') != quotes:
            return None
        # What is nested has its own levels counted by its reader, not the one around it.
        if self._nested and value.count(b"{") + value.count(b"[") > strict_json.MAX_DEPTH:
            return None
        return fields


_ZEROS = b"0" * 12
"""The end of the nil id in either spelling that msgspec reads; no other id is likely to have it."""
