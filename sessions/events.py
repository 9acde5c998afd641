"""What sessions tell other services (design, section 8). No Device field, ever."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from pinactivity.ids import Id
from pinactivity.times import iso_utc
from sessions.lifecycle import duration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLinked:
    """A guest's session got its user, or a switch made a new one with its user (INV-SES-002)."""

    TOPIC: ClassVar = "pin.user-activity.session-linked.v1"
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

    TOPIC: ClassVar = "pin.user-activity.session-ended.v1"
    EVENT_TYPE: ClassVar = "SessionEndedKafkaEvent"
    AGGREGATE_TYPE: ClassVar = "Session"
    CONTRACT_VERSION: ClassVar = 1

    session_id: Id
    anonymous_id: Id
    user_id: Id | None
    created_at: datetime
    last_activity_at: datetime
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
            "CreatedAt": iso_utc(self.created_at),
            "LastActivityAt": iso_utc(self.last_activity_at),
            "DurationSeconds": duration_seconds(self.created_at, self.last_activity_at),
        }
