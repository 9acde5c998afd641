"""Celery's entry to the ledger."""

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
from devstats.reconciliation.compare import Stopped, all_streams, draw_up, hour_of
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
    """Draw up the ledger of the last whole hours; it writes nothing, and is harmless twice.

    Not of the present hour: what ended a moment ago would make every run look late.
    """
    deadline = time.monotonic() + _LONGEST_RUN.total_seconds()
    try:
        until = hour_of(statement_time())
        with closing(FactWriter()) as writer:
            ledger = draw_up(
                writer,
                since=until - settings.DEV_STATS.reconciled,
                until=until,
                stop=lambda: _stopping.is_set() or time.monotonic() > deadline,
            )
    except Stopped:
        log.warning("ledger not finished")
        return
    except (Error, KafkaError, OSError, StorageUnavailable, sqlite3.Error) as exc:
        log.warning("ledger not drawn up", **describe_error(exc.__cause__ or exc))
        return
    for stream in all_streams():
        DEV_STATS_RECONCILE_LOST.labels(stream.topic).set(ledger.total(stream.topic).lost.total())
    DEV_STATS_RECONCILE_LAST_SUCCESS.set_to_current_time()
    total = ledger.total()
    log.info(
        "ledger drawn up",
        closed=total.closed,
        facts=total.facts,
        lost=total.lost.total(),
        duplicated=total.duplicated,
        late=total.late,
        notComparable=total.not_comparable,
    )
