"""What may be recorded of an exception: class and codes, never its text.

PostgreSQL's DETAIL quotes the whole row with its address and User-Agent, and other libraries quote
their input (design, section 13).
"""

from django.db import DatabaseError, InterfaceError

STATEMENT_TIMEOUT = "57014"
LOCK_TIMEOUT = "55P03"


def sqlstate(exc: BaseException) -> str | None:
    """Return the SQLSTATE of a database error, Django's or psycopg's, if it has one."""
    # Django wraps psycopg's error as the cause; either may be what arrives here.
    for candidate in (exc, exc.__cause__):
        code = getattr(candidate, "sqlstate", None)
        if isinstance(code, str):
            return code
    return None


def constraint(exc: BaseException) -> str | None:
    """Return the constraint that a database error names, if any."""
    for candidate in (exc, exc.__cause__):
        name = getattr(getattr(candidate, "diag", None), "constraint_name", None)
        if isinstance(name, str):
            return name
    return None


def is_connection_lost(exc: BaseException) -> bool:
    """Return whether the connection is lost: SQLSTATE 08*, 57P*, or an error without any.

    PostgreSQL also ends the connection of a transaction that idles or lasts too long (25P03,
    25P04).
    """
    if not isinstance(exc, DatabaseError | InterfaceError):
        return False
    code = sqlstate(exc)
    return code is None or code.startswith(("08", "57P", "25P03", "25P04"))


def is_storage_error(exc: BaseException) -> bool:
    """Return whether PostgreSQL as a whole cannot do the work, whatever the row.

    It is lost, read-only after a failover (25*), lacks a table or a right (42*, 28*, 3D*, 3F*), is
    out of disk or memory (53*), past a limit of its own (54*), or broken (58*, XX*).
    """
    if is_connection_lost(exc):
        return True
    code = sqlstate(exc)
    return code is not None and code.startswith(
        ("25", "28", "3D", "3F", "42", "53", "54", "58", "XX")
    )


def describe_error(exc: BaseException) -> dict[str, str]:
    """Describe an exception for a log line or a row.

    Returns:
        {"errorClass": .., "sqlstate": .., "constraint": .., "code": ..}; absent parts are left
        out. The code is ClickHouse's number.
    """
    parts = {"errorClass": type(exc).__qualname__}
    if code := sqlstate(exc):
        parts["sqlstate"] = code
    if name := constraint(exc):
        parts["constraint"] = name
    if isinstance(number := getattr(exc, "code", None), int):
        parts["code"] = str(number)
    return parts
