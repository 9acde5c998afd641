"""Celery's entry to the reconciliation."""

import sqlite3
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import structlog
from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings
from django.db import Error
from kafka.errors import KafkaError

from devstats.clickhouse import StorageUnavailable
from devstats.reconciliation import compare
from devstats.reconciliation.report import hour_of
from devstats.reconciliation.topics import reconciled_topics
from devstats.writer import FactWriter
from pinactivity.core.error_info import describe_error
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry.metrics import DEV_STATS_RECONCILE_LAST_SUCCESS, DEV_STATS_RECONCILE_LOST

log = structlog.get_logger(__name__)

_LONGEST_RUN = timedelta(minutes=5)
"""A worker whose task runs for longer passes for stuck. A run that is cut off is no success."""
_stopping = threading.Event()


@worker_shutting_down.connect
def _stop_run(**_: Any) -> None:
    """End the run at its next chunk. Sent in the main process: hence `--pool threads`."""
    _stopping.set()


@shared_task(ignore_result=True)
def reconcile() -> None:
    """Reconcile the last whole hours; it writes nothing, so it is idempotent.

    The present hour is left out: what ended a moment ago would make every run look late.
    """
    deadline = time.monotonic() + _LONGEST_RUN.total_seconds()
    try:
        until = hour_of(statement_time())
        with closing(FactWriter()) as writer:
            report = compare.reconcile(
                writer,
                since=until - settings.DEV_STATS.reconciled,
                until=until,
                stop=lambda: _stopping.is_set() or time.monotonic() > deadline,
            )
    except compare.Stopped:
        log.warning("reconciliation not finished")
        return
    except (Error, KafkaError, OSError, StorageUnavailable, sqlite3.Error) as exc:
        log.warning("reconciliation failed", **describe_error(exc.__cause__ or exc))
        return
    for topic in reconciled_topics():
        DEV_STATS_RECONCILE_LOST.labels(topic.topic).set(report.total(topic.topic).lost.total())
    DEV_STATS_RECONCILE_LAST_SUCCESS.set_to_current_time()
    total = report.total()
    log.info(
        "reconciled",
        closed=total.closed,
        facts=total.facts,
        lost=total.lost.total(),
        duplicated=total.duplicated,
        late=total.late,
        notComparable=total.not_comparable,
    )
