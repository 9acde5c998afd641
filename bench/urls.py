"""The service's paths, with one more beside the heartbeat's: the floor of any endpoint there."""

from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response

import sessions.urls
from pinactivity.http.base import ApiView
from pinactivity.urls import handler400, handler404, handler500, urlpatterns

__all__ = ["handler400", "handler404", "handler500", "urlpatterns"]


class NoOpView(ApiView):
    def post(self, request: Request) -> Response:
        """Answer as a heartbeat does, without having done anything."""
        return Response({"SessionId": "00000000-0000-0000-0000-000000000000", "Restarted": False})


# Found in as many steps as the heartbeat, and under /api/ as it is, for what middleware does there.
sessions.urls.urlpatterns.insert(1, path("sessions/noop", NoOpView.as_view()))
