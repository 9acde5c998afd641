"""Bodies of the sessions API; names as the front end writes and reads them."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from pinactivity.http.fields import IdField, UtcField
from pinactivity.http.openapi import BEACON_HELP
from sessions.device import DeviceType
from sessions.lifecycle import LinkOutcome, Status, duration_seconds
from sessions.models import Session, choices

OUTCOMES = [(o.value, o.value) for o in LinkOutcome if o is not LinkOutcome.STALE]


@extend_schema_field(OpenApiTypes.INT)
class DurationSecondsField(serializers.Field[Any, Any, int | None, Any]):
    """The Duration of a closed session or view in whole seconds; null while it is Active."""

    def __init__(self) -> None:
        super().__init__(source="*", read_only=True, allow_null=True)

    def to_representation(self, row: Any) -> int | None:
        if row.duration is None:
            return None
        return duration_seconds(row.created_at, row.last_activity_at)


class StartedSessionResponse(serializers.Serializer[None]):
    SessionId = serializers.UUIDField()
    AnonymousId = serializers.UUIDField()
    Status = serializers.ChoiceField(choices=choices(Status))
    IsNew = serializers.BooleanField()


@extend_schema_serializer(component_name="Heartbeat")
class HeartbeatRequest(serializers.Serializer[None]):
    SessionId = IdField()


@extend_schema_serializer(component_name="HeartbeatBeacon")
class HeartbeatBeacon(HeartbeatRequest):
    """The same as the JSON text that sendBeacon sends, which can set no header."""

    AnonymousId = IdField(required=False, help_text=BEACON_HELP)


class HeartbeatResponse(serializers.Serializer[None]):
    SessionId = serializers.UUIDField()
    Restarted = serializers.BooleanField()


class LinkedSessionResponse(serializers.Serializer[None]):
    Outcome = serializers.ChoiceField(choices=OUTCOMES)
    SessionId = serializers.UUIDField()


class OwnSession(serializers.Serializer[Session]):
    """A session as its user sees it: never an address."""

    SessionId = serializers.UUIDField(source="id")
    Status = serializers.ChoiceField(source="status", choices=choices(Status))
    CreatedAt = UtcField(source="created_at")
    LastActivityAt = UtcField(source="last_activity_at")
    EndedAt = UtcField(source="ended_at", allow_null=True)
    DurationSeconds = DurationSecondsField()
    Browser = serializers.CharField(source="browser")
    Os = serializers.CharField(source="os")
    DeviceType = serializers.ChoiceField(source="device_type", choices=choices(DeviceType))


class OwnSessionsResponse(serializers.Serializer[Any]):
    Items = OwnSession(many=True)
    NextCursor = serializers.CharField(allow_null=True)
