"""Bodies of the views API; names as the front end writes them."""

import json
from typing import Any

from drf_spectacular.utils import extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from pinactivity.http.fields import IdField, UtcField
from pinactivity.http.openapi import BEACON_HELP
from sessions.lifecycle import Status
from sessions.models import choices
from sessions.serializers import DurationSecondsField
from views.lifecycle import FILTER_SNAPSHOT_BYTES, ViewSource
from views.models import PropertyObjectView
from views.stats_models import PropertyObjectViewStats


@extend_schema_field(
    {
        "type": "object",
        "additionalProperties": True,
        "nullable": True,
        "description": f"At most {FILTER_SNAPSHOT_BYTES} bytes as compact JSON.",
    }
)
class FilterSnapshotField(serializers.Field[Any, Any, Any, Any]):
    """Any JSON object of at most 8 KiB; the parser has refused what jsonb does not take."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("Must be an object.")
        compact = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        if len(compact.encode()) > FILTER_SNAPSHOT_BYTES:
            raise serializers.ValidationError(f"Must take at most {FILTER_SNAPSHOT_BYTES} bytes.")
        return data

    def to_representation(self, value: Any) -> Any:
        return value


class OpenedViewResponse(serializers.Serializer[None]):
    PropertyObjectViewId = serializers.UUIDField()
    SessionId = serializers.UUIDField()
    IsNew = serializers.BooleanField()
    Restarted = serializers.BooleanField()


class ViewHeartbeatResponse(serializers.Serializer[None]):
    Accepted = serializers.BooleanField()


@extend_schema_serializer(component_name="OpenView")
class OpenViewRequest(serializers.Serializer[None]):
    SessionId = IdField()
    PropertyObjectId = IdField()
    ViewSource = serializers.ChoiceField(
        choices=choices(ViewSource),
        error_messages={"invalid_choice": f"Must be one of {', '.join(ViewSource)}."},
    )
    FilterSnapshot = FilterSnapshotField(required=False, allow_null=True, default=None)


@extend_schema_serializer(component_name="OpenViewBeacon")
class OpenViewBeacon(OpenViewRequest):
    """The same as the JSON text that sendBeacon sends, which can set no header."""

    AnonymousId = IdField(required=False, help_text=BEACON_HELP)


class OwnPropertyObjectView(serializers.Serializer[PropertyObjectView]):
    """A view as its user sees it: what its event tells, and the status."""

    PropertyObjectViewId = serializers.UUIDField(source="id")
    PropertyObjectId = serializers.UUIDField(source="property_object_id")
    SessionId = serializers.UUIDField(source="session_id")
    AnonymousId = serializers.UUIDField(source="session.anonymous_id")
    UserId = serializers.UUIDField(source="session.user_id")
    ViewSource = serializers.ChoiceField(source="view_source", choices=choices(ViewSource))
    Status = serializers.ChoiceField(source="status", choices=choices(Status))
    ViewedAt = UtcField(source="created_at")
    LastActivityAt = UtcField(source="last_activity_at")
    DurationSeconds = DurationSecondsField()
    FilterSnapshot = FilterSnapshotField(source="filter_snapshot", allow_null=True)


class OwnPropertyObjectViewsResponse(serializers.Serializer[Any]):
    Items = OwnPropertyObjectView(many=True)
    NextCursor = serializers.CharField(allow_null=True)


class ViewStatsResponse(serializers.Serializer[PropertyObjectViewStats]):
    """Of the views that have ended; one under way is none of them yet."""

    PropertyObjectId = serializers.UUIDField(source="property_object_id")
    ViewsCount = serializers.IntegerField(source="views_count")
    TotalDurationSeconds = serializers.IntegerField(source="total_duration_seconds")
    LastViewedAt = UtcField(
        source="last_viewed_at",
        allow_null=True,
        help_text="When the newest of them was opened; null when there is none.",
    )
