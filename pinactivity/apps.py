"""The service's own app: checks, commands, and the schema that migrations need."""

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.db import connections
from django.db.models.signals import pre_migrate


class PinactivityConfig(AppConfig):
    name = "pinactivity"

    def ready(self) -> None:
        from pinactivity import celery  # noqa: F401, PLC0415 - need the apps
        from pinactivity.conf import checks  # noqa: F401, PLC0415 - need the apps
        from pinactivity.postgres import connections  # noqa: PLC0415 - need the apps
        from pinactivity.telemetry import tracing  # noqa: PLC0415 - need the apps

        connections.watch_requests()
        tracing.configure(settings.OTLP_ENDPOINT)
        pre_migrate.connect(_create_schema)


def _create_schema(using: str, **_: Any) -> None:
    """Create our schema before the first migration, because the search path puts every table there.

    Django sends the signal for each app, and this is idempotent.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {settings.DATABASE_SCHEMA}")
