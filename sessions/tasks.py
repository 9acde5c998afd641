"""Celery's entry to the ActivityCloserJob and the ActivityRetentionJob."""

import threading
from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from sessions.closer import ActivityCloser
from sessions.retention import ActivityRetention

_stopping = threading.Event()


@worker_shutting_down.connect
def _stop_run(**_: Any) -> None:
    """End the run before its next transaction. Only `--pool threads` gets the signal there."""
    _stopping.set()


@shared_task(ignore_result=True)
def close_inactive() -> None:
    """Run the job once; idempotent, also late or beside another run."""
    ActivityCloser(settings.ACTIVITY_CLOSER, stop=_stopping.is_set).run()


@shared_task(ignore_result=True)
def delete_old_activity() -> None:
    """Run the job once; idempotent, also late or beside another run."""
    ActivityRetention(settings.ACTIVITY_RETENTION, stop=_stopping.is_set).run()
