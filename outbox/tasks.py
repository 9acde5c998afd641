"""Celery's entry to the outbox."""

import threading
from datetime import timedelta
from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from outbox.relay import OutboxRelay
from outbox.retention import purge_published as purge
from outbox.wakeup import WAKE_UP_INTERVAL
from pinactivity.kafka.producer import KafkaPublisher

_stopping = threading.Event()
_LONGEST_RUN = timedelta(minutes=1)
"""The next tick goes on. A worker whose task runs for minutes looks stuck to its health check."""


class _ThreadRelay(threading.local):
    """One relay and producer for each thread of the worker, kept as long as the thread."""

    def __init__(self) -> None:
        self.relay = OutboxRelay(
            publisher=KafkaPublisher(
                bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
                delivery_timeout=settings.OUTBOX.delivery_timeout,
            ),
            options=settings.OUTBOX,
        )


_thread = _ThreadRelay()


@worker_shutting_down.connect
def _stop_relay(**_: Any) -> None:
    """End the run after the current transaction.

    Celery sends the signal in the main process only, so the worker runs with `--pool threads`.
    """
    _stopping.set()


@shared_task(ignore_result=True)
def relay() -> None:
    """Publish what is pending. Idempotent; may run late, or beside another."""
    _thread.relay.run(_stopping.is_set, linger=WAKE_UP_INTERVAL, longest=_LONGEST_RUN)


@shared_task(ignore_result=True)
def purge_published() -> None:
    """Delete what was published long ago. Idempotent; may run late, or beside another."""
    purge(settings.OUTBOX)
