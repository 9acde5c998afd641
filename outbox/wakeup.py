"""Telling the relay that something was committed: best effort, its poll is the bound.

A wake-up is a message of Celery's, like a tick. Lost, late or doubled, it changes nothing but
the moment: PostgreSQL alone says what is pending.
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
"""Between two wake-ups of a process. What is committed in between sends none: the relay goes on
looking for as long after it found nothing."""
_TASK, _QUEUE = "outbox.tasks.relay", "relay"
_SECONDS = 0.2
"""Of connecting, and of each answer: what a commit may be held up by a broker that hangs."""
_SILENT_SECONDS = 5.0
"""After a fault: so that a broker that hangs holds up one commit in so long."""


class _Bell:
    """Sends wake-ups, one at a time and on a connection of its own, which it keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent_until = float("-inf")
        self._connection: Connection | None = None

    def ring(self) -> None:
        """Wake the relay unless that was just done, or is being done; never raises."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            if now < self._silent_until:
                return
            self._silent_until = now + WAKE_UP_INTERVAL.total_seconds()
            metrics.OUTBOX_WAKE_UPS.labels(self._send()).inc()
        except Exception as exc:  # of any kind: the event is committed, and the poll will find it
            self._silent_until = time.monotonic() + _SILENT_SECONDS
            self._hang_up()
            metrics.OUTBOX_WAKE_UPS.labels("Failed").inc()
            log.warning("relay not woken", **describe_error(exc))
        finally:
            self._lock.release()

    def _send(self) -> str:
        """Send one, unless a tick or a wake-up waits in the queue: that one does as well.

        So nothing piles up while no worker is there.
        """
        if self._connection is None:
            self._connection = current_app.connection_for_write(
                transport_options={
                    "max_retries": 0,
                    "socket_connect_timeout": _SECONDS,
                    "socket_timeout": _SECONDS,
                }
            )
        channel: Any = self._connection.default_channel  # its types know no counts
        if channel.queue_declare(queue=_QUEUE).message_count:
            return "Waiting"
        current_app.send_task(_TASK, connection=self._connection, retry=False, ignore_result=True)
        return "Sent"

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect()  # unlike release(), it asks the broker nothing


_bell = _Bell()


def wake_relay() -> None:
    """Wake the relay; for `transaction.on_commit`."""
    _bell.ring()
