"""How fast one worker and two workers close a backlog.

`make bench NAME=catch_up` loads 100,000 due sessions with 3 views each, as after an outage. It
closes them by runs in processes of their own: first one run, then two at once. One run alone must
end within MaxRunDuration. Every row must close once.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from django.conf import settings
from django.db import connection

from bench.backlog import VIEWS_PER_SESSION, Backlog
from bench.measure import BenchFailed, conclude, database_url, own_database, say

_RUN = """
import sys, time
import django
django.setup()
from django.conf import settings
from django.db import connection
from sessions.closer import ActivityCloser
connection.ensure_connection()
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
result = ActivityCloser(settings.ACTIVITY_CLOSER).run()
print(result.outcome.value, result.failures, result.closed_sessions, time.perf_counter() - began)
"""

_COUNTS = """
    SELECT (SELECT count(*) FROM sessions WHERE status = 'Inactive'),
           (SELECT count(*) FROM property_object_views WHERE status = 'Inactive'),
           (SELECT count(*) FROM outbox_messages),
           (SELECT count(DISTINCT (topic, key)) FROM outbox_messages)
"""


def _close(workers: int) -> dict[str, Any]:
    """Close the backlog by `workers` runs at once; return the seconds and each run's total."""
    environment = {
        "DJANGO_SETTINGS_MODULE": "pinactivity.settings",
        "LOG_LEVEL": "ERROR",
        "DATABASE_URL": database_url(),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RUN],
            cwd=settings.BASE_DIR,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(workers)
    ]
    try:
        for process in processes:
            assert process.stdout
            if process.stdout.readline().strip() != "ready":
                raise BenchFailed("A worker did not start.")
        began = time.perf_counter()
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.communicate()[0].split() for process in processes]
        taken = time.perf_counter() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(answer[:2] != ["Succeeded", "0"] for answer in answers):
        raise BenchFailed(f"Not every run did its work: {answers}")
    return {"seconds": taken, "closed": [int(answer[2]) for answer in answers]}


def _check(sessions: int) -> None:
    views = VIEWS_PER_SESSION * sessions
    with connection.cursor() as cursor:
        cursor.execute(_COUNTS)
        counts = cursor.fetchone()
    if counts != (sessions, views, sessions + views, sessions + views):
        raise BenchFailed(f"The runs left {counts}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    bound = settings.ACTIVITY_CLOSER.max_run_duration.total_seconds()
    results: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    with own_database():
        backlog = Backlog(options.sessions)
        for _ in range(options.repeats):
            for workers, own in results.items():
                backlog.load()
                done = _close(workers)
                _check(options.sessions)
                own.append(done)
                say(f"{workers} at once: {done['seconds']:.1f} s, sessions {done['closed']}")
    one, two = (min(done["seconds"] for done in results[workers]) for workers in (1, 2))
    conclude(
        {
            "name": "catch_up",
            "sessions": options.sessions,
            "views": VIEWS_PER_SESSION * options.sessions,
            "one_worker_seconds": round(one, 1),
            "two_workers_seconds": round(two, 1),
            "speedup": round(one / two, 2),
            "within_max_run_duration": one < bound,
            "sessions_per_second": round(options.sessions / one),
        }
    )


if __name__ == "__main__":
    main()
