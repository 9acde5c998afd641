"""Plays recorded visits through the same services that devices call (design, section 16)."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from sessions.closer import ActivityCloser
from sessions.device import identify_device
from sessions.lifecycle import RunOutcome
from sessions.models import Session
from sessions.services import record_heartbeat, start_session
from views.lifecycle import ViewSource
from views.services import extend_view, open_view

_HEADING = ["seconds", "device", "page"]


class UnreadableVisits(Exception):
    """Names what is wrong with a file of visits, and in which line."""


class ReplayFailed(Exception):
    """A run of the closer failed, so the rest of the replay would not be exact."""


@dataclass(frozen=True, slots=True)
class Visit:
    seconds: int
    """Since the replay's start."""
    device: int
    page: int | None


@dataclass(slots=True)
class _FrontEnd:
    """What the front end on a device remembers."""

    session_id: UUID
    views: dict[int, UUID] = field(default_factory=dict)


@dataclass(slots=True)
class ReplayTotals:
    rows: int = 0
    ticks: int = 0
    sessions_closed: int = 0
    views_closed: int = 0


def anonymous_id(device: int) -> UUID:
    return uuid5(NAMESPACE_URL, f"device:{device}")


def property_object_id(page: int) -> UUID:
    return uuid5(NAMESPACE_URL, f"page:{page}")


def developer_id(number: int) -> UUID:
    return uuid5(NAMESPACE_URL, f"developer:{number}")


def owner_of_page(page: int) -> int:
    """Return the number of the developer who owns a page's object: 1 to 20, or 0 for nobody."""
    return page % 21


def read_visits(path: Path) -> list[Visit]:
    """Read rows `seconds,device,page` (page may be empty) in the order of seconds.

    Raises:
        UnreadableVisits: the file cannot be read, or a line is not a visit.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if next(rows, None) != _HEADING:
                raise UnreadableVisits(f"{path}: the first line must be {','.join(_HEADING)}.")
            visits: list[Visit] = []
            for row in rows:
                visit = _parse(row)
                if visit is None or (visits and visit.seconds < visits[-1].seconds):
                    raise UnreadableVisits(
                        f"{path}: line {rows.line_num} is not seconds,device,page"
                        " in whole numbers and the order of time."
                    )
                visits.append(visit)
            return visits
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise UnreadableVisits(f"{path}: cannot be read ({type(exc).__name__}).") from exc


def _parse(row: Sequence[str]) -> Visit | None:
    if len(row) != len(_HEADING) or not (row[0].isdecimal() and row[1].isdecimal()):
        return None
    if row[2] and not row[2].isdecimal():
        return None
    return Visit(int(row[0]), int(row[1]), int(row[2]) if row[2] else None)


class VisitReplay:
    """One replay of visits. The caller holds the lock REPLAY, so that the live closer does not run.

    Args:
        visits: In the order of seconds.
        start: The time of second 0, aware.
        tick: Between two runs of the closer; a run comes before the visits of its second.
        user_agents: Device N has the one at index (N - 1) mod their number.
        closer: Its runs get the replay's time.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        *,
        start: datetime,
        tick: timedelta,
        user_agents: Sequence[str],
        closer: ActivityCloser,
    ) -> None:
        self._visits = visits
        self._start = start
        self._tick = tick
        self._user_agents = user_agents
        self._closer = closer
        self._devices: dict[int, _FrontEnd] = {}
        self._next_tick = start
        self._totals = ReplayTotals()

    def run(self, *, advance: Callable[[int], object] = lambda _: None) -> ReplayTotals:
        """Play all visits, then run the closer until nothing of the replay is Active.

        Args:
            advance: Called with the number of visits played since its last call.

        Raises:
            ReplayFailed: a run of the closer did not succeed.
        """
        for visit in self._visits:
            moment = self._start + timedelta(seconds=visit.seconds)
            while self._next_tick <= moment:
                self._close_inactive()
            self._play(visit, moment)
            self._totals.rows += 1
            advance(1)
        while self._is_active():
            self._close_inactive()
        return self._totals

    def _close_inactive(self) -> None:
        run = self._closer.run(now=self._next_tick)
        if run.outcome is not RunOutcome.SUCCEEDED or run.failures:
            raise ReplayFailed(f"The closer's run ended as {run.outcome}.")
        self._next_tick += self._tick
        self._totals.ticks += 1
        self._totals.sessions_closed += run.closed_sessions
        self._totals.views_closed += run.closed_views

    def _is_active(self) -> bool:
        devices = [anonymous_id(device) for device in self._devices]
        return Session.objects.active().filter(anonymous_id__in=devices).exists()

    def _play(self, visit: Visit, moment: datetime) -> None:
        """Start the device's session or send its heartbeat; with a page, the same for its view."""
        anonymous = anonymous_id(visit.device)
        user_agent = self._user_agents[(visit.device - 1) % len(self._user_agents)]
        device = identify_device(user_agent, None)
        state = self._devices.get(visit.device)
        if state is None:
            started = start_session(anonymous_id=anonymous, user_id=None, device=device, now=moment)
            state = self._devices[visit.device] = _FrontEnd(started.session.session_id)
        elif visit.page is None:
            heartbeat = record_heartbeat(
                session_id=state.session_id,
                anonymous_id=anonymous,
                device=device,
                now=moment,
            )
            state.session_id = heartbeat.session.session_id
        if visit.page is None:
            return
        view_id = state.views.get(visit.page)
        if view_id and extend_view(view_id=view_id, anonymous_id=anonymous, now=moment):
            return
        opened = open_view(
            session_id=state.session_id,
            anonymous_id=anonymous,
            device=device,
            property_object_id=property_object_id(visit.page),
            view_source=ViewSource.CATALOG,
            filter_snapshot=None,
            now=moment,
        )
        state.session_id = opened.session_id
        state.views[visit.page] = opened.view_id
