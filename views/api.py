"""The views API: parse, call one service, present."""

from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from pinactivity.core.ids import parse_id
from pinactivity.http.auth import required_actor
from pinactivity.http.base import ApiView
from pinactivity.http.cursors import parse_page
from pinactivity.http.fields import read_id
from pinactivity.http.headers import required_anonymous_id
from pinactivity.http.openapi import (
    ANSWER_HEADERS,
    BEARER,
    BODY_PROBLEMS,
    OPTIONAL_BEARER,
    PAGING,
    PERIOD,
    device_id,
    problems,
)
from pinactivity.http.periods import parse_period
from pinactivity.http.rate_limits import heartbeats, limit_call
from sessions.api import calling_device, restarting_user
from views.lifecycle import ViewSource
from views.selectors import views_of_user
from views.serializers import (
    OpenedViewResponse,
    OpenViewBeacon,
    OpenViewRequest,
    OwnPropertyObjectView,
    OwnPropertyObjectViewsResponse,
    ViewHeartbeatResponse,
    ViewStatsResponse,
)
from views.services import extend_view, open_view
from views.stats import stats_of


class PropertyObjectViewsView(ApiView):
    @extend_schema(
        operation_id="open_view",
        parameters=[device_id(required=True), *ANSWER_HEADERS],
        request={"application/json": OpenViewRequest, "text/plain": OpenViewBeacon},
        responses={
            200: OpenedViewResponse,
            201: OpenedViewResponse,
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
        """Open a view, or extend the one of that object that is open."""
        anonymous_id = required_anonymous_id(request, takes_beacons=True)
        device = calling_device(request)
        body = OpenViewRequest(data=request.data)
        body.is_valid(raise_exception=True)
        limit_call("open", anonymous_id=anonymous_id, address=device.ip_address)
        opened = open_view(
            session_id=body.validated_data["SessionId"],
            anonymous_id=anonymous_id,
            device=device,
            property_object_id=body.validated_data["PropertyObjectId"],
            view_source=ViewSource(body.validated_data["ViewSource"]),
            filter_snapshot=body.validated_data["FilterSnapshot"],
            restart_for=lambda: restarting_user(request, device),
        )
        return Response(
            {
                "PropertyObjectViewId": opened.view_id,
                "SessionId": opened.session_id,
                "IsNew": opened.is_new,
                "Restarted": opened.restarted,
            },
            status=201 if opened.is_new else 200,
        )


class PropertyObjectViewHeartbeatView(ApiView):
    @extend_schema(
        operation_id="beat_view",
        parameters=[
            device_id(required=True),
            OpenApiParameter("view_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            *ANSWER_HEADERS,
        ],
        request=None,
        responses={
            200: ViewHeartbeatResponse,
            **problems("USER_ACTIVITY_ANONYMOUS_ID_REQUIRED", "NOT_FOUND", "RATE_LIMITED"),
        },
    )
    def put(self, request: Request, view_id: str) -> Response:
        """Extend a view and its session."""
        anonymous_id = required_anonymous_id(request)
        try:
            identified = parse_id(view_id)
        except ValueError:
            raise Http404 from None
        heartbeats.count((anonymous_id, identified))
        return Response({"Accepted": extend_view(view_id=identified, anonymous_id=anonymous_id)})


class OwnPropertyObjectViewsView(ApiView):
    @extend_schema(
        operation_id="list_own_views",
        parameters=[
            OpenApiParameter("PropertyObjectId", OpenApiTypes.UUID, description="Of this object."),
            *PERIOD,
            *PAGING,
            *ANSWER_HEADERS,
        ],
        responses={
            200: OwnPropertyObjectViewsResponse,
            **problems("UNAUTHORIZED", "VALIDATION_FAILED"),
        },
        auth=BEARER,
    )
    def get(self, request: Request) -> Response:
        """List the views of the token's user, the newest first, guest ones before a sign-in too."""
        actor = required_actor(request)
        query = request.query_params
        views, cursor = views_of_user(
            actor.user_id,
            parse_page(query),
            parse_period(query),
            property_object_id=(
                read_id(query, "PropertyObjectId") if "PropertyObjectId" in query else None
            ),
        )
        items = OwnPropertyObjectView(views, many=True)  # type: ignore[arg-type]  # many takes a list
        return Response({"Items": items.data, "NextCursor": cursor})


class ViewStatsView(ApiView):
    @extend_schema(
        operation_id="get_view_stats",
        parameters=[
            OpenApiParameter("property_object_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            *ANSWER_HEADERS,
        ],
        responses={200: ViewStatsResponse, **problems("NOT_FOUND")},
    )
    def get(self, request: Request, property_object_id: str) -> Response:
        """Tell what the views of a property object add up to; zeros when it has none."""
        try:
            identified = parse_id(property_object_id)
        except ValueError:
            raise Http404 from None
        return Response(ViewStatsResponse(stats_of(identified)).data)
