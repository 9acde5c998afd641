"""PostgreSQL out of reach."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def postgres_away() -> Iterator[None]:
    """Lead new connections to a port that nobody listens on, and end the open one."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: connecting is refused
        address = {name: connection.settings_dict[name] for name in ("HOST", "PORT")}
        connection.close()
        connection.settings_dict.update(HOST="127.0.0.1", PORT=reserved.getsockname()[1])
        try:
            yield
        finally:
            connection.close()
            connection.settings_dict.update(address)
