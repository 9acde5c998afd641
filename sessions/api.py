"""The sessions API: parse, call one service, present."""

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from pinactivity.client_ip import client_ip
from pinactivity.request_headers import optional_anonymous_id, required_anonymous_id, user_agent
from sessions.device import Device, identify_device
from sessions.lifecycle import Status
from sessions.serializers import HeartbeatRequest
from sessions.services import beat_session, start_session


def calling_device(request: Request) -> Device:
    """Describe the device that sent a request."""
    return identify_device(user_agent(request), client_ip(request))


class SessionsView(APIView):
    def post(self, request: Request) -> Response:
        """Start the device's session, or restore the Active one it has."""
        started = start_session(
            anonymous_id=optional_anonymous_id(request),
            user_id=None,
            device=calling_device(request),
        )
        return Response(
            {
                "SessionId": started.session.session_id,
                "AnonymousId": started.session.anonymous_id,
                "Status": Status.ACTIVE,
                "IsNew": started.is_new,
            },
            status=201 if started.is_new else 200,
        )


class SessionHeartbeatView(APIView):
    def post(self, request: Request) -> Response:
        """Extend the device's session, or restart it."""
        anonymous_id = required_anonymous_id(request)
        device = calling_device(request)
        body = HeartbeatRequest(data=request.data)
        body.is_valid(raise_exception=True)
        beat = beat_session(
            session_id=body.validated_data["SessionId"],
            anonymous_id=anonymous_id,
            user_id=None,
            device=device,
        )
        return Response({"SessionId": beat.session.session_id, "Restarted": beat.restarted})
