"""Threads open views without pause while closers close everything (INV-LV-007).

`--storm-seconds 60` is the run that the design asks for; CI's is shorter.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

import pytest
from django.db import connection

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.lifecycle import RunOutcome
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from tests.concurrency import Background
from tests.factories import DEVICE
from views.events import PropertyObjectViewEnded
from views.lifecycle import ViewSource
from views.models import PropertyObjectView
from views.services import OpenedView, extend_view, open_view

pytestmark = pytest.mark.django_db(transaction=True)

OPENERS, CLOSERS = 4, 2
# So few that openers meet each other in a session, and on an object.
DEVICES = [new_id() for _ in range(6)]
OBJECTS = [new_id() for _ in range(12)]


@dataclass
class Opener:
    """Opens random views on random devices, and sends a heartbeat for every fourth."""

    stop: threading.Event
    sessions: dict[UUID, UUID]
    """Each device's session by the last answer. Openers share it, so it is often outdated."""
    opened: list[OpenedView] = field(default_factory=list)
    heartbeats_accepted: int = 0

    def __call__(self) -> None:
        chance = random.Random(id(self))
        while not self.stop.is_set():
            device = chance.choice(DEVICES)
            view = open_view(
                session_id=self.sessions.get(device, device),
                anonymous_id=device,
                device=DEVICE,
                property_object_id=chance.choice(OBJECTS),
                view_source=ViewSource.MAP,
                filter_snapshot=None,
            )
            self.sessions[device] = view.session_id
            self.opened.append(view)
            if len(self.opened) % 4 == 0:
                self.heartbeats_accepted += extend_view(view_id=view.view_id, anonymous_id=device)


@dataclass
class Closer:
    """Runs with a clock so far ahead that every row is due."""

    stop: threading.Event
    runs: int = 0
    sessions: int = 0
    views: int = 0

    def __call__(self) -> None:
        options = ActivityCloserOptions()
        ahead = options.inactivity_threshold + timedelta(minutes=1)
        while not self.stop.is_set():
            result = ActivityCloser(options).run(now=statement_time() + ahead)
            assert (result.outcome, result.failures) == (RunOutcome.SUCCEEDED, 0)
            self.runs += 1
            self.sessions += result.closed_sessions
            self.views += result.closed_views


def test_no_snapshot_shows_an_active_view_in_an_inactive_session_inv_lv_007_inv_lv_008(
    pytestconfig: pytest.Config,
) -> None:
    stop = threading.Event()
    sessions: dict[UUID, UUID] = {}
    openers = [Opener(stop, sessions) for _ in range(OPENERS)]
    closers = [Closer(stop) for _ in range(CLOSERS)]
    deadlocks = count_deadlocks()

    snapshots = watch([*openers, *closers], stop, seconds=pytestconfig.getoption("storm_seconds"))
    ActivityCloser(ActivityCloserOptions()).run(now=statement_time() + timedelta(hours=1))

    assert count_deadlocks() == deadlocks
    opened = [view for opener in openers for view in opener.opened]
    totals = {
        "opens": len(opened),
        "new views": sum(view.is_new for view in opened),
        "restarts": sum(view.restarted for view in opened),
        "heartbeats accepted": sum(opener.heartbeats_accepted for opener in openers),
        "closer runs": sum(closer.runs for closer in closers),
        "sessions closed": sum(closer.sessions for closer in closers),
        "views closed": sum(closer.views for closer in closers),
        "snapshots": snapshots,
    }
    print(totals)  # noqa: T201 - the run's totals, for pytest -s
    assert all(totals.values())
    # The stored views are the answered ones: none is lost, none is double.
    assert set(PropertyObjectView.objects.values_list("id", "session_id")) == {
        (view.view_id, view.session_id) for view in opened
    }
    assert PropertyObjectView.objects.count() == totals["new views"]
    # Each closed once, with one event (INV-LV-008).
    assert not PropertyObjectView.objects.active().exists()
    assert not Session.objects.active().exists()
    ended = OutboxMessage.objects.filter(topic=PropertyObjectViewEnded.TOPIC)
    assert sorted(ended.values_list("key", flat=True)) == sorted(
        {str(view.view_id) for view in opened}
    )


def watch(calls: Sequence[Callable[[], None]], stop: threading.Event, *, seconds: float) -> int:
    """Take snapshots for some seconds while the calls run; return how many there were.

    Raises:
        AssertionError: a snapshot shows an Active view in an Inactive session.
        Exception: what a call raised.
    """
    ends_at = time.monotonic() + seconds
    snapshots = 0
    with ExitStack() as stack:
        running = [stack.enter_context(Background(call)) for call in calls]
        stack.callback(stop.set)
        # A call that ends early has failed: its result raises.
        while time.monotonic() < ends_at and not any(run.is_done for run in running):
            assert live_views_of_closed_sessions() == []
            snapshots += 1
    for run in running:
        run.result()
    return snapshots


def live_views_of_closed_sessions() -> list[UUID]:
    """Return the Active views of Inactive sessions, in one snapshot."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT view.id FROM property_object_views AS view"
            " JOIN sessions AS session ON session.id = view.session_id"
            " WHERE view.status = 'Active' AND session.status <> 'Active'"
        )
        return [view_id for (view_id,) in cursor.fetchall()]


def count_deadlocks() -> int:
    """Count the deadlocks of this database. Backends report theirs at the latest when they end."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        (deadlocks,) = cursor.fetchone()
    assert isinstance(deadlocks, int)
    return deadlocks
