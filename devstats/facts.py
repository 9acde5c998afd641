"""What becomes a fact: an event, or the reason why not, and its row (design, section 11).

Plain Python: no Django, no Kafka client, no ClickHouse. A row is a tuple whose fields are its
table's columns, in their order (`devstats.tables`).
"""

import json
from datetime import datetime, timedelta
from typing import Annotated, NamedTuple
from uuid import UUID

from devstats import contracts
from devstats.contracts import SessionEnded, ViewEnded
from pinactivity.core.ids import NIL
from pinactivity.kafka.record import Record

FUTURE_TOLERANCE = timedelta(hours=1)
TENANT = str(NIL)
"""The platform's own: activity belongs to no tenant; a developer's scope is applied on reading."""
UNKNOWN_DEVELOPER = NIL


class SessionFact(NamedTuple):
    """An ended session: a row of `session_facts`."""

    fact_id: str
    """The message's id (SourceEventId), or `backfill:{SessionId}`."""
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    started_at: datetime
    event_time: datetime
    """= `started_at`: the month of the partition."""
    last_activity_at: datetime
    duration_seconds: int
    tenant_id: str
    brand_id: UUID | None
    developer_id: UUID | None
    """None in version 1: a session is of no one developer."""
    viewer_kind: Annotated[str, "Enum8('Guest' = 1, 'User' = 2)"]


class ViewFact(NamedTuple):
    """An ended view: a row of `property_object_view_facts`."""

    fact_id: str
    property_object_view_id: UUID
    property_object_id: UUID
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    view_source: Annotated[str, "LowCardinality(String)"]
    event_time: datetime
    """ViewedAt: when it was opened."""
    last_activity_at: datetime
    duration_seconds: int
    filter_snapshot: str
    """JSON of one object, or empty."""
    tenant_id: str
    brand_id: UUID | None
    developer_id: UUID
    """The object's owner when it was viewed; UNKNOWN_DEVELOPER is excluded from every read."""
    viewer_kind: Annotated[str, "Enum8('Guest' = 1, 'Investor' = 2, 'Agent' = 3)"]


def decode_session(record: Record) -> SessionFact:
    """Make the row of a message of `session-ended`.

    Raises:
        Poison: not one JSON object; SessionId, AnonymousId, CreatedAt, LastActivityAt or
            DurationSeconds missing or not what it should be; an id that is nil; CreatedAt unset
            or before 1970; DurationSeconds not a whole number from 0 to 2^31 - 1.
    """
    return make_session_fact(str(record.message_id), contracts.SESSION_ENDED.decode(record))


def decode_view(record: Record) -> ViewFact:
    """Make the row of a message of `property-object-view-ended`, its owner not known yet.

    Raises:
        Poison: as for a session, of this payload's fields; ViewSource is a text of up to 64
            characters, FilterSnapshot an object or null.
    """
    return make_view_fact(str(record.message_id), contracts.VIEW_ENDED.decode(record))


def make_session_fact(fact_id: str, event: SessionEnded) -> SessionFact:
    """Make a session's row: the event's fields, and the constants of version 1."""
    return SessionFact(
        fact_id=fact_id,
        session_id=event.session_id,
        anonymous_id=event.anonymous_id,
        user_id=event.user_id,
        started_at=event.created_at,
        event_time=event.created_at,
        last_activity_at=event.last_activity_at,
        duration_seconds=event.duration_seconds,
        tenant_id=TENANT,
        brand_id=None,
        developer_id=None,
        viewer_kind="Guest" if event.user_id is None else "User",
    )


def make_view_fact(fact_id: str, event: ViewEnded) -> ViewFact:
    """Make a view's row; `ownership.with_owner` adds whose the object was."""
    return ViewFact(
        fact_id=fact_id,
        property_object_view_id=event.property_object_view_id,
        property_object_id=event.property_object_id,
        session_id=event.session_id,
        anonymous_id=event.anonymous_id,
        user_id=event.user_id,
        view_source=event.view_source,
        event_time=event.viewed_at,
        last_activity_at=event.last_activity_at,
        duration_seconds=event.duration_seconds,
        filter_snapshot=""
        if event.filter_snapshot is None
        else json.dumps(event.filter_snapshot, ensure_ascii=False, separators=(",", ":")),
        tenant_id=TENANT,
        brand_id=None,
        developer_id=UNKNOWN_DEVELOPER,
        # No event names an agent in version 1.
        viewer_kind="Guest" if event.user_id is None else "Investor",
    )
