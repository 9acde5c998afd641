"""Celery's entry to the outbox relay."""

import threading
from functools import cache
from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from outbox.relay import OutboxRelay
from pinactivity.kafka.producer import KafkaPublisher

_stopping = threading.Event()


@cache
def _publisher() -> KafkaPublisher:
    """One producer a process: the tasks run on threads, and the relay's lock takes one in turn."""
    return KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        delivery_timeout=settings.OUTBOX.delivery_timeout,
    )


@worker_shutting_down.connect
def _stop_relay(**_: Any) -> None:
    """End after the batch under way. Sent in the main process: hence `--pool threads`."""
    _stopping.set()


@shared_task(ignore_result=True)
def relay() -> None:
    """Publish what is pending; harmless twice, late, or at the same time as another."""
    OutboxRelay(publisher=_publisher(), options=settings.OUTBOX).run(_stopping.is_set)
