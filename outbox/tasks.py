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
"""The next tick goes on: a worker whose task runs for minutes passes for stuck."""


class _OfThread(threading.local):
    """A relay and its producer for each of the worker's threads, for as long as they live."""

    def __init__(self) -> None:
        self.relay = OutboxRelay(
            publisher=KafkaPublisher(
                bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
                delivery_timeout=settings.OUTBOX.delivery_timeout,
            ),
            options=settings.OUTBOX,
        )


_of_thread = _OfThread()


@worker_shutting_down.connect
def _stop_relay(**_: Any) -> None:
    """End after the transaction under way. Sent in the main process: hence `--pool threads`."""
    _stopping.set()


@shared_task(ignore_result=True)
def relay() -> None:
    """Publish what is pending; harmless twice, late, or at the same time as another."""
    _of_thread.relay.run(_stopping.is_set, linger=WAKE_UP_INTERVAL, longest=_LONGEST_RUN)


@shared_task(ignore_result=True)
def purge_published() -> None:
    """Delete what was published long ago; harmless twice, late, or beside another."""
    purge(settings.OUTBOX)
