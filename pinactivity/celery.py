"""The Celery app: `celery -A pinactivity.celery worker|beat`.

The worker runs `--pool threads`, because the signal of its shutdown reaches tasks only in its own
process.
"""

import os
import sys
from typing import Any

import structlog
from celery import Celery
from celery.signals import (
    after_task_publish,
    beat_init,
    setup_logging,
    task_failure,
    task_postrun,
    task_prerun,
    worker_init,
    worker_ready,
)
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from pinactivity.process.interpreter import settle
from pinactivity.telemetry.server import Report, start_serving

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

try:
    assert settings.INSTALLED_APPS  # reads the environment
except ImproperlyConfigured as exc:
    sys.exit(str(exc))

app = Celery("pinactivity")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["pinactivity", "sessions", "views", "outbox", "devstats"])


@setup_logging.connect
def _keep_logging(**_: Any) -> None:
    """Keep Django's logging (settings.LOGGING): with a receiver here Celery sets up none."""


@worker_init.connect
def _start_worker(sender: Any, **_: Any) -> None:
    from pinactivity.monitoring.workers import WorkerProgress, report_worker  # noqa: PLC0415 - needs the apps

    progress = WorkerProgress()
    task_prerun.connect(lambda task_id, **_: progress.begin(task_id), weak=False)
    task_postrun.connect(lambda task_id, **_: progress.end(task_id), weak=False)
    _start(lambda: report_worker(progress, list(sender.app.amqp.queues.consume_from)))


@worker_ready.connect
def _settle(**_: Any) -> None:
    """Settle the process: everything is loaded, and no task has run."""
    settle()


@beat_init.connect
def _start_beat(**_: Any) -> None:
    from pinactivity.monitoring.workers import BeatProgress, report_beat  # noqa: PLC0415 - needs the apps

    progress = BeatProgress()
    after_task_publish.connect(lambda **_: progress.sent(), weak=False)
    _start(lambda: report_beat(progress))


def _start(report: Report) -> None:
    """Serve metrics and health; refuse to start if a check finds an error, which Celery ignores."""
    from pinactivity.conf.checks import enforce  # noqa: PLC0415 - needs the apps

    enforce()
    try:
        start_serving(report, host=settings.METRICS_HOST, port=settings.METRICS_PORT)
    except OSError:
        # Celery would log an exception of a receiver, and go on.
        sys.exit(f"METRICS_PORT: port {settings.METRICS_PORT} is not free.")


@task_failure.connect
def _log_failure(sender: Any, exception: BaseException, **_: Any) -> None:
    """Log that a task failed; Celery's own line would quote the exception."""
    structlog.get_logger(__name__).error("task failed", task=sender.name, exc_info=exception)
