"""Reads on the outbox for operators; bounded index look-ups."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from outbox.models import OutboxMessage, scan_indexes_only

COUNTED_TO = 100_000


@dataclass(frozen=True, slots=True)
class OutboxSnapshot:
    pending: int
    """Counted to 100,000, as is `parked`."""
    parked: int
    oldest_pending_at: datetime | None
    """When the pending message with the lowest id was written, of all shards."""


def outbox_snapshot() -> OutboxSnapshot:
    """Tell how far the relay is behind."""
    pending, parked = count_backlog()
    with transaction.atomic():
        scan_indexes_only()
        return OutboxSnapshot(pending, parked, min(_first_of_each_shard(), default=None))


def count_backlog() -> tuple[int, int]:
    """Count the pending and the parked messages, each to 100,000."""
    with transaction.atomic():
        scan_indexes_only()
        pending = OutboxMessage.objects.pending().order_by()[:COUNTED_TO].count()
        parked = OutboxMessage.objects.parked()[:COUNTED_TO].count()
    return pending, parked


def _first_of_each_shard() -> list[datetime]:
    """By id, not min(created_at): the pending index has the one and not the other."""
    pending = OutboxMessage.objects.pending()
    shards = settings.OUTBOX.shard_numbers
    firsts = [pending.filter(shard=shard) for shard in shards]
    moments = [
        messages.values_list("created_at", flat=True).first()
        for messages in (*firsts, *OutboxMessage.objects.outside(shards))
    ]
    return [moment for moment in moments if moment]


def events_of(aggregate_ids: Iterable[UUID], *, limit: int) -> list[OutboxMessage]:
    """Return the events of some aggregates, the oldest first, at most `limit`."""
    keys = [str(aggregate_id) for aggregate_id in aggregate_ids]
    return list(OutboxMessage.objects.filter(key__in=keys).order_by("id")[:limit])
