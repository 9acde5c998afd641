"""/health/live and /health/ready of the web process."""

from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse

from pinactivity.conf.checks import READ_COMMITTED
from pinactivity.http.problems import answer

_migrated = False  # once true it stays true for the life of the process


def live(request: HttpRequest) -> HttpResponse:
    """Answer 200: the process runs."""
    return JsonResponse({"Status": "live"})


def ready(request: HttpRequest) -> HttpResponse:
    """Answer 200 when PostgreSQL is reachable and migrated, else 503."""
    global _migrated  # noqa: PLW0603 - see above
    try:
        if not _migrated:
            executor = MigrationExecutor(connection)
            if executor.migration_plan(executor.loader.graph.leaf_nodes()):
                return answer("USER_ACTIVITY_STORAGE_UNAVAILABLE", detail="Not migrated.")
            _migrated = True
        with connection.cursor() as cursor:
            cursor.execute("SHOW default_transaction_isolation")
            (level,) = cursor.fetchone()
    except Error:
        return answer("USER_ACTIVITY_STORAGE_UNAVAILABLE", detail="PostgreSQL does not answer.")
    if level != READ_COMMITTED:  # again, because PostgreSQL may have been away at the start
        return answer("USER_ACTIVITY_STORAGE_UNAVAILABLE", detail="PostgreSQL isolates otherwise.")
    return JsonResponse({"Status": "ready"})
