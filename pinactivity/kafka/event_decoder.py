"""An event as its reader declares it: one struct, from which both decoders follow.

The fast decoder takes events that are written as our own are, in a tenth of the time. The full
decoder takes whatever is legal, and alone decides what is poison and why (adr/0014).
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec.inspect import (
    DateTimeType,
    DictType,
    IntType,
    Metadata,
    NoneType,
    StrType,
    UnionType,
    UUIDType,
)

from pinactivity.core import strict_json
from pinactivity.core.times import EPOCH, parse_time
from pinactivity.kafka.payload import Payload
from pinactivity.kafka.record import Record

TimeSince1970 = Annotated[datetime, msgspec.Meta(extra={"since": EPOCH})]
"""A time that is set, and not before 1970."""

_NIL_END = b"0" * 12
"""The end of the nil id in either spelling that msgspec reads; few other ids contain it."""


class Contract(msgspec.Struct, rename="pascal", forbid_unknown_fields=True, gc=False):
    """The fields of an event's payload; each is named there in PascalCase.

    A field is a UUID, a datetime (or `TimeSince1970`), a str of bounded length, an int of bounded
    size, or `UUID | None` or `dict[str, Any] | None`, which may be absent.
    """


Event = TypeVar("Event", bound=Contract)
Read = Callable[[Payload], Any]


class EventDecoder(Generic[Event]):
    """Decodes payloads of one contract.

    Args:
        contract: The event's fields.

    Raises:
        TypeError: a field has a type that a contract cannot have.
    """

    def __init__(self, contract: type[Event]) -> None:
        self._contract = contract
        self._readers: dict[str, Read] = {}
        self._times: list[tuple[str, datetime | None]] = []
        self._optional_ids: list[str] = []
        self._nested: list[str] = []
        self._quotes = 0
        undecoded: list[tuple[str, type]] = []
        for field in msgspec.structs.fields(contract):
            name, wire_name = field.name, field.encode_name
            self._quotes += 2
            kind = msgspec.inspect.type_info(field.type)
            since = None
            if isinstance(kind, Metadata):
                since, kind = (kind.extra or {}).get("since"), kind.type
            match kind:
                case UUIDType():
                    self._quotes += 2
                    self._readers[name] = _reads(Payload.id, wire_name)
                case UnionType((UUIDType(), NoneType())):
                    self._optional_ids.append(name)
                    self._readers[name] = _reads_optional(Payload.id, wire_name)
                case DateTimeType():
                    self._quotes += 2
                    self._times.append((name, since))
                    self._readers[name] = _reads(Payload.time, wire_name, since=since)
                    # msgspec would round a seventh digit; `parse_time` cuts it off.
                    undecoded.append((name, str))
                case StrType(min_length=1, max_length=int() as most):
                    self._quotes += 2
                    self._readers[name] = _reads(Payload.text, wire_name, most=most)
                case IntType(ge=0, le=int() as most):
                    self._readers[name] = _reads(Payload.whole_number, wire_name, most=most)
                case UnionType((DictType(), NoneType())):
                    self._nested.append(name)
                    self._readers[name] = _reads_optional(Payload.nested, wire_name)
                    undecoded.append((name, msgspec.Raw))
                case _:
                    raise TypeError(f"{contract.__qualname__}.{name} has no type of a contract.")
        as_written = msgspec.defstruct(contract.__name__, undecoded, bases=(contract,))
        self._decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(as_written)

    def decode(self, record: Record) -> Event:
        """Decode a payload in any legal spelling, fast where possible.

        Raises:
            Poison: see `decode_fully`.
        """
        return self.decode_fast(record.value) or self.decode_fully(record)

    def decode_fast(self, value: bytes) -> Event | None:
        """Return what `decode_fully` would return; None where only that can decide.

        msgspec keeps the last of two fields of one name. Without escapes a payload has two
        quotation marks for each name and each text, so a field too many shows as two marks too
        many.
        """
        if b"\\" in value or _NIL_END in value:
            return None
        try:
            event = self._decoder.decode(value)
            quotes = self._quotes
            for name in self._optional_ids:
                if getattr(event, name) is not None:
                    quotes += 2
            if self._nested:
                quotes += self._decode_nested(event, value)
            if value.count(b'"') != quotes:
                return None
            for name, since in self._times:
                moment = parse_time(getattr(event, name))
                if since is not None and moment < since:
                    return None
                setattr(event, name, moment)
        except (ValueError, RecursionError):
            return None
        return event

    def _decode_nested(self, event: Event, value: bytes) -> int:
        """Decode the nested objects in place; return how many quotation marks they have.

        Raises:
            ValueError: only the full decoder can decide.
        """
        # The levels of a nested object count from the payload's first bracket on.
        if value.count(b"{") + value.count(b"[") > strict_json.MAX_DEPTH:
            raise ValueError("May be nested too deep.")
        quotes = 0
        for name in self._nested:
            raw = bytes(getattr(event, name))
            nested = strict_json.loads(raw)
            if not isinstance(nested, dict | None):
                raise ValueError("Must be an object or null.")  # noqa: TRY004 - caught as the others
            setattr(event, name, nested)
            quotes += raw.count(b'"')
        return quotes

    def decode_fully(self, record: Record) -> Event:
        """Decode a payload in any legal spelling.

        Raises:
            Poison: not one JSON object, or the first field that breaks the contract, with a code
                (see `Payload`).
        """
        payload = Payload(record)
        return self._contract(**{name: read(payload) for name, read in self._readers.items()})


def _reads(method: Callable[..., Any], name: str, **bounds: Any) -> Read:
    return lambda payload: method(payload, name, **bounds)


def _reads_optional(method: Callable[..., UUID | dict[str, Any]], name: str) -> Read:
    return lambda payload: method(payload, name) if payload.has(name) else None
