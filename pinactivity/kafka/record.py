"""A message as a reader gets it, and the verdict on one that breaks its contract."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from pinactivity.core import strict_json
from pinactivity.core.ids import parse_id

Headers = tuple[tuple[str, bytes | None], ...]
Partition = tuple[str, int]
"""Topic and number."""

NO_ID = UUID(int=0)
NO_TIME = datetime.min.replace(tzinfo=UTC)


class Poison(Exception):
    """This message can never be handled: its consumer dead-letters it.

    Args:
        reason: A short code for `dlq-reason`, log and metric ("session-id-missing"); never
            a value of the message.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Record(msgspec.Struct, gc=False):
    """One message: what the broker gave, and what `read_envelope` has made of its headers.

    A Struct is made in a twentieth of a dataclass's time. It refers to nothing that could refer
    back, so the garbage collector need not know it.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970, the broker's or the producer's."""
    key: bytes | None
    value: bytes
    headers: Headers
    is_tombstone: bool = False
    """The value is null, which `value` shows as empty."""
    message_id: UUID = NO_ID
    """Of the header MessageId: the SourceEventId of the specification."""
    created_at: datetime = NO_TIME
    """Of the header CreatedAt, aware; the broker's timestamp when absent or unreadable."""

    @property
    def topic_partition(self) -> Partition:
        return self.topic, self.partition

    @property
    def is_decoded(self) -> bool:
        """Whether `read_envelope` has accepted the headers: no message has the nil id."""
        return self.message_id is not NO_ID

    @property
    def broker_time(self) -> datetime:
        """Read the broker's timestamp; an absurd one counts as now."""
        try:
            return datetime.fromtimestamp(self.timestamp / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            return datetime.now(UTC)

    @property
    def text_headers(self) -> dict[str, str]:
        """Decode the headers; those that are not UTF-8 are left out. The last of a name counts."""
        headers: dict[str, str] = {}
        for name, content in self.headers:
            if content is not None:
                with suppress(UnicodeDecodeError):
                    headers[name] = content.decode()
        return headers

    @property
    def correlation_id(self) -> UUID:
        """Read the header CorrelationId; the MessageId where it is absent or no id."""
        try:
            return parse_id(self.text_headers.get("CorrelationId"))
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
