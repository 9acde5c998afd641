"""The health of a Celery worker and of beat, for /healthz of their process.

A worker may idle as long as no row of its queues is overdue, which PostgreSQL knows. While
PostgreSQL does not answer, the worker is healthy: a restart would not help. Beat is healthy while
it sends ticks.
"""

import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import Error, connection

from outbox.selectors import outbox_snapshot
from pinactivity.monitoring.activity import activity_snapshot
from pinactivity.postgres.clock import statement_time

STUCK_AFTER = timedelta(minutes=2)
"""Added to the longest time that a task may take by its own limits."""
_RELAY_LATE = timedelta(minutes=1)

ReadStorage = Callable[[], datetime | None]


class WorkerProgress:
    """Which tasks of this worker run, and since when; thread-safe.

    Args:
        clock: A monotonic clock, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._ended_at = clock()

    def begin(self, task_id: str) -> None:
        with self._lock:
            self._running[task_id] = self._clock()

    def end(self, task_id: str) -> None:
        with self._lock:
            self._running.pop(task_id, None)
            self._ended_at = self._clock()

    @property
    def running_for(self) -> timedelta | None:
        """How long the oldest running task has run."""
        with self._lock:
            begun = min(self._running.values(), default=None)
        return None if begun is None else timedelta(seconds=self._clock() - begun)

    @property
    def idle_for(self) -> timedelta:
        """How long ago a task ended, or the process began."""
        return timedelta(seconds=self._clock() - self._ended_at)


def report_worker(progress: WorkerProgress, queues: Collection[str]) -> tuple[bool, dict[str, Any]]:
    """Report the health of a worker.

    It is stuck if a task has outlived its own limits, or if it idles while rows of its queues are
    overdue.

    Args:
        progress: Of the worker's tasks.
        queues: Those that the worker serves.

    Returns:
        Whether it is healthy, and the report.
    """
    running_for = progress.running_for
    body: dict[str, Any] = {
        "Status": "live",
        "RunningSeconds": running_for and round(running_for.total_seconds(), 1),
        "IdleSeconds": round(progress.idle_for.total_seconds(), 1),
        "WaitsFor": None,
        "Overdue": [],
    }
    if running_for is not None:
        jobs = (settings.ACTIVITY_CLOSER, settings.ACTIVITY_RETENTION)
        if running_for > max(job.max_run_duration for job in jobs) + STUCK_AFTER:
            return False, {**body, "Status": "stuck"}
        return True, body
    try:
        body["Overdue"] = [queue for queue in queues if _is_overdue(queue, progress.idle_for)]
    except Error:
        return True, {**body, "WaitsFor": "PostgreSQL"}
    finally:
        connection.close()  # it belongs to the HTTP server's thread, which ends with the answer
    if body["Overdue"]:
        return False, {**body, "Status": "stuck"}
    return True, body


def _is_overdue(queue: str, idle_for: timedelta) -> bool:
    """Return whether there are rows that an idle worker should have handled at an earlier tick."""
    if queue == "closer":
        ticks = 3 * settings.ACTIVITY_CLOSER.polling_interval
        late = settings.ACTIVITY_CLOSER.inactivity_threshold + ticks
        return idle_for > ticks and _older_than(late, activity_snapshot().oldest_activity_at)
    if queue == "relay":
        oldest = outbox_snapshot().oldest_pending_at if idle_for > _RELAY_LATE else None
        return _older_than(_RELAY_LATE, oldest)
    return False


def _older_than(age: timedelta, moment: datetime | None) -> bool:
    return moment is not None and statement_time() - moment > age


class BeatProgress:
    """When beat sent its last tick."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_at = clock()

    def sent(self) -> None:
        self._sent_at = self._clock()

    @property
    def silent_for(self) -> timedelta:
        return timedelta(seconds=self._clock() - self._sent_at)


def report_beat(progress: BeatProgress) -> tuple[bool, dict[str, Any]]:
    """Report the health of beat: it is stuck after three missed ticks of its most frequent task.

    Returns:
        Whether it is healthy, and the report.
    """
    intervals = (settings.ACTIVITY_CLOSER.polling_interval, settings.OUTBOX.polling_interval)
    alive = progress.silent_for <= max(3 * min(intervals), timedelta(seconds=30))
    return alive, {
        "Status": "live" if alive else "stuck",
        "SilentSeconds": round(progress.silent_for.total_seconds(), 1),
    }
