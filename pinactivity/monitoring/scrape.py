"""/metrics of the web process: its own metrics, and gauges of what PostgreSQL holds.

The gauges are right even while no worker runs.
"""

import time
from collections.abc import Iterator
from datetime import datetime

import prometheus_client
from django.conf import settings
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django_prometheus.exports import ExportToDjangoView
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outbox.selectors import outbox_snapshot
from pinactivity.monitoring.activity import activity_snapshot
from pinactivity.postgres.clock import statement_time

_CACHED_SECONDS = 10.0


class StorageCollector(Collector):
    """Reads gauges from PostgreSQL, at most once in 10 s; has none while PostgreSQL is away."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._gauges: list[GaugeMetricFamily] = []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if time.monotonic() - self._read_at > _CACHED_SECONDS:
            try:
                self._gauges = list(_read())
            except Error:
                self._gauges = []
            self._read_at = time.monotonic()
        yield from self._gauges


def _read() -> Iterator[GaugeMetricFamily]:
    now = statement_time()

    def age(moment: datetime | None) -> float:
        return max((now - moment).total_seconds(), 0.0) if moment else 0.0

    activity = activity_snapshot()
    outbox = outbox_snapshot()
    yield GaugeMetricFamily(
        "activity_active_sessions", "Active sessions.", activity.active_sessions
    )
    yield GaugeMetricFamily(
        "activity_oldest_active_seconds",
        "Silence of the Active session or view that is silent for longest.",
        age(activity.oldest_activity_at),
    )
    yield GaugeMetricFamily(
        "activity_closer_inactivity_threshold_seconds",
        "InactivityThreshold, for alerts that follow it.",
        settings.ACTIVITY_CLOSER.inactivity_threshold.total_seconds(),
    )
    if activity.last_success_at:
        yield GaugeMetricFamily(
            "activity_closer_last_success_timestamp_seconds",
            "When the last run of the ActivityCloserJob that succeeded ended, Unix time.",
            activity.last_success_at.timestamp(),
        )
    yield GaugeMetricFamily("outbox_pending", "Messages not published yet.", outbox.pending)
    yield GaugeMetricFamily(
        "outbox_parked",
        "Messages that Kafka refuses; they are parked and not sent again.",
        outbox.parked,
    )
    yield GaugeMetricFamily(
        "outbox_oldest_pending_seconds",
        "Age of the oldest message not published yet.",
        age(outbox.oldest_pending_at),
    )


_storage = prometheus_client.CollectorRegistry()
_storage.register(StorageCollector())


def metrics(request: HttpRequest) -> HttpResponse:
    """Answer in Prometheus' text format."""
    response: HttpResponse = ExportToDjangoView(request)
    response.content += prometheus_client.generate_latest(_storage)
    return response
