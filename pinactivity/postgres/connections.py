"""Database connections that PostgreSQL has closed meanwhile, found without asking it.

Connections persist, and a restart of PostgreSQL ends them all: each thread would find out by a
request that fails. `SELECT 1` before every request would find out too, at the price of a second
statement for every beat. But the end of a connection lies in its socket: an idle one that has
something to read has been told goodbye.
"""

import select
from typing import Any

from django.core.signals import request_started
from django.db import connection


def discard_closed_connection(**_: Any) -> None:
    """Close this thread's connection if the server has, so that the next use opens a new one."""
    if connection.connection is None or connection.in_atomic_block:
        return
    if connection.connection.closed or _has_input(connection.connection.fileno()):
        connection.close()


def _has_input(socket: int) -> bool:
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


def watch_requests() -> None:
    """Look before every request."""
    request_started.connect(discard_closed_connection)
