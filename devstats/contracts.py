"""The events that dev-stats reads, as it expects them (design, section 8)."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec

from pinactivity.kafka.event_decoder import Contract, EventDecoder, TimeSince1970

_Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""The contract's `int`: up to 68 years."""


class SessionEnded(Contract):
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    created_at: TimeSince1970
    last_activity_at: datetime
    duration_seconds: _Seconds


class ViewEnded(Contract):
    property_object_view_id: UUID
    property_object_id: UUID
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    view_source: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    viewed_at: TimeSince1970
    last_activity_at: datetime
    duration_seconds: _Seconds
    filter_snapshot: dict[str, Any] | None


class PropertyObjectChanged(Contract):
    """It holds from the message's own CreatedAt on."""

    property_object_id: UUID
    developer_id: UUID
    brand_id: UUID | None


SESSION_ENDED = EventDecoder(SessionEnded)
VIEW_ENDED = EventDecoder(ViewEnded)
PROPERTY_OBJECT_CHANGED = EventDecoder(PropertyObjectChanged)
