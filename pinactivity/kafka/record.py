"""A message as its reader gets it, and the verdict on one that breaks its contract."""

from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from pinactivity.core import strict_json
from pinactivity.core.ids import parse_id

Headers = tuple[tuple[str, bytes | None], ...]


class Poison(Exception):
    """This message can never be handled: to the dead-letter topic with it.

    Args:
        reason: A short code for `dlq-reason`, log and metric ("session-id-missing"); never
            a value of the message.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message as the handler gets it: bytes outside, our headers strictly decoded.

    A Struct is made in a twentieth of a frozen dataclass's time. It refers to nothing that could
    refer back, so the garbage collector need not know it.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    message_id: UUID
    """Of the header MessageId: the SourceEventId of the specification."""
    created_at: datetime
    """Of the header CreatedAt, aware; the broker's timestamp when absent or unreadable."""
    raw_headers: Headers = ()

    @property
    def headers(self) -> dict[str, str]:
        """Decode the headers; those that are not UTF-8 are left out. The last of a name counts."""
        headers: dict[str, str] = {}
        for name, content in self.raw_headers:
            if content is not None:
                with suppress(UnicodeDecodeError):
                    headers[name] = content.decode()
        return headers

    @property
    def correlation_id(self) -> UUID:
        """Read the header CorrelationId; the MessageId where it is absent or no id."""
        try:
            return parse_id(self.headers.get("CorrelationId"))
        except ValueError:
            return self.message_id

    def payload(self) -> dict[str, Any]:
        """Decode the value: one JSON object, as strict as `pinactivity.core.strict_json`.

        Raises:
            Poison: `value-not-json` or `value-not-an-object`.
        """
        try:
            payload = strict_json.loads(self.value)
        except strict_json.InvalidJSON:
            raise Poison("value-not-json") from None
        if not isinstance(payload, dict):
            raise Poison("value-not-an-object")
        return payload
