"""Whose a property object is, and was at a moment: plain Python, as `devstats.facts`."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from devstats import contracts
from devstats.facts import ViewFact
from pinactivity.core.times import EPOCH
from pinactivity.kafka.record import Poison, Record


class PropertyObject(NamedTuple):
    """Whose an object is from `updated_at` on: a row of `property_objects`."""

    property_object_id: UUID
    developer_id: UUID
    brand_id: UUID | None
    updated_at: datetime
    revision: int = 0
    """Of several owners from one moment on, the highest was reported last and is the owner."""


def decode_property_object(record: Record) -> PropertyObject:
    """Make the row of a message of `property-object-changed`.

    Raises:
        Poison: PropertyObjectId or DeveloperId missing, nil or no id; BrandId neither an id nor
            null; CreatedAt before 1970.
    """
    event = contracts.PROPERTY_OBJECT_CHANGED.decode(record)
    if record.created_at < EPOCH:
        raise Poison("updated-at-before-1970")
    return PropertyObject(
        property_object_id=event.property_object_id,
        developer_id=event.developer_id,
        brand_id=event.brand_id,
        updated_at=record.created_at,
    )


def owner_at(versions: Sequence[PropertyObject], moment: datetime) -> PropertyObject | None:
    """Return whose an object was at a moment, else its first known owner.

    Never its present owner: the answer must not change when a topic is read again after the object
    has changed hands.

    Args:
        versions: Of one object, the oldest first.
        moment: Aware.
    """
    if not versions:
        return None
    index = bisect_right(versions, moment, key=lambda version: version.updated_at)
    return versions[max(index - 1, 0)]


def with_owner(view: ViewFact, versions: Sequence[PropertyObject]) -> ViewFact:
    """Return a view with its object's owner at the time it was opened, if one is known."""
    owner = owner_at(versions, view.event_time)
    if owner is None:
        return view
    return view._replace(developer_id=owner.developer_id, brand_id=owner.brand_id)
