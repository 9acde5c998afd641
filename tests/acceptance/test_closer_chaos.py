"""Closings go on while PostgreSQL crashes, connections are cut and workers are killed.

The workers and Celery beat are real. Sessions and views fall due all the time. After the chaos a
backlog closes as fast as before it, no row or event is lost, and no row has closed twice.
`--chaos-scale=full` uses the numbers of the design.
"""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.conf import settings
from django.db import DataError, Error, connection

from embedded.errors import EmbeddedServerError
from embedded.server import Server
from embedded.stack import attach
from outbox.models import OutboxMessage
from pinactivity.celery import app
from pinactivity.postgres.locks import CLOSER
from sessions.events import SessionEnded
from sessions.models import ActivityCloserRun, Session
from tests.closings import (
    assert_one_event_for_each_closed_row_and_none_else,
    sessions_closed_around_a_view,
)
from tests.processes import CELERY, running, wait_for_backends_to_end, wait_until, worker
from views.events import PropertyObjectViewEnded
from views.models import PropertyObjectView

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(1800),
]


@dataclass(frozen=True)
class Scale:
    restarts: int
    terminating_seconds: float
    kills: int


SCALES = {"small": Scale(3, 8.0, 5), "full": Scale(20, 60.0, 50)}


@pytest.fixture
def scale(pytestconfig: pytest.Config) -> Scale:
    return SCALES[pytestconfig.getoption("chaos_scale")]


BACKLOG = 300
UNITS_OF = "ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION"


def active() -> list[Any]:
    return [model.objects.filter(status="Active") for model in (Session, PropertyObjectView)]


def active_sessions() -> int:
    return Session.objects.filter(status="Active").count()


