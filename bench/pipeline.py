"""From the commit that closes a session to the answer of the API that counts it.

`make bench NAME=pipeline` runs the relay's worker, beat and the consumers of facts as processes, as
deployed, and closes a session with one view every second, each of an object of a developer of its
own. All the time it asks the API for the developers whose session does not count yet. Most of the
time is the consumers' flush interval (`DEV_STATS_FLUSH_INTERVAL`, 5 s), by design.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.core.management import call_command

from bench.measure import BenchFailed, conclude, database_url, own_database, say
from devstats.ownership import PropertyObject
from devstats.selectors import summarise_sessions
from devstats.tables import PROPERTY_OBJECTS
from devstats.writer import FactWriter
from pinactivity.core.ids import new_id
from pinactivity.http.periods import Period
from pinactivity.postgres.clock import statement_time
from sessions.device import identify_device
from sessions.services import close_sessions_now, start_session
from views.lifecycle import ViewSource
from views.services import open_view

_DEVICE = identify_device("Mozilla/5.0 (X11; Linux x86_64) Firefox/120.0", None)
_CONSUMERS = ("dev-stats-session-ended", "dev-stats-property-object-view-ended")


@contextmanager
def _process(*command: str) -> Iterator[None]:
    environment = {**os.environ, "DATABASE_URL": database_url(), "LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command, cwd=settings.BASE_DIR, env=environment, stdout=sys.stderr, stderr=sys.stderr
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def _system() -> Iterator[None]:
    celery = (sys.executable, "-m", "celery", "-A", "pinactivity.celery")
    worker = [
        *("worker", "--pool", "threads", "--queues", "relay", "--concurrency", "2"),
        *("--purge", "--without-mingle", "--without-gossip"),
    ]
    with ExitStack() as stack:
        schedule = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(_process(*celery, *worker))
        stack.enter_context(_process(*celery, "beat", "--schedule", f"{schedule}/schedule"))
        stack.enter_context(_process(sys.executable, "manage.py", "consume", *_CONSUMERS))
        yield


class Visits:
    """Sessions that have closed, by developer; and how long each took to be counted."""

    def __init__(self, developers: list[UUID]) -> None:
        self._developers = developers
        self._closed: dict[UUID, float] = {}
        self.seconds: list[float] = []
        moment = statement_time()
        self._period = Period(moment - timedelta(days=1), moment + timedelta(days=1))

    def make(self, number: int) -> None:
        """Start a session, open a view in it, close both."""
        started = start_session(anonymous_id=None, user_id=None, device=_DEVICE).session
        open_view(
            session_id=started.session_id,
            anonymous_id=started.anonymous_id,
            device=_DEVICE,
            property_object_id=_object(number),
            view_source=ViewSource.MAP,
            filter_snapshot=None,
        )
        close_sessions_now(session_ids=[started.session_id])
        self._closed[self._developers[number]] = time.monotonic()

    def ask(self) -> None:
        """Ask once for each that is not counted yet."""
        for developer, closed in list(self._closed.items()):
            if summarise_sessions(developer, self._period).total.sessions:
                self.seconds.append(time.monotonic() - closed)
                del self._closed[developer]

    def wait(self, seconds: float) -> None:
        """Wait until all count."""
        deadline = time.monotonic() + seconds
        while self._closed:
            if time.monotonic() > deadline:
                raise BenchFailed(f"{len(self._closed)} sessions are not counted.")
            self.ask()


def _object(number: int) -> UUID:
    return UUID(int=0xB0 << 64 | number + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100, help="one a second")
    options = parser.parse_args()
    call_command("migrate_clickhouse", verbosity=0)
    call_command("create_topics", verbosity=0)
    developers = [new_id() for _ in range(options.sessions + 1)]
    with own_database():
        writer = FactWriter()
        since = statement_time() - timedelta(days=1)
        objects = [
            PropertyObject(_object(number), developer, None, since)
            for number, developer in enumerate(developers)
        ]
        writer.append(PROPERTY_OBJECTS, {str(each[0]): each for each in objects})
        writer.close()
        visits = Visits(developers)
        with _system():
            visits.make(options.sessions)
            visits.wait(120)  # everything has started
            visits.seconds.clear()
            done = threading.Event()
            asking = threading.Thread(target=_ask_until, args=(visits, done))
            asking.start()
            for number in range(options.sessions):
                visits.make(number)
                if number % 10 == 0:
                    say(f"{number} closed, {len(visits.seconds)} counted")
                time.sleep(1)
            done.set()
            asking.join()
            visits.wait(120)
    cuts = statistics.quantiles(visits.seconds, n=100)
    conclude(
        {
            "name": "pipeline",
            "sessions": len(visits.seconds),
            "p50_s": round(cuts[49], 2),
            "p99_s": round(cuts[98], 2),
            "max_s": round(max(visits.seconds), 2),
        }
    )


def _ask_until(visits: Visits, done: threading.Event) -> None:
    while not done.is_set():
        visits.ask()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
