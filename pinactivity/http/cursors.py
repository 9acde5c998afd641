"""Cursor pages, newest first, ordered by (created_at, id), which has an index."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from pinactivity.core.errors import ValidationFailed
from pinactivity.core.ids import parse_id
from pinactivity.core.times import iso_utc, parse_time

DEFAULT_LIMIT = 50
MOST_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Page:
    """Where a page begins, and how many items it has."""

    after: tuple[datetime, UUID] | None
    limit: int


def parse_page(query: Mapping[str, str]) -> Page:
    """Read `Cursor` and `Limit`.

    Raises:
        ValidationFailed: the cursor is not one that we wrote, or the limit is not from 1 to 200.
    """
    limit = query.get("Limit", str(DEFAULT_LIMIT))
    if not (
        limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MOST_LIMIT
    ):
        raise ValidationFailed({"Limit": [f"Must be from 1 to {MOST_LIMIT}."]})
    cursor = query.get("Cursor")
    return Page(None if cursor is None else _decode(cursor), int(limit))


def take(rows: QuerySet[Any], page: Page) -> tuple[list[Any], str | None]:
    """Read a page of rows that have `created_at` and `id`.

    Returns:
        The rows, and the cursor of the next page; None at the end.
    """
    if page.after is not None:
        created_at, row_id = page.after
        rows = rows.filter(created_at__lte=created_at).filter(
            Q(created_at__lt=created_at) | Q(id__lt=row_id)
        )
    found = list(rows.order_by("-created_at", "-id")[: page.limit + 1])
    if len(found) <= page.limit:
        return found, None
    last = found[page.limit - 1]
    return found[: page.limit], _encode(last.created_at, last.id)


def _encode(created_at: datetime, row_id: UUID) -> str:
    text = json.dumps([iso_utc(created_at), str(row_id)])
    return base64.urlsafe_b64encode(text.encode()).decode()


def _decode(cursor: str) -> tuple[datetime, UUID]:
    try:
        text = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
        created_at, row_id = json.loads(text)
        after = parse_time(created_at), parse_id(row_id)
    except (ValueError, TypeError, binascii.Error, RecursionError):
        after = None
    if after is None or _encode(*after) != cursor:  # we never wrote another spelling
        raise ValidationFailed({"Cursor": ["Must be the NextCursor of a page."]})
    return after
