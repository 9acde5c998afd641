"""Ids: UUIDs, time-ordered (v7) where we make them."""

import re
from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from msgspec import convert
from uuid_utils.compat import uuid7

__all__ = ["NIL", "Id", "array_text", "earliest_id", "new_id", "parse_id"]

NIL = UUID(int=0)

Id = UUID | str
"""An id on its way to a wire: as text where it came from SQL so, since a thousand of them count."""

_DASHED = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# The legal spellings beside RFC 9562 with dashes and bare hex: as a URN, and in braces (GUID).
_RARE_SPELLING = re.compile(rf"\{{{_DASHED}\}}|urn:uuid:{_DASHED}", re.IGNORECASE | re.ASCII)


def new_id() -> UUID:
    """Make a UUID v7: unique, and ordered by the time it was made."""
    return uuid7()


def earliest_id(moment: datetime) -> UUID:
    """Return the lowest UUID v7 that `new_id` can make at that moment, to compare ids with."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)


def array_text(ids: Iterable[Id]) -> str:
    """Write ids as PostgreSQL's text of an array: psycopg takes ten times as long for a list."""
    return f"{{{','.join(map(str, ids))}}}"


def parse_id(text: object) -> UUID:
    """Read one id in any legal spelling.

    `uuid.UUID` alone is too kind: it drops dashes and braces wherever they stand.

    Raises:
        ValueError: not a string, not a legal spelling, or the nil UUID.
    """
    if not isinstance(text, str) or len(text) > 45:
        raise ValueError("Must be a UUID.")
    # Consumers read half a dozen a message: msgspec takes a fifth of the time of UUID().
    try:
        value = convert(text, UUID)
    except ValueError:
        if not _RARE_SPELLING.fullmatch(text):
            raise ValueError("Must be a UUID.") from None
        value = UUID(text.lower())  # UUID() knows a URN in lower case only
    if not value.int:
        raise ValueError("Must not be the nil UUID.")
    return value
