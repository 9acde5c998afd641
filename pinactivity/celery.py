"""The Celery app: `celery -A pinactivity.celery worker|beat`.

The worker runs `--pool threads`: the signal that it shuts down reaches its tasks only in
their own process.
"""

import os
from typing import Any

import prometheus_client
from celery import Celery
from celery.signals import beat_init, setup_logging, worker_init
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

app = Celery("pinactivity")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["pinactivity", "sessions", "outbox"])


@setup_logging.connect
def _keep_logging(**_: Any) -> None:
    """Logging is Django's (settings.LOGGING); a receiver here keeps Celery's own away."""


@worker_init.connect
@beat_init.connect
def _start(**_: Any) -> None:
    """Refuse to start with a fault that the checks find; Celery itself ignores them."""
    from pinactivity.checks import enforce  # noqa: PLC0415 - needs the apps

    enforce()
    if settings.METRICS_PORT:
        prometheus_client.start_http_server(settings.METRICS_PORT, addr=settings.METRICS_HOST)
