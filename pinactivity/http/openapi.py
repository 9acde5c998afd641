"""What the operations of the schema share: headers, parameters, and problems by their codes."""

from collections import defaultdict
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from pinactivity.http.cursors import DEFAULT_LIMIT, MOST_LIMIT
from pinactivity.http.problems import PROBLEMS


class Problem(serializers.Serializer[None]):
    """An error (RFC 9457)."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField(required=False)
    code = serializers.CharField(help_text="Stable; what a program branches on.")
    errors = serializers.DictField(  # type: ignore[assignment]  # shadows what no schema needs
        child=serializers.ListField(child=serializers.CharField()),
        required=False,
        help_text="By field, header or parameter.",
    )


def problems(*codes: str) -> dict[Any, OpenApiResponse]:
    """Document the problems that an operation may answer, by status.

    Args:
        codes: Keys of PROBLEMS, besides those that any operation may answer.
    """
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in dict.fromkeys((*codes, *_OF_ANY)):
        by_status[PROBLEMS[code].status].append(code)
    return {
        (status, "application/problem+json"): OpenApiResponse(Problem, " · ".join(names))
        for status, names in sorted(by_status.items())
    }


# VALIDATION_FAILED, because Django itself may refuse a host or a header.
_OF_ANY = ("VALIDATION_FAILED", "METHOD_NOT_ALLOWED", "USER_ACTIVITY_STORAGE_UNAVAILABLE")
BODY_PROBLEMS = ("PAYLOAD_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE", "VALIDATION_FAILED")


def device_id(*, required: bool) -> OpenApiParameter:
    """Document the header X-Anonymous-Id."""
    return OpenApiParameter(
        "X-Anonymous-Id",
        OpenApiTypes.UUID,
        OpenApiParameter.HEADER,
        required=required,
        description="The id that starting a session answered; the device keeps it for good.",
    )


BEACON_HELP = "In place of the header X-Anonymous-Id."

ANSWER_HEADERS = [
    OpenApiParameter(
        "Retry-After",
        int,
        OpenApiParameter.HEADER,
        required=True,
        description="Seconds to wait before the request is sent again.",
        response=[409, 429, 503],
    ),
    OpenApiParameter(
        "WWW-Authenticate",
        str,
        OpenApiParameter.HEADER,
        required=True,
        description="Bearer; with error=invalid_token when a token came.",
        response=[401],
    ),
]

BEARER: Any = [{"bearer": []}]  # the decorator's annotation knows names only
OPTIONAL_BEARER: Any = [{}, *BEARER]
"""A guest may call too, and a token that is not valid means a guest."""

_MOMENT = {"type": "string", "anyOf": [{"format": "date"}, {"format": "date-time"}]}
PERIOD = [
    OpenApiParameter("From", _MOMENT, description="At this time or later; a date is its 00:00Z."),
    OpenApiParameter("To", _MOMENT, description="Before this time, which is after From."),
]

WHOLE_PERIOD = [
    OpenApiParameter(name, _MOMENT, required=True, description=f"{text}; a date is its 00:00Z.")
    for name, text in (
        ("From", "At this time or later"),
        ("To", "Before this time, which is at most 366 days after From"),
    )
]

PAGING = [
    OpenApiParameter("Cursor", str, description="NextCursor of the page before."),
    OpenApiParameter(
        "Limit",
        {"type": "integer", "minimum": 1, "maximum": MOST_LIMIT, "default": DEFAULT_LIMIT},
        description="Items a page.",
    ),
]
