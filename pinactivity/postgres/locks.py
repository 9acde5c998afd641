"""PostgreSQL advisory locks that a job holds for all of its run.

Each has a connection of its own, because Django would replace the job's connection, when it is
lost, by one without the lock.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

CLOSER = "Pin:lock:job:scheduled:activity-closer"
REPLAY = "Pin:lock:replay"


@contextmanager
def advisory_lock(name: str, *, shared: bool = False, wait: bool = False) -> Iterator[bool]:
    """Hold a lock until the block ends; yield whether it was acquired.

    Args:
        name: Hashed to the lock's key by PostgreSQL.
        shared: Holders that share do not exclude one another.
        wait: Wait for the lock, up to the connection's lock_timeout, instead of yielding False.

    Raises:
        OperationalError: lock_timeout passed before the lock was free, or the database is away.
    """
    mode = f"advisory_lock{'_shared' if shared else ''}"
    connection = connections["default"].copy()
    try:
        with connection.cursor() as cursor:
            if wait:
                cursor.execute(f"SELECT pg_{mode}(hashtextextended(%s, 0))", [name])
                free = True
            else:
                cursor.execute(f"SELECT pg_try_{mode}(hashtextextended(%s, 0))", [name])
                free = bool(cursor.fetchone()[0])
        yield free
    finally:
        connection.close()  # and with it the lock
