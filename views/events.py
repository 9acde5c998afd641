"""What views tell other services (design, section 8)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from pinactivity.core.ids import Id
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyObjectViewEnded:
    """A view went from Active to Inactive: exactly one per view (INV-LV-008)."""

    TOPIC: ClassVar = PROPERTY_OBJECT_VIEW_ENDED
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
    created_at: str
    """ISO 8601 as `iso_utc` writes it, straight from SQL, as is `last_activity_at`."""
    last_activity_at: str
    duration_seconds: int
    """Whole seconds, rounded down (INV-SES-005)."""
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
            "ViewedAt": self.created_at,
            "LastActivityAt": self.last_activity_at,
            "DurationSeconds": self.duration_seconds,
            "FilterSnapshot": self.filter_snapshot,
        }
