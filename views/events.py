"""What views report to other services (design, section 8)."""

from typing import Any, ClassVar

import msgspec

from pinactivity.core.events import EventFields
from pinactivity.core.ids import Id
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED


class PropertyObjectViewEnded(EventFields, frozen=True, kw_only=True):
    """A view went from Active to Inactive: exactly one per view (INV-LV-008)."""

    TOPIC: ClassVar[str] = PROPERTY_OBJECT_VIEW_ENDED
    EVENT_TYPE: ClassVar[str] = "PropertyObjectViewEndedKafkaEvent"
    AGGREGATE_TYPE: ClassVar[str] = "PropertyObjectView"
    CONTRACT_VERSION: ClassVar[int] = 1

    property_object_view_id: Id
    property_object_id: Id
    session_id: Id
    anonymous_id: Id
    user_id: Id | None
    """The session's user at closing time, not the snapshot of the opening."""
    view_source: str
    created_at: str = msgspec.field(name="ViewedAt")
    """ISO 8601 as `iso_utc` writes it, straight from SQL, as is `last_activity_at`."""
    last_activity_at: str
    duration_seconds: int
    """Whole seconds, rounded down (INV-SES-005)."""
    filter_snapshot: dict[str, Any] | None

    @property
    def aggregate_id(self) -> Id:
        return self.property_object_view_id
