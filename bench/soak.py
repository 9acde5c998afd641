"""The objectives of the job with a real Celery beat, a real worker and the real threshold.

`make bench NAME=soak` keeps about 10,000 sessions Active for 20 minutes. Two in five of them send
heartbeats every minute, for the session and for a view. The others are silent since moments spread
over the threshold, so closings happen all the time. A new device with 3 views replaces each device
that leaves. This process calls the services; Celery beat sends the ticks.

The result comes from PostgreSQL: when each row closed, and that it closed once, with one event.
"""

import argparse
import contextlib
import heapq
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error, connection

from bench.measure import BenchFailed, conclude, database_url, own_database, say
from pinactivity.core.ids import new_id
from pinactivity.monitoring.activity import activity_snapshot
from pinactivity.postgres.clock import statement_time
from sessions.device import identify_device
from sessions.services import record_heartbeat, start_session
from views.lifecycle import ViewSource
from views.services import extend_view, open_view

_DEVICE = identify_device("Mozilla/5.0 (X11; Linux x86_64) Firefox/120.0", None)
_LIVE_PART = 0.4
_VIEWS = 3
_HEARTBEAT_SECONDS = 60.0

_LOAD_SILENT = """
    WITH made AS (
        INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at, user_agent, browser,
                              os, device_type)
        SELECT gen_random_uuid(), gen_random_uuid(), moment - interval '5 min', moment, 'bench',
               '', '', 'Unknown'
        FROM (SELECT statement_timestamp() - random() * %(threshold)s AS moment
              FROM generate_series(1, %(count)s)) AS moments
        RETURNING id, last_activity_at
    )
    INSERT INTO property_object_views (id, session_id, property_object_id, view_source, created_at,
                                       last_activity_at)
    SELECT gen_random_uuid(), id, gen_random_uuid(), 'Catalog',
           last_activity_at - interval '5 min', last_activity_at
    FROM made CROSS JOIN generate_series(1, %(views)s)
"""

_LAGS = """
    SELECT count(*),
           count(*) FILTER (WHERE ended_at - last_activity_at <= %(slo)s),
           extract(epoch FROM max(ended_at - last_activity_at)),
           extract(epoch FROM percentile_cont(0.99) WITHIN GROUP (
               ORDER BY ended_at - last_activity_at))
    FROM (SELECT ended_at, last_activity_at, status FROM sessions
          UNION ALL
          SELECT ended_at, last_activity_at, status FROM property_object_views) AS rows
    WHERE status = 'Inactive'
"""

_DOUBLES = """
    SELECT (SELECT count(*) FROM (SELECT FROM outbox_messages GROUP BY topic, key
                                  HAVING count(*) > 1) AS doubled),
           (SELECT count(*) FROM outbox_messages)
           - (SELECT count(*) FROM sessions WHERE status = 'Inactive')
           - (SELECT count(*) FROM property_object_views WHERE status = 'Inactive')
"""


@dataclass(order=True)
class _Visitor:
    """A device that sends heartbeats until it leaves."""

    due: float
    leaves_at: float = field(compare=False)
    anonymous_id: UUID = field(compare=False, default_factory=new_id)
    session_id: UUID | None = field(compare=False, default=None)
    view_id: UUID | None = field(compare=False, default=None)

    def act(self) -> None:
        """Start a session with its views, or send heartbeats of the session and the last view."""
        if self.session_id is None:
            started = start_session(anonymous_id=self.anonymous_id, user_id=None, device=_DEVICE)
            self.session_id = started.session.session_id
            for _ in range(_VIEWS):
                self.view_id = open_view(
                    session_id=self.session_id,
                    anonymous_id=self.anonymous_id,
                    device=_DEVICE,
                    property_object_id=new_id(),
                    view_source=ViewSource.CATALOG,
                    filter_snapshot=None,
                ).view_id
            return
        heartbeat = record_heartbeat(
            session_id=self.session_id,
            anonymous_id=self.anonymous_id,
            device=_DEVICE,
        )
        if heartbeat.restarted or self.view_id is None:
            raise BenchFailed("A session with heartbeats was closed.")
        if not extend_view(view_id=self.view_id, anonymous_id=self.anonymous_id):
            raise BenchFailed("A view with heartbeats was closed.")


