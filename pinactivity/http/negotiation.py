"""What goes out: JSON, whatever the client prefers. Django REST imports this by its settings."""

from collections.abc import Iterable

from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


class OneRepresentation(BaseContentNegotiation):
    """Answer JSON whatever Accept says: there is nothing else to choose (RFC 9110, 12.5.1)."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        return None  # JSONRequest has none

    def select_renderer(
        self,
        request: Request,
        renderers: Iterable[BaseRenderer],
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        renderer = next(iter(renderers))
        return renderer, renderer.media_type
