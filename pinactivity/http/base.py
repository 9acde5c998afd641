"""What every endpoint of the API is: strict JSON comes in."""

from typing import Any

from django.http import HttpRequest
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.views import APIView

from pinactivity.core import strict_json

JSON, BEACON = "application/json", "text/plain"
"""sendBeacon calls its JSON text, lest the browser ask first."""


def media_type(request: Request) -> str:
    """Return what a request says its body is, without parameters."""
    return (request.content_type or "").partition(";")[0].strip().lower()


class JSONRequest(Request):
    """A request whose body is strict JSON.

    Not by Django REST's parsers: they serve forms and files as well, which here cost a tenth of
    a heartbeat and are never sent.
    """

    _body: Any = None
    _is_read = False

    def __init__(self, request: HttpRequest, **options: Any) -> None:
        super().__init__(request, **options)
        # Found by Django REST's __getattr__ otherwise, which takes longer than what is read.
        self.META = request.META
        self.headers = request.headers

    @property
    def data(self) -> Any:
        """The body, parsed; {} for a call that has none.

        Raises:
            ParseError: see `strict_json.loads`.
            UnsupportedMediaType: neither JSON nor a beacon.
            RequestDataTooBig: larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
        """
        if not self._is_read:
            self._body = self._read()
            self._is_read = True
        return self._body

    def _read(self) -> Any:
        if not self._request.META.get("CONTENT_LENGTH") or not (document := self._request.body):
            return {}
        if media_type(self) not in {JSON, BEACON}:
            raise UnsupportedMediaType(self.content_type)
        try:
            return strict_json.loads(document)
        except strict_json.InvalidJSON as exc:
            raise ParseError(str(exc)) from None


class ApiView(APIView):
    """What every endpoint of the API derives from."""

    def initialize_request(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Request:
        return JSONRequest(request, negotiator=self.get_content_negotiator())
