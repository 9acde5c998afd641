"""The Celery app: `celery -A pinactivity.celery worker|beat`.

The worker runs `--pool threads`: the signal that it shuts down reaches its tasks only in
their own process.
"""

import os
import sys
from typing import Any

import prometheus_client
import structlog
from celery import Celery
from celery.signals import beat_init, setup_logging, task_failure, worker_init
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

try:
    assert settings.INSTALLED_APPS  # reads the environment
except ImproperlyConfigured as fault:
    sys.exit(str(fault))

app = Celery("pinactivity")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["pinactivity", "sessions", "views", "outbox"])


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


@task_failure.connect
def _log_failure(sender: Any, exception: BaseException, **_: Any) -> None:
    """Say that a task failed; Celery's own line would quote the exception."""
    structlog.get_logger(__name__).error("task failed", task=sender.name, exc_info=exception)
