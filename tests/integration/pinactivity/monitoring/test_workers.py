"""Health of worker and beat by their progress; see also test_entry_points."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from outbox.services import enqueue
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.monitoring.workers import BeatProgress, WorkerProgress, report_beat, report_worker
from pinactivity.postgres.clock import statement_time
from sessions.events import SessionLinked
from sessions.options import ActivityCloserOptions
from tests.factories import silent_session
from tests.outages import postgres_away

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES = ["closer", "relay", "maintenance"]


class Clock:
    """A clock that the test moves, seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def status(progress: WorkerProgress) -> tuple[bool, list[str]]:
    alive, body = report_worker(progress, QUEUES)
    assert body["Status"] == ("live" if alive else "stuck")
    return alive, body["Overdue"]


def test_worker_with_nothing_to_do_is_live(clock: Clock) -> None:
    progress = WorkerProgress(clock)
    silent_session(minutes=11)
    clock.now += 3600
    assert status(progress) == (True, [])


def test_worker_that_leaves_overdue_rows_is_stuck_and_one_that_ended_a_task_is_not(
    clock: Clock,
) -> None:
    progress = WorkerProgress(clock)
    silent_session(minutes=16)
    assert status(progress) == (True, [])  # it has only begun
    clock.now += 181
    assert status(progress) == (False, ["closer"])
    progress.begin("run")
    assert status(progress) == (True, [])
    progress.end("run")
    assert status(progress) == (True, [])


def test_row_that_the_next_ticks_may_still_take_is_not_overdue(clock: Clock) -> None:
    progress = WorkerProgress(clock)
    silent_session(minutes=14)  # threshold 12, and three intervals of a minute
    clock.now += 3600
    assert status(progress) == (True, [])


def test_relay_that_leaves_an_event_is_stuck(clock: Clock) -> None:
    progress = WorkerProgress(clock)
    event = SessionLinked(
        session_id=new_id(),
        anonymous_id=new_id(),
        user_id=new_id(),
        linked_at=iso_utc(statement_time()),
        version=2,
    )
    with transaction.atomic():
        enqueue([event])
    clock.now += 3600
    assert status(progress) == (True, [])  # the event is young
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox_messages SET created_at = created_at - interval '2 min'")
    assert status(progress) == (False, ["relay"])
    assert report_worker(progress, ["closer"])[0]


def test_task_that_outlives_its_bounds_is_stuck(clock: Clock, settings: Any) -> None:
    settings.ACTIVITY_CLOSER = ActivityCloserOptions(max_run_duration=timedelta(minutes=5))
    progress = WorkerProgress(clock)
    progress.begin("run")
    clock.now += 7 * 60
    progress.begin("another")
    assert status(progress) == (True, [])
    clock.now += 1
    assert status(progress) == (False, [])
    progress.end("run")
    assert status(progress) == (True, [])


def test_worker_that_cannot_ask_waits_for_postgresql(clock: Clock) -> None:
    progress = WorkerProgress(clock)
    clock.now += 3600
    with postgres_away():
        alive, body = report_worker(progress, QUEUES)
    assert (alive, body["WaitsFor"]) == (True, "PostgreSQL")


def test_beat_is_stuck_when_it_sends_nothing(clock: Clock) -> None:
    progress = BeatProgress(clock)
    clock.now += 30
    assert report_beat(progress) == (True, {"Status": "live", "SilentSeconds": 30.0})
    clock.now += 1
    assert report_beat(progress) == (False, {"Status": "stuck", "SilentSeconds": 31.0})
    progress.sent()
    assert report_beat(progress)[0]
