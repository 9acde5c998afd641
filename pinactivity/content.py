"""What comes in as a body and what goes out: strict JSON, whatever the client prefers."""

from collections.abc import Iterable, Mapping
from typing import Any

from rest_framework.exceptions import ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from pinactivity import strict_json


class StrictJSONParser(BaseParser):
    """Parse a body as strict JSON.

    Raises:
        ParseError: see `strict_json.loads`.
        RequestDataTooBig: larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
    """

    media_type = "application/json"

    def parse(
        self,
        stream: Any,
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        request: Request = (parser_context or {})["request"]
        try:
            return strict_json.loads(request.body)  # bounded by Django, as a stream is not
        except strict_json.InvalidJSON as fault:
            raise ParseError(str(fault)) from None


class BeaconParser(StrictJSONParser):
    """Parse a beacon as strict JSON: sendBeacon calls it text, lest the browser ask first."""

    media_type = "text/plain"


class OneRepresentation(BaseContentNegotiation):
    """Answer JSON whatever Accept says: there is nothing else to choose (RFC 9110, 12.5.1)."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        offered = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == offered), None)

    def select_renderer(
        self,
        request: Request,
        renderers: Iterable[BaseRenderer],
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
