"""The service's paths, and /bench/noop: the floor of any endpoint on this server."""

from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from pinactivity.urls import handler400, handler404, handler500
from pinactivity.urls import urlpatterns as service_urlpatterns

__all__ = ["handler400", "handler404", "handler500", "urlpatterns"]


class NoOpView(APIView):
    def post(self, request: Request) -> Response:
        """Answer as a heartbeat does, without having done anything."""
        return Response({"SessionId": "00000000-0000-0000-0000-000000000000", "Restarted": False})


urlpatterns = [path("bench/noop", NoOpView.as_view()), *service_urlpatterns]
