"""Reads of the outbox for operators and for the reconciliation, by bounded index scans."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from outbox.models import OutboxMessage, scan_indexes_only

_COUNTED_TO = 100_000


@dataclass(frozen=True, slots=True)
class OutboxSnapshot:
    pending: int
    """Counted to 100,000, as is `parked`."""
    parked: int
    oldest_pending_at: datetime | None
    """When the pending message with the lowest id was written, of all shards."""


def outbox_snapshot() -> OutboxSnapshot:
    """Return how far the relay is behind."""
    pending, parked = count_backlog()
    with transaction.atomic():
        scan_indexes_only()
        return OutboxSnapshot(pending, parked, min(_first_of_each_shard(), default=None))


def count_backlog() -> tuple[int, int]:
    """Count the pending and the parked messages, each to 100,000."""
    with transaction.atomic():
        scan_indexes_only()
        pending = OutboxMessage.objects.pending().order_by()[:_COUNTED_TO].count()
        parked = OutboxMessage.objects.parked()[:_COUNTED_TO].count()
    return pending, parked


def _first_of_each_shard() -> list[datetime]:
    """Return when the first pending message of each shard was written.

    The first by id, not by `created_at`: the index of pending messages has only the id.
    """
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


@dataclass(frozen=True, slots=True)
class Delivery:
    """How far the messages of one key in one topic got."""

    messages: int = 0
    pending: int = 0
    parked: int = 0
    published_at: datetime | None = None
    """Of the last one published; None if none was."""


def deliveries(topic: str, keys: Iterable[str]) -> Mapping[str, Delivery]:
    """Return how far the messages of some keys got; a key without messages is left out."""
    found: dict[str, Delivery] = {}
    rows = OutboxMessage.objects.filter(topic=topic, key__in=list(keys)).order_by("id")
    for key, published_at, parked_at in rows.values_list("key", "published_at", "parked_at"):
        before = found.get(key, Delivery())
        found[key] = Delivery(
            messages=before.messages + 1,
            pending=before.pending + (published_at is None and parked_at is None),
            parked=before.parked + (parked_at is not None),
            published_at=published_at or before.published_at,
        )
    return found


def unpublished(topic: str, *, since: datetime, until: datetime) -> Iterator[tuple[str, datetime]]:
    """Yield the key and `created_at` of the pending and parked messages of a topic.

    Args:
        since: Created at this time or later,
        until: and before this one.
    """
    for messages in (OutboxMessage.objects.pending(), OutboxMessage.objects.parked()):
        rows = messages.filter(topic=topic, created_at__gte=since, created_at__lt=until)
        yield from rows.order_by().values_list("key", "created_at").iterator(chunk_size=1000)
