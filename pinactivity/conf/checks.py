"""System checks that every entry point enforces, because WSGI runs none and Celery ignores them."""

import sys
from typing import Any

from django.core import checks
from django.db import DatabaseError, connection

READ_COMMITTED = "read committed"


@checks.register(checks.Tags.database)
def check_isolation_level(databases: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """The locking of sessions and views is written for READ COMMITTED (design, section 6)."""
    if not databases:
        return []
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW default_transaction_isolation")
            (level,) = cursor.fetchone()
    except DatabaseError:
        return []  # an unreachable database is not a configuration error; readiness reports it
    if level == READ_COMMITTED:
        return []
    return [
        checks.Error(
            f"The database's isolation level is {level}.",
            hint="Set default_transaction_isolation to 'read committed'.",
            id="pinactivity.E001",
        )
    ]


def enforce() -> None:
    """Run all checks, the database's too.

    Raises:
        SystemExit: at least one error; all of them are printed.
    """
    found = checks.run_checks(include_deployment_checks=False, databases=["default"])
    errors = [message for message in found if message.is_serious() and not message.is_silenced()]
    if errors:
        sys.exit("\n".join(str(message) for message in errors))
