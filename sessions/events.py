"""What sessions report to other services (design, section 8). No Device field, ever."""

from typing import ClassVar

from pinactivity.core.events import EventFields
from pinactivity.core.ids import Id
from pinactivity.kafka.topics import SESSION_ENDED, SESSION_LINKED


class SessionLinked(EventFields, frozen=True, kw_only=True):
    """A guest's session got its user, or a switch made a new one with its user (INV-SES-002)."""

    TOPIC: ClassVar[str] = SESSION_LINKED
    EVENT_TYPE: ClassVar[str] = "SessionLinkedKafkaEvent"
    AGGREGATE_TYPE: ClassVar[str] = "Session"
    CONTRACT_VERSION: ClassVar[int] = 1

    session_id: Id
    anonymous_id: Id
    user_id: Id
    linked_at: str
    """ISO 8601 as `iso_utc` writes it."""

    @property
    def aggregate_id(self) -> Id:
        return self.session_id


class SessionEnded(EventFields, frozen=True, kw_only=True):
    """A session went from Active to Inactive (INV-SES-005): exactly one per session."""

    TOPIC: ClassVar[str] = SESSION_ENDED
    EVENT_TYPE: ClassVar[str] = "SessionEndedKafkaEvent"
    AGGREGATE_TYPE: ClassVar[str] = "Session"
    CONTRACT_VERSION: ClassVar[int] = 1

    session_id: Id
    anonymous_id: Id
    user_id: Id | None
    created_at: str
    """ISO 8601 as `iso_utc` writes it, straight from SQL, as is `last_activity_at`."""
    last_activity_at: str
    duration_seconds: int
    """Whole seconds, rounded down (INV-SES-005)."""

    @property
    def aggregate_id(self) -> Id:
        return self.session_id
