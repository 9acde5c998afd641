"""What every endpoint of the API is: strict JSON comes in."""

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser
from rest_framework.views import APIView

from pinactivity.core import strict_json

BEACON = "text/plain"
"""What sendBeacon calls its JSON, because a browser sends text without a preflight request."""


class StrictJSONParser(BaseParser):
    """Reads a body that is strict JSON.

    Raises:
        ParseError: see `strict_json.loads`.
        RequestDataTooBig: larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
    """

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        # `stream` has no limit; Django limits `body` by DATA_UPLOAD_MAX_MEMORY_SIZE.
        document = parser_context["request"].body if parser_context else stream.read()
        try:
            return strict_json.loads(document)
        except strict_json.InvalidJSON as exc:
            raise ParseError(str(exc)) from None


class BeaconParser(StrictJSONParser):
    """Reads the body of a beacon."""

    media_type = BEACON


class ApiView(APIView):
    """What every endpoint of the API derives from."""

    parser_classes = [StrictJSONParser, BeaconParser]