@dataclass
class Visitors:
    """Devices that have just become silent: 100 sessions a second, half of them with 3 views."""

    durations: dict[str, timedelta] = field(default_factory=dict)
    """Duration by id of every row that is known to be committed."""
    closed_around_a_view: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def fall_silent(self, sessions: int, *, views: int, within: float = 0.0) -> list[str]:
        """Insert sessions with views that fall due within so many seconds; return all ids.

        The first view outlives its session by a minute, so that phase B closes it with the
        session; the others are as old or older, and phase A closes them alone.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                """
                WITH new AS (
                    INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at,
                                          user_agent, browser, os, device_type)
                    SELECT gen_random_uuid(), gen_random_uuid(),
                           moment - random() * interval '10 min', moment, 'test', '', '', 'Unknown'
                    FROM (SELECT statement_timestamp()
                                 + (random() * %(within)s - %(threshold)s) * interval '1 s'
                          FROM generate_series(1, %(sessions)s)) AS silent (moment)
                    RETURNING id, created_at, last_activity_at
                ), opened AS (
                    INSERT INTO property_object_views (id, session_id, property_object_id,
                                                       view_source, created_at, last_activity_at)
                    SELECT gen_random_uuid(), id, gen_random_uuid(), 'Map', created_at,
                           CASE n WHEN 1 THEN last_activity_at + interval '1 min'
                           WHEN 2 THEN last_activity_at
                           ELSE created_at + random() * (last_activity_at - created_at) END
                    FROM new, generate_series(1, %(views)s) AS n
                    RETURNING id, created_at, last_activity_at
                )
                SELECT id::text, last_activity_at - created_at
                FROM (TABLE new UNION ALL TABLE opened) AS silent
                """,
                {
                    "threshold": settings.ACTIVITY_CLOSER.inactivity_threshold.total_seconds(),
                    "within": within,
                    "sessions": sessions,
                    "views": views,
                },
            )
            inserted: dict[str, timedelta] = dict(cursor.fetchall())
        self.durations |= inserted
        return list(inserted)

    def run(self) -> None:
        try:
            while not self._stop.wait(0.2):
                try:
                    for views in (0, 3):
                        self.fall_silent(10, views=views, within=2.0)
                    self.closed_around_a_view += sessions_closed_around_a_view()
                except Error:  # unknown whether the commit succeeded
                    connection.close()
        finally:
            connection.close()

    @contextmanager
    def falling_silent(self) -> Iterator["Visitors"]:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(self.run)
            try:
                yield self
            finally:
                self._stop.set()
            run.result()

    def time_to_close(self) -> float:
        """Return the seconds until a new backlog is closed to the last row."""
        began = time.monotonic()
        backlog = self.fall_silent(BACKLOG, views=3)
        wait_until(
            lambda: not any(rows.filter(id__in=backlog).exists() for rows in active()),
            what="the closing of a new backlog",
        )
        return round(time.monotonic() - began, 2)


@dataclass
class Workers:
    """Celery beat with a tick every second, a worker for each queue, and the visitors."""

    folder: Path
    options: Mapping[str, str]
    visitors: Visitors = field(default_factory=Visitors)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @contextmanager
    def running(self, *, queues: tuple[str, ...]) -> Iterator[list["subprocess.Popen[bytes]"]]:
        """Run them until the block ends, all rows are closed and all events are sent."""
        schedule = str(self.folder / "schedule")
        argv = [[*CELERY, "beat", "--pidfile=", "--schedule", schedule]]
        argv += [worker(queue, "--purge") for queue in queues]
        with ExitStack() as stack:
            processes = [
                stack.enter_context(running(each, self.log, **self._variables())) for each in argv
            ]
            with self.visitors.falling_silent():
                yield processes[1:]
            self.settle()
            for process in processes:
                process.send_signal(signal.SIGTERM)
            ends = [process.wait(30) for process in processes]
        assert set(ends) == {0}, self.log.read_text()[-2000:]

    @contextmanager
    def closer(self) -> Iterator["subprocess.Popen[bytes]"]:
        with running(worker("closer", "--purge"), self.log, **self._variables()) as process:
            yield process

    def _variables(self) -> dict[str, str]:
        return {
            "ACTIVITY_CLOSER_POLLING_INTERVAL": "00:00:01",
            "ACTIVITY_CLOSER_SINGLE_INSTANCE": "true",
            **self.options,
        }

    def settle(self) -> None:
        wait_until(
            lambda: not any(rows.exists() for rows in active()), what="the closing of everything"
        )
        pending = OutboxMessage.objects.filter(published_at=None)
        wait_until(lambda: not pending.exists(), seconds=300, what="the delivery of everything")


@pytest.fixture
def make_workers(tmp_path: Path, kafka_topics: None) -> Iterator[Callable[..., Workers]]:
    app.control.purge()
    yield lambda **options: Workers(tmp_path, options)
    app.control.purge()
    wait_for_backends_to_end()


def assert_nothing_is_lost_and_nothing_closed_twice(
    visitors: Visitors, read_topic: Callable[[str], list[Any]]
) -> dict[str, int]:
    """Check the rows, the outbox and the topics; return the counts."""
    closed: dict[str, timedelta] = {}
    for model in (Session, PropertyObjectView):
        for row in model.objects.all():
            assert (row.status, row.version) == ("Inactive", 2)
            assert row.duration == row.last_activity_at - row.created_at
            closed[str(row.pk)] = row.duration
    assert visitors.durations.items() <= closed.items()
    assert_one_event_for_each_closed_row_and_none_else()
    assert not visitors.closed_around_a_view
    events = {
        str(message_id): (key, json.loads(headers)["Version"])
        for message_id, key, headers in OutboxMessage.objects.values_list(
            "message_id", "key", "headers"
        )
    }
    assert {version for _, version in events.values()} == {"2"}
    arrived = [*read_topic(SessionEnded.TOPIC), *read_topic(PropertyObjectViewEnded.TOPIC)]
    assert events == {
        headers["MessageId"].decode(): (record.key.decode(), headers["Version"].decode())
        for record in arrived
        for headers in [dict(record.headers)]
    }
    return {"closed": len(closed), "repeated": len(arrived) - len(events)}


def backends(process: "subprocess.Popen[bytes]", *, writing: str) -> dict[int, str | None]:
    """Return a process's backends in PostgreSQL, each with its transaction if it writes a table."""
    links = psutil.Process(process.pid).net_connections("tcp")
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT pid, CASE WHEN EXISTS (
                SELECT FROM pg_locks WHERE pg_locks.pid = backend.pid
                AND mode = 'RowExclusiveLock' AND relation = %s::regclass
            ) THEN backend_xid::text END
            FROM pg_stat_activity AS backend WHERE client_port = ANY(%s)
            """,
            [writing, [link.laddr.port for link in links]],
        )
        return dict(cursor.fetchall())


def wait_for_closings(process: "subprocess.Popen[bytes]", table: str) -> str:
    """Wait for a transaction of the closer that has closed rows of a table; return its id."""
    found: list[str] = []

    def is_closing() -> bool:
        found.extend(filter(None, backends(process, writing=table).values()))
        return bool(found)

    wait_until(is_closing, what="a batch under way")
    return found[0]


def crash(postgres: Server) -> None:
    """Crash PostgreSQL as `pg_ctl -m immediate` does, without delay, and start it."""
    postgres.process.signal(signal.SIGQUIT)
    postgres.process.wait_exit(30)
    postgres.start()


def was_rolled_back(transaction: str) -> bool:
    """Return whether PostgreSQL rolled a transaction back, possibly by a crash."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_xact_status(%s::xid8)", [transaction])
            return bool(cursor.fetchone()[0] == "aborted")
    except DataError:
        return True  # the id is unknown: the transaction never reached the disk


def holders(lock: str) -> list[int]:
    """Return the backends that hold an exclusive advisory lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT pid FROM pg_locks
            WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'
              AND (classid::bigint << 32) | objid::bigint = hashtextextended(%s, 0)
            """,
            [lock],
        )
        return [pid for (pid,) in cursor.fetchall()]


def report(name: str, record_property: Callable[[str, object], None], **totals: object) -> None:
    """Record the totals of a test; pytest -s prints them."""
    record_property(name, totals)
    sys.stdout.write(f"\n{name} {totals}\n")


