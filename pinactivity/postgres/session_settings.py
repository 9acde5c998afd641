"""What every connection to PostgreSQL begins with: time-outs, and TCP keepalives of both ends.

Without keepalives a half-open connection would hang for hours: here, or in PostgreSQL with the
locks of a host that is gone.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_CONNECT_TIMEOUT = 5
"""Seconds."""
_KEEPALIVES_IDLE, _KEEPALIVES_INTERVAL, _KEEPALIVES_COUNT = 30, 10, 3
"""Seconds, seconds and probes until either end of a connection misses the other."""
_TCP_USER_TIMEOUT = 60_000
"""Milliseconds that what was sent may go unacknowledged."""


def add_session_settings(
    database: Mapping[str, Any], session: Mapping[str, str | timedelta]
) -> dict[str, Any]:
    """Add to a database in Django's form what its connections begin with.

    Args:
        database: A member of DATABASES.
        session: PostgreSQL's parameters; a time span is given in milliseconds.
    """
    parameters: dict[str, str | int] = {
        name: value // timedelta(milliseconds=1) if isinstance(value, timedelta) else value
        for name, value in session.items()
    }
    parameters |= {
        "tcp_keepalives_idle": _KEEPALIVES_IDLE,
        "tcp_keepalives_interval": _KEEPALIVES_INTERVAL,
        "tcp_keepalives_count": _KEEPALIVES_COUNT,
        "tcp_user_timeout": _TCP_USER_TIMEOUT,
    }
    return {
        **database,
        "CONN_MAX_AGE": None,
        "OPTIONS": {
            **database.get("OPTIONS", {}),
            "options": " ".join(f"-c {name}={value}" for name, value in parameters.items()),
            "application_name": "pinactivity",
            "connect_timeout": _CONNECT_TIMEOUT,
            "keepalives": 1,
            "keepalives_idle": _KEEPALIVES_IDLE,
            "keepalives_interval": _KEEPALIVES_INTERVAL,
            "keepalives_count": _KEEPALIVES_COUNT,
            "tcp_user_timeout": _TCP_USER_TIMEOUT,
        },
    }
