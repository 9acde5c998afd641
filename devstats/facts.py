"""What becomes a fact: bytes of a message -> a row, or the reason why not (design, section 11).

Plain Python: no Django, no Kafka, no ClickHouse. A row is a tuple in the order of its table's
columns (`devstats.writer`).
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import msgspec

from pinactivity.core import strict_json
from pinactivity.core.ids import NIL
from pinactivity.core.times import parse_time
from pinactivity.kafka.payload import Payload, Plain, PlainReader
from pinactivity.kafka.record import Poison, Record

FUTURE_TOLERANCE = timedelta(hours=1)
TENANT = str(NIL)
"""The platform's own: activity belongs to no tenant; a developer's scope is applied on reading."""
UNKNOWN_DEVELOPER = NIL

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEFAULT = datetime(1, 1, 1, tzinfo=UTC)
"""What .NET writes for a time that nobody has set."""
_MOST_SECONDS = 2**31 - 1
"""What the contract's `int` holds: 68 years."""
_MOST_SOURCE = 64
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=_MOST_SECONDS)]
_Source = Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_SOURCE)]


class SessionFact(NamedTuple):
    """An ended session, in the order of the columns of `session_facts`."""

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
    viewer_kind: str


class ViewFact(NamedTuple):
    """An ended view, in the order of the columns of `property_object_view_facts`."""

    fact_id: str
    property_object_view_id: UUID
    property_object_id: UUID
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    view_source: str
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
    viewer_kind: str


class PropertyObject(NamedTuple):
    """Whose an object is from `updated_at` on; in the order of `property_objects`."""

    property_object_id: UUID
    developer_id: UUID
    brand_id: UUID | None
    updated_at: datetime
    revision: int = 0
    """Of several owners from one moment on: the highest was told last, and is the owner."""


def make_session_fact(
    *,
    fact_id: str,
    session_id: UUID,
    anonymous_id: UUID,
    user_id: UUID | None,
    created_at: datetime,
    last_activity_at: datetime,
    duration_seconds: int,
) -> SessionFact:
    """Make a session's row: what it says itself, and the constants of version 1.

    Args:
        fact_id: See `SessionFact`, as for the ids.
        created_at: In UTC, as `last_activity_at`: StartedAt and EventTime.
        duration_seconds: Whole seconds.
    """
    return SessionFact(
        fact_id=fact_id,
        session_id=session_id,
        anonymous_id=anonymous_id,
        user_id=user_id,
        started_at=created_at,
        event_time=created_at,
        last_activity_at=last_activity_at,
        duration_seconds=duration_seconds,
        tenant_id=TENANT,
        brand_id=None,
        developer_id=None,
        viewer_kind="Guest" if user_id is None else "User",
    )


def make_view_fact(
    *,
    fact_id: str,
    property_object_view_id: UUID,
    property_object_id: UUID,
    session_id: UUID,
    anonymous_id: UUID,
    user_id: UUID | None,
    view_source: str,
    viewed_at: datetime,
    last_activity_at: datetime,
    duration_seconds: int,
    filter_snapshot: Mapping[str, Any] | None,
) -> ViewFact:
    """Make a view's row; whose the object is, is found later (`owned_by`)."""
    return ViewFact(
        fact_id=fact_id,
        property_object_view_id=property_object_view_id,
        property_object_id=property_object_id,
        session_id=session_id,
        anonymous_id=anonymous_id,
        user_id=user_id,
        view_source=view_source,
        event_time=viewed_at,
        last_activity_at=last_activity_at,
        duration_seconds=duration_seconds,
        filter_snapshot=""
        if filter_snapshot is None
        else json.dumps(filter_snapshot, ensure_ascii=False, separators=(",", ":")),
        tenant_id=TENANT,
        brand_id=None,
        developer_id=UNKNOWN_DEVELOPER,
        # Nothing tells an agent in version 1.
        viewer_kind="Guest" if user_id is None else "Investor",
    )


class _PlainSession(Plain):
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    created_at: str
    last_activity_at: str
    duration_seconds: _Seconds


class _PlainView(Plain):
    property_object_view_id: UUID
    property_object_id: UUID
    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    view_source: _Source
    viewed_at: str
    last_activity_at: str
    duration_seconds: _Seconds
    filter_snapshot: msgspec.Raw


_plain_sessions = PlainReader(_PlainSession)
_plain_views = PlainReader(_PlainView)


def decode_session(record: Record) -> SessionFact:
    """Read `session-ended`.

    Raises:
        Poison: not one JSON object; SessionId, AnonymousId, CreatedAt, LastActivityAt or
            DurationSeconds missing or not what it should be; an id that is nil; CreatedAt unset
            or before 1970; DurationSeconds not a whole number from 0 to 2^31 - 1.
    """
    return decode_plain_session(record) or decode_any_session(record)


