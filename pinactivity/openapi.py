"""What every operation of the schema shares: headers, and problems by their codes."""

from collections import defaultdict
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from pinactivity.problems import PROBLEMS


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
    """Document the answers of an operation that fail, by status.

    Args:
        codes: Keys of PROBLEMS, besides those that any operation may answer.
    """
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in (*codes, "METHOD_NOT_ALLOWED", "USER_ACTIVITY_STORAGE_UNAVAILABLE"):
        by_status[PROBLEMS[code].status].append(code)
    return {
        (status, "application/problem+json"): OpenApiResponse(Problem, " · ".join(names))
        for status, names in by_status.items()
    }


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


BEARER: Any = [{"bearer": []}]  # the decorator's annotation knows names only

PAGING = [
    OpenApiParameter("Cursor", str, description="NextCursor of the page before."),
    OpenApiParameter("Limit", int, description="Items a page: 50, at most 200."),
]
