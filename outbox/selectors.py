"""Reads on the outbox for operators; bounded index look-ups."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.models import OutboxMessage

COUNTED_TO = 100_000


@dataclass(frozen=True, slots=True)
class OutboxSnapshot:
    pending: int
    """Counted to 100,000, as is `parked`."""
    parked: int
    oldest_pending_at: datetime | None
    """When the pending message with the lowest id was written."""


def outbox_snapshot() -> OutboxSnapshot:
    """Tell how far the relay is behind."""
    pending = OutboxMessage.objects.pending()
    parked = OutboxMessage.objects.filter(parked_at__isnull=False)
    return OutboxSnapshot(
        pending=pending.order_by()[:COUNTED_TO].count(),
        parked=parked[:COUNTED_TO].count(),
        # By id, not min(created_at): the pending index has the one and not the other.
        oldest_pending_at=pending.values_list("created_at", flat=True).first(),
    )


def events_of(aggregate_ids: Iterable[UUID], *, limit: int) -> list[OutboxMessage]:
    """Return the events of some aggregates, the oldest first, at most `limit`."""
    keys = [str(aggregate_id) for aggregate_id in aggregate_ids]
    return list(OutboxMessage.objects.filter(key__in=keys).order_by("id")[:limit])
