"""What sessions tell other services (design, section 8). No Device field, ever."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from pinactivity.core.ids import Id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.topics import SESSION_ENDED, SESSION_LINKED


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLinked:
    """A guest's session got its user, or a switch made a new one with its user (INV-SES-002)."""

    TOPIC: ClassVar = SESSION_LINKED
    EVENT_TYPE: ClassVar = "SessionLinkedKafkaEvent"
    AGGREGATE_TYPE: ClassVar = "Session"
    CONTRACT_VERSION: ClassVar = 1

    session_id: Id
    anonymous_id: Id
    user_id: Id
    linked_at: datetime
    version: int
    """The row's version after the change."""

    @property
    def aggregate_id(self) -> Id:
        return self.session_id

    def payload(self) -> dict[str, Any]:
        return {
            "SessionId": str(self.session_id),
            "AnonymousId": str(self.anonymous_id),
            "UserId": str(self.user_id),
            "LinkedAt": iso_utc(self.linked_at),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """A session went from Active to Inactive (INV-SES-005): exactly one per session."""

    TOPIC: ClassVar = SESSION_ENDED
    EVENT_TYPE: ClassVar = "SessionEndedKafkaEvent"
    AGGREGATE_TYPE: ClassVar = "Session"
    CONTRACT_VERSION: ClassVar = 1

    session_id: Id
    anonymous_id: Id
    user_id: Id | None
    created_at: str
    """ISO 8601 as `iso_utc` writes it, straight from SQL, as is `last_activity_at`."""
    last_activity_at: str
    duration_seconds: int
    """Whole seconds, rounded down (INV-SES-005)."""
    version: int
    """The row's version after the change."""

    @property
    def aggregate_id(self) -> Id:
        return self.session_id

    def payload(self) -> dict[str, Any]:
        return {
            "SessionId": str(self.session_id),
            "AnonymousId": str(self.anonymous_id),
            "UserId": None if self.user_id is None else str(self.user_id),
            "CreatedAt": self.created_at,
            "LastActivityAt": self.last_activity_at,
            "DurationSeconds": self.duration_seconds,
        }
