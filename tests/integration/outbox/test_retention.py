"""Published messages are purged after a while."""

from datetime import timedelta

import pytest
from celery import current_app

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.retention import purge_published
from pinactivity.postgres.clock import statement_time
from tests.outbox import (
    enqueue_committed,
    insert_messages,
    session_ended,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_purge_deletes_what_was_published_long_ago_and_nothing_else() -> None:
    insert_messages(12_000, published=True)
    enqueue_committed(*[session_ended() for _ in range(4)])
    long_ago = statement_time() - timedelta(days=8)
    old = list(OutboxMessage.objects.order_by("id")[:4])
    pending, parked, published_lately, _ = old
    of = OutboxMessage.objects.filter
    of(id__in=[message.id for message in old]).update(created_at=long_ago, published_at=None)
    of(id=parked.id).update(parked_at=long_ago)
    of(id=published_lately.id).update(published_at=statement_time() - timedelta(days=6))
    of(id=old[3].id).update(published_at=long_ago)

    assert purge_published(OutboxOptions()) == 11_997
    assert OutboxMessage.objects.count() == 7
    assert purge_published(OutboxOptions(published_kept=timedelta(days=5))) == 1
    kept = set(OutboxMessage.objects.values_list("id", flat=True))
    assert {pending.id, parked.id} < kept
    assert len(kept) == 6


def test_purge_has_a_queue_other_than_the_relays() -> None:
    queues = {
        task: current_app.amqp.router.route({}, f"outbox.tasks.{task}")["queue"].name
        for task in ("relay", "purge_published")
    }
    assert queues == {"relay": "relay", "purge_published": "maintenance"}
