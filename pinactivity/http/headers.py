"""The headers that name the caller (design, section 5); each call checks them before any SQL."""

import re
from uuid import UUID

from rest_framework.request import Request

from pinactivity.core.errors import AnonymousIdRequired, ValidationFailed
from pinactivity.core.ids import parse_id
from pinactivity.http.base import BEACON
from pinactivity.http.negotiation import media_type

ANONYMOUS_ID = "X-Anonymous-Id"
_META_ANONYMOUS_ID = "HTTP_X_ANONYMOUS_ID"
"""The header's name in WSGI. `request.headers` would build a mapping of all headers to read one."""
USER_AGENT_LENGTH = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def required_anonymous_id(request: Request, *, takes_beacons: bool = False) -> UUID:
    """Read the device's id from its header.

    Args:
        request: The call.
        takes_beacons: Whether a beacon (sendBeacon, text/plain) may carry the id as `AnonymousId`
            in its body, because it can set no header. A header that is there counts alone.

    Raises:
        AnonymousIdRequired: absent, malformed or nil.
    """
    text: object = request.META.get(_META_ANONYMOUS_ID)
    if (
        text is None
        and takes_beacons
        and media_type(request) == BEACON
        and isinstance(request.data, dict)
    ):
        text = request.data.get("AnonymousId")
    try:
        return parse_id(text)
    except ValueError as exc:
        raise AnonymousIdRequired({ANONYMOUS_ID: [str(exc)]}) from None


def optional_anonymous_id(request: Request) -> UUID | None:
    """Read the device's id where it may not have one yet.

    Raises:
        ValidationFailed: malformed or nil.
    """
    text = request.META.get(_META_ANONYMOUS_ID)
    if text is None:
        return None
    try:
        return parse_id(text)
    except ValueError as exc:
        raise ValidationFailed({ANONYMOUS_ID: [str(exc)]}) from None


def user_agent(request: Request) -> str:
    """Read the User-Agent: 1 to 1024 characters, none of them a control character.

    Raises:
        ValidationFailed: absent, empty, too long, or not text.
    """
    text: str = request.META.get("HTTP_USER_AGENT", "").strip()
    if not 1 <= len(text) <= USER_AGENT_LENGTH:
        raise ValidationFailed({"User-Agent": ["Must have from 1 to 1024 characters."]})
    if _CONTROL.search(text):
        raise ValidationFailed({"User-Agent": ["Must have no control characters."]})
    return text