def decode_plain_session(record: Record) -> SessionFact | None:
    """Read `session-ended` as we write it, fast; None where `decode_any_session` has to judge."""
    plain = _plain_sessions.read(record.value)
    if plain is None:
        return None
    try:
        created_at = parse_time(plain.created_at)
        last_activity_at = parse_time(plain.last_activity_at)
    except ValueError:
        return None
    if created_at < _EPOCH:
        return None
    return make_session_fact(
        fact_id=str(record.message_id),
        session_id=plain.session_id,
        anonymous_id=plain.anonymous_id,
        user_id=plain.user_id,
        created_at=created_at,
        last_activity_at=last_activity_at,
        duration_seconds=plain.duration_seconds,
    )


def decode_any_session(record: Record) -> SessionFact:
    """Read `session-ended` in any legal writing; see `decode_session`."""
    payload = Payload(record)
    return make_session_fact(
        fact_id=str(record.message_id),
        session_id=payload.id("SessionId"),
        anonymous_id=payload.id("AnonymousId"),
        user_id=_optional_id(payload, "UserId"),
        created_at=_begin(payload, "CreatedAt", "created-at"),
        last_activity_at=payload.time("LastActivityAt"),
        duration_seconds=payload.whole_number("DurationSeconds", most=_MOST_SECONDS),
    )


def decode_view(record: Record) -> ViewFact:
    """Read `property-object-view-ended`; whose the object is, is found later (`owned_by`).

    Raises:
        Poison: as for a session, of this payload's fields; ViewSource is a text of up to 64
            characters, FilterSnapshot an object or null.
    """
    return decode_plain_view(record) or decode_any_view(record)


def decode_plain_view(record: Record) -> ViewFact | None:
    """Read `property-object-view-ended` as we write it; else None: `decode_any_view` judges."""
    plain = _plain_views.read(record.value)
    if plain is None:
        return None
    try:
        viewed_at = parse_time(plain.viewed_at)
        last_activity_at = parse_time(plain.last_activity_at)
        filter_snapshot = strict_json.loads(bytes(plain.filter_snapshot))
    except ValueError:
        return None
    if viewed_at < _EPOCH or not isinstance(filter_snapshot, dict | None):
        return None
    return make_view_fact(
        fact_id=str(record.message_id),
        property_object_view_id=plain.property_object_view_id,
        property_object_id=plain.property_object_id,
        session_id=plain.session_id,
        anonymous_id=plain.anonymous_id,
        user_id=plain.user_id,
        view_source=plain.view_source,
        viewed_at=viewed_at,
        last_activity_at=last_activity_at,
        duration_seconds=plain.duration_seconds,
        filter_snapshot=filter_snapshot,
    )


def decode_any_view(record: Record) -> ViewFact:
    """Read `property-object-view-ended` in any legal writing; see `decode_view`."""
    payload = Payload(record)
    return make_view_fact(
        fact_id=str(record.message_id),
        property_object_view_id=payload.id("PropertyObjectViewId"),
        property_object_id=payload.id("PropertyObjectId"),
        session_id=payload.id("SessionId"),
        anonymous_id=payload.id("AnonymousId"),
        user_id=_optional_id(payload, "UserId"),
        view_source=payload.text("ViewSource", most=_MOST_SOURCE),
        viewed_at=_begin(payload, "ViewedAt", "viewed-at"),
        last_activity_at=payload.time("LastActivityAt"),
        duration_seconds=payload.whole_number("DurationSeconds", most=_MOST_SECONDS),
        filter_snapshot=payload.nested("FilterSnapshot") if payload.has("FilterSnapshot") else None,
    )


def decode_property_object(record: Record) -> PropertyObject:
    """Read `property-object-changed`: it holds from the message's own CreatedAt on.

    Raises:
        Poison: PropertyObjectId or DeveloperId missing, nil or no id; BrandId neither an id nor
            null; CreatedAt before 1970.
    """
    payload = Payload(record)
    if record.created_at < _EPOCH:
        raise Poison("updated-at-before-1970")
    return PropertyObject(
        property_object_id=payload.id("PropertyObjectId"),
        developer_id=payload.id("DeveloperId"),
        brand_id=_optional_id(payload, "BrandId"),
        updated_at=record.created_at,
    )


def owner_at(versions: Sequence[PropertyObject], moment: datetime) -> PropertyObject | None:
    """Tell whose an object was at a moment, else whose it was first as far as known.

    Not whose it is now: the answer must not change when a topic is read again after the object
    has changed hands.

    Args:
        versions: Of one object, the oldest first.
        moment: Aware.
    """
    if not versions:
        return None
    place = bisect_right(versions, moment, key=lambda version: version.updated_at)
    return versions[max(place - 1, 0)]


def owned_by(view: ViewFact, versions: Sequence[PropertyObject]) -> ViewFact:
    """Give a view its object's owner of the moment when it was opened, if any is known."""
    owner = owner_at(versions, view.event_time)
    if owner is None:
        return view
    return view._replace(developer_id=owner.developer_id, brand_id=owner.brand_id)


def _optional_id(payload: Payload, name: str) -> UUID | None:
    return payload.id(name) if payload.has(name) else None


def _begin(payload: Payload, name: str, code: str) -> datetime:
    """Read the time of a fact; ClickHouse would store year 1 without complaint."""
    moment = payload.time(name)
    if moment == _DEFAULT:
        raise Poison(f"{code}-default")
    if moment < _EPOCH:
        raise Poison(f"{code}-before-1970")
    return moment
