"""The JSON of dev-stats (design, section 11)."""

from typing import Any

from rest_framework import serializers

from pinactivity.http.fields import UtcField

_SECONDS = "Null where there is none."


class SessionFiguresResponse(serializers.Serializer[Any]):
    Sessions = serializers.IntegerField()
    AvgDurationSeconds = serializers.FloatField(allow_null=True, help_text=f"To 0.1 s. {_SECONDS}")
    MedianDurationSeconds = serializers.FloatField(allow_null=True, help_text=_SECONDS)
    P95DurationSeconds = serializers.FloatField(allow_null=True, help_text=_SECONDS)


class SessionsOfKind(SessionFiguresResponse):
    ViewerKind = serializers.ChoiceField(choices=["Guest", "User"])


class SessionsOfDay(SessionFiguresResponse):
    Day = serializers.DateField(help_text="In UTC: of the first view of yours in the session.")


class SessionsSummaryResponse(serializers.Serializer[Any]):
    From = UtcField()
    To = UtcField()
    FreshAsOf = UtcField(
        allow_null=True, help_text="When the newest of what is counted was stored; else null."
    )
    Total = SessionFiguresResponse()
    ByViewerKind = SessionsOfKind(many=True)
    ByDay = SessionsOfDay(many=True, help_text="Days without a session are left out.")


class ViewFiguresResponse(serializers.Serializer[Any]):
    Views = serializers.IntegerField()
    UniqueViewers = serializers.IntegerField(help_text="Users, and devices of guests.")
    TotalDurationSeconds = serializers.IntegerField()
    AvgDurationSeconds = serializers.FloatField(help_text="To 0.1 s.")


class ViewsOfKind(ViewFiguresResponse):
    ViewerKind = serializers.ChoiceField(choices=["Guest", "Investor", "Agent"])


class PropertyObjectSummary(ViewFiguresResponse):
    PropertyObjectId = serializers.UUIDField()
    ByViewerKind = ViewsOfKind(many=True)


class PropertyObjectsSummaryResponse(serializers.Serializer[Any]):
    From = UtcField()
    To = UtcField()
    FreshAsOf = UtcField(
        allow_null=True, help_text="When the newest of what is counted was stored; else null."
    )
    Items = PropertyObjectSummary(many=True, help_text="The most viewed first, 100 at most.")
