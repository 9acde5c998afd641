"""Wakes the relay after a commit. Best effort: without it the next tick starts the relay.

A wake-up is a Celery task, the same as a tick. One that is lost, late or doubled changes only
when the relay runs. What is pending is in PostgreSQL.
"""

import threading
import time
from datetime import timedelta
from typing import Any

import structlog
from celery import current_app
from kombu import Connection

from pinactivity.core.error_info import describe_error
from pinactivity.telemetry import metrics

log = structlog.get_logger(__name__)

WAKE_UP_INTERVAL = timedelta(milliseconds=100)
"""Between two wake-ups of a process. A commit in between sends none, and misses nothing: a relay
that finds nothing goes on scanning for as long."""
_TASK, _QUEUE = "outbox.tasks.relay", "relay"
_TIMEOUT_SECONDS = 0.2
"""Of the connection, and of each answer. A broker that hangs delays a commit by so much."""
_PAUSE_SECONDS = 5.0
"""After a failure no wake-up is sent for so long, so that only one commit is delayed."""


class _Waker:
    """Sends wake-ups, one at a time, on a connection of its own that it keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused_until = float("-inf")
        self._connection: Connection | None = None

    def wake(self) -> None:
        """Send a wake-up unless one was just sent, or is being sent; never raises."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            if now < self._paused_until:
                return
            self._paused_until = now + WAKE_UP_INTERVAL.total_seconds()
            metrics.OUTBOX_WAKE_UPS.labels(self._send()).inc()
        except Exception as exc:  # of any kind: the commit stands, a tick finds the event
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            self._disconnect()
            metrics.OUTBOX_WAKE_UPS.labels("Failed").inc()
            log.warning("relay not woken", **describe_error(exc))
        finally:
            self._lock.release()

    def _send(self) -> str:
        """Send a wake-up unless the queue holds a task already; return the outcome for metrics.

        So the queue does not grow while no worker runs.
        """
        if self._connection is None:
            self._connection = current_app.connection_for_write(
                transport_options={
                    "max_retries": 0,
                    "socket_connect_timeout": _TIMEOUT_SECONDS,
                    "socket_timeout": _TIMEOUT_SECONDS,
                }
            )
        channel: Any = self._connection.default_channel  # kombu's types lack message_count
        if channel.queue_declare(queue=_QUEUE).message_count:
            return "Waiting"
        current_app.send_task(_TASK, connection=self._connection, retry=False, ignore_result=True)
        return "Sent"

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect()  # unlike release(), it does not wait for the broker


_waker = _Waker()


def wake_relay() -> None:
    """Wake the relay; for `transaction.on_commit`. Never raises."""
    _waker.wake()