def test_postgresql_crashing_in_mid_batch_loses_and_repeats_nothing(
    scale: Scale,
    make_workers: Callable[..., Workers],
    read_topic: Callable[[str], list[Any]],
    record_property: Callable[[str, object], None],
) -> None:
    try:
        postgres = attach("postgres")
    except EmbeddedServerError:
        pytest.skip("PostgreSQL is not the embedded one: it cannot be restarted")
    workers = make_workers(**{UNITS_OF: "500"})
    visitors = workers.visitors
    in_mid_batch = restarts = 0
    recoveries: list[float] = []
    with workers.running(queues=("closer", "relay")) as (closer, _):
        while in_mid_batch < scale.restarts:
            visitors.fall_silent(1000, views=3)
            # Odd restarts hit phase B, after phase A has closed the views.
            table = "sessions" if restarts % 2 else "property_object_views"
            transaction = wait_for_closings(closer, table)
            crash(postgres)
            restarts += 1
            connection.close()
            assert restarts < 10 * scale.restarts, "the crashes came between batches"
            if was_rolled_back(transaction):
                in_mid_batch += 1
                recoveries.append(visitors.time_to_close())
        undisturbed = visitors.time_to_close()

    counts = assert_nothing_is_lost_and_nothing_closed_twice(visitors, read_topic)
    report(
        "crashes",
        record_property,
        restarts=restarts,
        in_mid_batch=in_mid_batch,
        undisturbed_seconds=undisturbed,
        recovery_seconds=recoveries,
        **counts,
    )
    assert "Traceback" not in workers.log.read_text()


def test_connections_cut_five_times_a_second_lose_and_repeat_nothing(
    scale: Scale,
    make_workers: Callable[..., Workers],
    read_topic: Callable[[str], list[Any]],
    record_property: Callable[[str, object], None],
) -> None:
    workers = make_workers(**{UNITS_OF: "2"})
    visitors = workers.visitors
    cut = in_mid_batch = 0
    with workers.running(queues=("closer", "relay")) as processes:
        end = time.monotonic() + scale.terminating_seconds
        while time.monotonic() < end or not in_mid_batch:
            assert time.monotonic() < end + 60, "the cuts came between batches"
            if active_sessions() < 500:
                visitors.fall_silent(200, views=3)  # more than a run closes before it is cut
            for process in processes:
                found = backends(process, writing="property_object_views")
                with connection.cursor() as cursor:
                    cursor.execute(
                        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid))"
                        " FROM unnest(%s::int[]) AS pid",
                        [list(found)],
                    )
                    cut += cursor.fetchone()[0]
                in_mid_batch += sum(map(bool, found.values()))
            time.sleep(0.2)
        closed_by_then = Session.objects.filter(status="Inactive").count()
        recovery = visitors.time_to_close()
        undisturbed = visitors.time_to_close()

    counts = assert_nothing_is_lost_and_nothing_closed_twice(visitors, read_topic)
    report(
        "cuts",
        record_property,
        cut=cut,
        in_mid_batch=in_mid_batch,
        sessions_closed_under_cuts=closed_by_then,
        undisturbed_seconds=undisturbed,
        recovery_seconds=recovery,
        **counts,
    )
    assert "Traceback" not in workers.log.read_text()


def test_worker_killed_at_any_moment_loses_and_repeats_nothing(
    scale: Scale,
    make_workers: Callable[..., Workers],
    read_topic: Callable[[str], list[Any]],
    record_property: Callable[[str, object], None],
) -> None:
    """Every third worker dies at any moment after its start, the others during a run.

    The lock of a single instance belongs to its connection. PostgreSQL releases it when the process
    dies, so the next worker can run.
    """
    workers = make_workers(**{UNITS_OF: "5"})
    visitors = workers.visitors
    chosen = random.Random(11)
    releases: list[float] = []
    starts: list[float] = []
    with ExitStack() as stack, workers.running(queues=("relay",)):
        for kill in range(scale.kills):
            if active_sessions() < 1000:
                visitors.fall_silent(1000, views=3)
            spawned = time.monotonic()
            with workers.closer() as closer:
                if kill % 3:
                    wait_until(lambda: holders(CLOSER), what="a run of the new worker")
                    starts.append(round(time.monotonic() - spawned, 2))
                    time.sleep(chosen.uniform(0, 1))
                else:
                    time.sleep(chosen.uniform(0, 3))
                holds = bool(holders(CLOSER))
                closer.kill()
                killed = time.monotonic()
                wait_until(lambda: not holders(CLOSER), what="the end of the dead worker's lock")
                if holds:
                    releases.append(round(time.monotonic() - killed, 3))
        stack.enter_context(workers.closer())
        recovery = visitors.time_to_close()
        undisturbed = visitors.time_to_close()

    runs = ActivityCloserRun.objects.filter(outcome="Running").count()
    counts = assert_nothing_is_lost_and_nothing_closed_twice(visitors, read_topic)
    report(
        "kills",
        record_property,
        kills=scale.kills,
        in_a_run=runs,
        holding_the_lock=len(releases),
        lock_release_seconds=max(releases, default=None),
        first_run_seconds=max(starts),
        undisturbed_seconds=undisturbed,
        recovery_seconds=recovery,
        **counts,
    )
    assert runs
    assert releases