class _Crowd:
    """Visitors, their calls in order of time, shared by some threads.

    Args:
        size: How many devices are live at any time.
        life: Mean seconds of a visit.
    """

    def __init__(self, size: int, life: float) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._random = random.Random(0)
        now = time.monotonic()
        self._visitors = [
            self._arrival(now + self._random.random() * _HEARTBEAT_SECONDS) for _ in range(size)
        ]
        heapq.heapify(self._visitors)
        self.latencies: list[float] = []
        self.late: list[float] = []
        self.failures: list[BaseException] = []

    def _arrival(self, moment: float) -> _Visitor:
        return _Visitor(moment, moment + self._random.expovariate(1 / self._life))

    def work(self, until: float) -> None:
        """Call what is due until the end."""
        try:
            while not self.failures and (now := time.monotonic()) < until:
                with self._lock:
                    due = self._visitors[0].due
                    visitor = heapq.heappop(self._visitors) if due <= now else None
                if visitor is None:
                    time.sleep(min(due - now, 0.2))
                    continue
                began = time.monotonic()
                visitor.act()
                ended = time.monotonic()
                visitor.due += _HEARTBEAT_SECONDS
                with self._lock:
                    self.latencies.append(ended - began)
                    self.late.append(began - (visitor.due - _HEARTBEAT_SECONDS))
                    if visitor.due > visitor.leaves_at:
                        visitor = self._arrival(visitor.leaves_at)
                    heapq.heappush(self._visitors, visitor)
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            connection.close()


@contextmanager
def _celery(folder: Path, workers: int) -> Iterator[None]:
    """Run Celery beat and workers of the closer as an operator does."""
    celery = [sys.executable, "-m", "celery", "-A", "pinactivity.celery"]
    worker = [*celery, "worker", "--pool", "threads", "--queues", "closer", "--concurrency", "1"]
    commands = [[*celery, "beat", "--schedule", str(folder / "schedule"), "--pidfile="]]
    commands += [
        [*worker, "--purge", "--without-mingle", "--hostname", f"soak-{number}@bench"]
        for number in range(workers)
    ]
    environment = {**os.environ, "DATABASE_URL": database_url(), "LOG_LEVEL": "WARNING"}
    processes = [
        subprocess.Popen(command, cwd=settings.BASE_DIR, env=environment, stdout=sys.stderr)
        for command in commands
    ]
    try:
        yield
        if any(process.poll() is not None for process in processes):
            raise BenchFailed("Celery beat or a worker ended.")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _oldest() -> float:
    moment = activity_snapshot().oldest_activity_at
    return (statement_time() - moment).total_seconds() if moment else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="Active at any time")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=8, help="that call the services")
    options = parser.parse_args()
    threshold = settings.ACTIVITY_CLOSER.inactivity_threshold
    live = int(options.sessions * _LIVE_PART)
    silent = options.sessions - live
    # Within the threshold as many devices leave as are silent at any time.
    crowd_life = live * threshold.total_seconds() / silent
    oldest: list[float] = []
    active: list[int] = []
    with (
        own_database(),
        tempfile.TemporaryDirectory() as folder,
        _celery(Path(folder), options.workers),
    ):
        with connection.cursor() as cursor:
            rows: dict[str, Any] = {"threshold": threshold, "count": silent, "views": _VIEWS}
            cursor.execute(_LOAD_SILENT, rows)
            cursor.execute("ANALYZE")
        crowd = _Crowd(live, crowd_life)
        began = time.monotonic()
        until = began + options.minutes * 60
        threads = [
            threading.Thread(target=crowd.work, args=(until,)) for _ in range(options.threads)
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < until and not crowd.failures:
            time.sleep(10)
            with contextlib.suppress(Error):
                oldest.append(_oldest())
                active.append(activity_snapshot().active_sessions)
            say(
                f"{(time.monotonic() - began) / 60:.1f} min: {active[-1]} Active, the longest"
                f" silence {oldest[-1]:.0f} s, {len(crowd.latencies)} calls"
            )
        for thread in threads:
            thread.join()
        if crowd.failures:
            raise crowd.failures[0]
        with connection.cursor() as cursor:
            slo: dict[str, Any] = {"slo": threshold + settings.ACTIVITY_CLOSER.polling_interval}
            cursor.execute(_LAGS, slo)
            closed, within, longest, p99 = cursor.fetchone()
            cursor.execute(_DOUBLES)
            doubled, without_event = cursor.fetchone()
    percentiles = statistics.quantiles(crowd.latencies, n=100)
    conclude(
        {
            "name": "soak",
            "minutes": options.minutes,
            "active_sessions": round(statistics.median(active)),
            "closed_rows": closed,
            "within_objective": round(within / closed, 5),
            "close_lag_p99_s": round(float(p99), 1),
            "close_lag_max_s": round(float(longest), 1),
            "oldest_active_max_s": round(max(oldest), 1),
            "oldest_active_bound_s": 2 * threshold.total_seconds(),
            "double_events": doubled,
            "events_beyond_closed_rows": without_event,
            "calls": len(crowd.latencies),
            "call_p50_ms": round(percentiles[49] * 1000, 2),
            "call_p99_ms": round(percentiles[98] * 1000, 2),
            "call_max_ms": round(max(crowd.latencies) * 1000, 1),
            "calls_late_p99_s": round(statistics.quantiles(crowd.late, n=100)[98], 2),
        }
    )


if __name__ == "__main__":
    main()
