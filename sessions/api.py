"""The sessions API: parse, call one service, present."""

from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from pinactivity.http.auth import optional_user, required_actor
from pinactivity.http.base import ApiView
from pinactivity.http.client_ip import client_ip
from pinactivity.http.cursors import parse_page
from pinactivity.http.fields import read_id
from pinactivity.http.headers import optional_anonymous_id, required_anonymous_id, user_agent
from pinactivity.http.openapi import (
    ANSWER_HEADERS,
    BEARER,
    BODY_PROBLEMS,
    OPTIONAL_BEARER,
    PAGING,
    device_id,
    problems,
)
from pinactivity.http.rate_limits import heartbeats, limit_call, limit_start
from pinactivity.telemetry.metrics import SIGN_INS
from sessions.device import Device, identify_device
from sessions.lifecycle import Status
from sessions.selectors import sessions_of_user
from sessions.serializers import (
    HeartbeatBeacon,
    HeartbeatRequest,
    HeartbeatResponse,
    LinkedSessionResponse,
    OwnSession,
    OwnSessionsResponse,
    StartedSessionResponse,
)
from sessions.services import link_session, record_heartbeat, start_session


def calling_device(request: Request) -> Device:
    """Describe the device that sent a request."""
    return identify_device(user_agent(request), client_ip(request))


def restarting_user(request: Request, device: Device) -> UUID | None:
    """Count a restart as a start, and return the user of the new session.

    Raises:
        RateLimited: the limit of starts is reached. Heartbeats with unknown ids count as starts.
    """
    limit_start(address=device.ip_address)
    return optional_user(request)


class SessionsView(ApiView):
    @extend_schema(
        operation_id="start_session",
        parameters=[device_id(required=False), *ANSWER_HEADERS],
        request=None,
        responses={
            200: StartedSessionResponse,
            201: StartedSessionResponse,
            **problems("VALIDATION_FAILED", "USER_ACTIVITY_SESSION_ACTIVE_RACE", "RATE_LIMITED"),
        },
        auth=OPTIONAL_BEARER,
    )
    def post(self, request: Request) -> Response:
        """Start the device's session, or restore the Active one it has."""
        anonymous_id = optional_anonymous_id(request)
        device = calling_device(request)
        limit_start(address=device.ip_address)
        started = start_session(
            anonymous_id=anonymous_id, user_id=optional_user(request), device=device
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


class SessionHeartbeatView(ApiView):
    @extend_schema(
        operation_id="beat_session",
        parameters=[device_id(required=True), *ANSWER_HEADERS],
        request={"application/json": HeartbeatRequest, "text/plain": HeartbeatBeacon},
        responses={
            200: HeartbeatResponse,
            **problems(
                *BODY_PROBLEMS,
                "USER_ACTIVITY_ANONYMOUS_ID_REQUIRED",
                "USER_ACTIVITY_SESSION_ACTIVE_RACE",
                "RATE_LIMITED",
            ),
        },
        auth=OPTIONAL_BEARER,
    )
    def post(self, request: Request) -> Response:
        """Extend the device's session, or restart it."""
        anonymous_id = required_anonymous_id(request, takes_beacons=True)
        device = calling_device(request)
        session_id = read_id(request.data, "SessionId")
        heartbeats.count(anonymous_id)
        heartbeat = record_heartbeat(
            session_id=session_id,
            anonymous_id=anonymous_id,
            device=device,
            restart_for=lambda: restarting_user(request, device),
        )
        return Response(
            {
                "SessionId": str(heartbeat.session.session_id),
                "Restarted": heartbeat.restarted,
            }
        )


class SessionLinkView(ApiView):
    @extend_schema(
        operation_id="link_session",
        parameters=[device_id(required=True), *ANSWER_HEADERS],
        request=None,
        responses={
            200: LinkedSessionResponse,
            **problems(
                "UNAUTHORIZED",
                "USER_ACTIVITY_ANONYMOUS_ID_REQUIRED",
                "USER_ACTIVITY_SESSION_NOT_FOUND",
                "RATE_LIMITED",
            ),
        },
        auth=BEARER,
    )
    def post(self, request: Request) -> Response:
        """Link the device's session to the user of the token."""
        actor = required_actor(request)
        anonymous_id = required_anonymous_id(request)
        limit_call("link", anonymous_id=anonymous_id, address=client_ip(request))
        linked = link_session(anonymous_id=anonymous_id, user_id=actor.user_id)
        SIGN_INS.labels("api", linked.outcome).inc()
        return Response({"Outcome": linked.outcome, "SessionId": linked.session_id})


class OwnSessionsView(ApiView):
    @extend_schema(
        operation_id="list_own_sessions",
        parameters=[*PAGING, *ANSWER_HEADERS],
        responses={200: OwnSessionsResponse, **problems("UNAUTHORIZED", "VALIDATION_FAILED")},
        auth=BEARER,
    )
    def get(self, request: Request) -> Response:
        """List the sessions of the token's user, the newest first."""
        actor = required_actor(request)
        sessions, cursor = sessions_of_user(actor.user_id, parse_page(request.query_params))
        items = OwnSession(sessions, many=True)  # type: ignore[arg-type]  # many takes a list
        return Response({"Items": items.data, "NextCursor": cursor})
