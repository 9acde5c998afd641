"""The views API: parse, call one service, present."""

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from pinactivity.errors import ValidationFailed
from pinactivity.ids import parse_id
from pinactivity.request_headers import required_anonymous_id
from sessions.api import calling_device
from views.lifecycle import ViewSource
from views.serializers import OpenViewRequest
from views.services import beat_view, open_view


class PropertyObjectViewsView(APIView):
    def post(self, request: Request) -> Response:
        """Open a view, or extend the one of that object that is open."""
        anonymous_id = required_anonymous_id(request)
        device = calling_device(request)
        body = OpenViewRequest(data=request.data)
        body.is_valid(raise_exception=True)
        opened = open_view(
            session_id=body.validated_data["SessionId"],
            anonymous_id=anonymous_id,
            user_id=None,
            device=device,
            property_object_id=body.validated_data["PropertyObjectId"],
            view_source=ViewSource(body.validated_data["ViewSource"]),
            filter_snapshot=body.validated_data["FilterSnapshot"],
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


class PropertyObjectViewHeartbeatView(APIView):
    def put(self, request: Request, view_id: str) -> Response:
        """Extend a view and its session."""
        anonymous_id = required_anonymous_id(request)
        try:
            identified = parse_id(view_id)
        except ValueError as fault:
            raise ValidationFailed({"id": [str(fault)]}) from None
        return Response({"Accepted": beat_view(view_id=identified, anonymous_id=anonymous_id)})
