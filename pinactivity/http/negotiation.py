"""Which media types come in and go out. Django REST imports this by its settings."""

from collections.abc import Iterable

from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


def media_type(request: Request) -> str:
    """Return the media type of a request's body, in lower case and without parameters."""
    return (request.content_type or "").partition(";")[0].strip().lower()


class OneRepresentation(BaseContentNegotiation):
    """Answers JSON whatever Accept prefers: there is nothing else to choose (RFC 9110, 12.5.1)."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        wanted = media_type(request)
        return next((parser for parser in parsers if parser.media_type == wanted), None)

    def select_renderer(
        self,
        request: Request,
        renderers: Iterable[BaseRenderer],
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
