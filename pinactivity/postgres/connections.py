"""Replaces database connections that PostgreSQL has closed, without a statement.

Connections persist. When PostgreSQL restarts it closes them all, and each thread would notice by a
request that fails. `SELECT 1` before every request would double the statements of a heartbeat.
Instead the socket is polled: PostgreSQL sends nothing on an idle connection but its end.
"""

import select
from typing import Any

from django.core.signals import request_started
from django.db import connection


def discard_closed_connection(**_: Any) -> None:
    """Close this thread's connection if the server has closed it; the next use opens a new one."""
    if connection.connection is None or connection.in_atomic_block:
        return
    if connection.connection.closed or _has_input(connection.connection.fileno()):
        connection.close()


def _has_input(socket: int) -> bool:
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


def watch_requests() -> None:
    """Check this thread's connection before every request."""
    request_started.connect(discard_closed_connection)
