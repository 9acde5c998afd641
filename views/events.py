"""What views tell other services (design, section 8)."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from pinactivity.ids import Id
from pinactivity.times import iso_utc
from sessions.lifecycle import duration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyObjectViewEnded:
    """A view went from Active to Inactive: exactly one per view (INV-LV-008)."""

    TOPIC: ClassVar = "pin.user-activity.property-object-view-ended.v1"
    EVENT_TYPE: ClassVar = "PropertyObjectViewEndedKafkaEvent"
    AGGREGATE_TYPE: ClassVar = "PropertyObjectView"
    CONTRACT_VERSION: ClassVar = 1

    property_object_view_id: Id
    property_object_id: Id
    session_id: Id
    anonymous_id: Id
    user_id: Id | None
    """The session's user at closing time, not the snapshot of the opening."""
    view_source: str
    created_at: datetime
    last_activity_at: datetime
    filter_snapshot: dict[str, Any] | None
    version: int
    """The row's version after the change."""

    @property
    def aggregate_id(self) -> Id:
        return self.property_object_view_id

    def payload(self) -> dict[str, Any]:
        return {
            "PropertyObjectViewId": str(self.property_object_view_id),
            "PropertyObjectId": str(self.property_object_id),
            "SessionId": str(self.session_id),
            "AnonymousId": str(self.anonymous_id),
            "UserId": None if self.user_id is None else str(self.user_id),
            "ViewSource": self.view_source,
            "ViewedAt": iso_utc(self.created_at),
            "LastActivityAt": iso_utc(self.last_activity_at),
            "DurationSeconds": duration_seconds(self.created_at, self.last_activity_at),
            "FilterSnapshot": self.filter_snapshot,
        }
