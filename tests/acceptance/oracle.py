"""What a replay of recorded visits must leave behind, worked out from the rules alone.

The oracle imports nothing of the project. It reads the recorded visits, plays them through a
plain model of sessions, views and the closer, and answers with the closed sessions and views
that the real services must have produced. Tests compare the two.

The rules, with their sources (the design document and the specification of ActivityCloserJob):

* A row ``seconds,device,page`` happens at ``start + seconds`` (section 16, "Replay"). The device
  becomes an AnonymousId, the page a PropertyObjectId, both by ``uuid5`` in the URL namespace.
* A row starts the device's session or beats its Active one. With a page it also opens a view of
  that page in the session, or beats the Active one (sections 5, 6 and 16).
* The closer ticks at every multiple of ``tick`` counted from ``start``, before the rows of that
  very moment, and goes on after the last row until nothing is Active (section 16).
* At a tick at ``now`` the cutoff is ``now - threshold``. Phase A closes every Active view with
  ``last_activity_at < cutoff``; phase B then closes every Active session with
  ``last_activity_at < cutoff`` together with its remaining views. Silence of exactly the
  threshold is not enough (section 7, ActivityCloserJob "Algorithm").
* Closing writes ``ended_at = max(now, last_activity_at)`` and
  ``duration = last_activity_at - created_at``. A closed row never changes again: the next row of
  the device makes a new session (sections 4, 5; INV-SES-005, INV-SES-006, INV-LV-008).
* What has been silent for more than ``2 * threshold`` is abandoned and never revived (section 5,
  "Abandoned rows"). A row that finds an abandoned session closes it at that moment and starts a
  new one; a row that finds an abandoned view in a live session closes that view and opens a new
  one. This takes ``tick > threshold``: with ticks closer together the closer always comes first.

Units: seconds of the file are whole; times are aware datetimes in UTC; durations are timedeltas.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

CloseReason = Literal["Inactivity", "Abandoned"]

INACTIVITY: Final = "Inactivity"
ABANDONED: Final = "Abandoned"
VIEW_SOURCE: Final = "Catalog"

DEFAULT_THRESHOLD: Final = timedelta(minutes=12)
DEFAULT_TICK: Final = timedelta(seconds=60)

_COLUMNS: Final = ["seconds", "device", "page"]


@dataclass(frozen=True, slots=True)
class Visit:
    """One recorded row: ``device`` was seen ``seconds`` after the start, perhaps on a page."""

    seconds: int
    device: int
    page: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedView:
    """A closed view of one property object."""

    property_object_id: UUID
    created_at: datetime
    last_activity_at: datetime
    ended_at: datetime
    duration: timedelta
    close_reason: CloseReason


@dataclass(frozen=True, slots=True)
class ExpectedSession:
    """A closed session with all its views, ordered by (created_at, property_object_id)."""

    anonymous_id: UUID
    created_at: datetime
    last_activity_at: datetime
    ended_at: datetime
    duration: timedelta
    close_reason: CloseReason
    views: tuple[ExpectedView, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """How many rows, and the sum of their DurationSeconds, each rounded down on its own."""

    count: int = 0
    total_seconds: int = 0


def anonymous_id(device: int) -> UUID:
    """Return the AnonymousId of a device number (section 16)."""
    return uuid5(NAMESPACE_URL, f"device:{device}")


def property_object_id(page: int) -> UUID:
    """Return the PropertyObjectId of a page number (section 16)."""
    return uuid5(NAMESPACE_URL, f"page:{page}")


def read_visits(path: str | Path) -> list[Visit]:
    """Read a file of ``seconds,device,page`` rows; an empty page means no page.

    Raises ValueError when the heading or a row has another shape.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        heading = next(reader, None)
        if heading != _COLUMNS:
            raise ValueError(f"expected the heading {_COLUMNS}, found {heading}")
        return [_visit(row, reader.line_num) for row in reader]


def _visit(row: list[str], line: int) -> Visit:
    if len(row) != len(_COLUMNS):
        raise ValueError(f"line {line}: expected {len(_COLUMNS)} columns, found {len(row)}")
    seconds, device, page = row
    try:
        return Visit(int(seconds), int(device), int(page) if page else None)
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from error


def predict(
    rows: Iterable[Visit],
    *,
    start: datetime,
    threshold: timedelta = DEFAULT_THRESHOLD,
    tick: timedelta = DEFAULT_TICK,
) -> list[ExpectedSession]:
    """Play the rows and the closer's ticks; return every session, all of them closed.

    Rows must come in order of time. The result is ordered by (created_at, anonymous_id), which
    is unique: one device never starts two sessions at one moment.

    Raises ValueError for a ``start`` without a time zone, for a threshold or tick that is not
    positive, and for rows out of order or before the start.
    """
    if start.utcoffset() is None:
        raise ValueError("start must be an aware datetime")
    if threshold <= timedelta(0) or tick <= timedelta(0):
        raise ValueError("threshold and tick must be positive")

    start = start.astimezone(UTC)
    replay = _Replay(threshold)
    next_tick = start
    earliest = 0
    for row in rows:
        if row.seconds < earliest:
            raise ValueError(f"rows are out of order: second {row.seconds} after {earliest}")
        earliest = row.seconds
        now = start + timedelta(seconds=row.seconds)
        while next_tick <= now:
            replay.close_inactive(next_tick)
            next_tick += tick
        replay.visit(row, now)
    while replay.anything_active:
        replay.close_inactive(next_tick)
        next_tick += tick
    return sorted(replay.closed, key=lambda session: (session.created_at, session.anonymous_id))


@dataclass(slots=True)
class _ActiveView:
    page: int
    created_at: datetime
    last_activity_at: datetime

    def closed(self, now: datetime, reason: CloseReason) -> ExpectedView:
        return ExpectedView(
            property_object_id=property_object_id(self.page),
            created_at=self.created_at,
            last_activity_at=self.last_activity_at,
            ended_at=max(now, self.last_activity_at),
            duration=self.last_activity_at - self.created_at,
            close_reason=reason,
        )


@dataclass(slots=True)
class _ActiveSession:
    device: int
    created_at: datetime
    last_activity_at: datetime
    active_views: dict[int, _ActiveView] = field(default_factory=dict)
    closed_views: list[ExpectedView] = field(default_factory=list)

    def close_view(self, page: int, now: datetime, reason: CloseReason) -> None:
        self.closed_views.append(self.active_views.pop(page).closed(now, reason))

    def closed(self, now: datetime, reason: CloseReason) -> ExpectedSession:
        """Close the remaining views (INV-LV-007), then the session."""
        for page in list(self.active_views):
            self.close_view(page, now, reason)
        views = sorted(
            self.closed_views, key=lambda view: (view.created_at, view.property_object_id)
        )
        return ExpectedSession(
            anonymous_id=anonymous_id(self.device),
            created_at=self.created_at,
            last_activity_at=self.last_activity_at,
            ended_at=max(now, self.last_activity_at),
            duration=self.last_activity_at - self.created_at,
            close_reason=reason,
            views=tuple(views),
        )


class _Replay:
    """The state between two moments: Active sessions by device, and what is closed already."""

    def __init__(self, threshold: timedelta) -> None:
        self._threshold = threshold
        self._active: dict[int, _ActiveSession] = {}
        self.closed: list[ExpectedSession] = []

    @property
    def anything_active(self) -> bool:
        return bool(self._active)

    def close_inactive(self, now: datetime) -> None:
        """Run the closer once: phase A for views, then phase B for sessions (section 7)."""
        cutoff = now - self._threshold
        for session in self._active.values():
            for page, view in list(session.active_views.items()):
                if view.last_activity_at < cutoff:
                    session.close_view(page, now, INACTIVITY)
        for device, session in list(self._active.items()):
            if session.last_activity_at < cutoff:
                self._close_session(device, now, INACTIVITY)

    def visit(self, row: Visit, now: datetime) -> None:
        """Start or beat the device's session, then open or beat the view of the row's page."""
        session = self._start_or_beat(row.device, now)
        if row.page is not None:
            self._open_or_beat(session, row.page, now)

    def _start_or_beat(self, device: int, now: datetime) -> _ActiveSession:
        session = self._active.get(device)
        if session is not None and self._is_abandoned(session.last_activity_at, now):
            self._close_session(device, now, ABANDONED)
            session = None
        if session is None:
            session = self._active[device] = _ActiveSession(device, now, now)
        session.last_activity_at = now
        return session

    def _open_or_beat(self, session: _ActiveSession, page: int, now: datetime) -> None:
        view = session.active_views.get(page)
        if view is not None and self._is_abandoned(view.last_activity_at, now):
            session.close_view(page, now, ABANDONED)
            view = None
        if view is None:
            view = session.active_views[page] = _ActiveView(page, now, now)
        view.last_activity_at = now

    def _close_session(self, device: int, now: datetime, reason: CloseReason) -> None:
        self.closed.append(self._active.pop(device).closed(now, reason))

    def _is_abandoned(self, last_activity_at: datetime, now: datetime) -> bool:
        return now - last_activity_at > 2 * self._threshold


def format_time(moment: datetime) -> str:
    """Format an aware datetime as events do: ISO 8601, UTC, microseconds, ``Z`` (section 8)."""
    if moment.utcoffset() is None:
        raise ValueError("moment must be an aware datetime")
    in_utc = moment.astimezone(UTC).replace(tzinfo=None)
    return in_utc.isoformat(timespec="microseconds") + "Z"


def whole_seconds(duration: timedelta) -> int:
    """Return DurationSeconds: whole seconds, rounded down (section 8)."""
    return duration // timedelta(seconds=1)


def expected_session_ended_payload(session: ExpectedSession) -> dict[str, object]:
    """Return the session-ended payload of a guest's session, without SessionId (section 8)."""
    return {
        "AnonymousId": str(session.anonymous_id),
        "UserId": None,
        "CreatedAt": format_time(session.created_at),
        "LastActivityAt": format_time(session.last_activity_at),
        "DurationSeconds": whole_seconds(session.duration),
    }


def expected_view_ended_payload(session: ExpectedSession, view: ExpectedView) -> dict[str, object]:
    """Return the property-object-view-ended payload of a view of a guest's session.

    Left out are PropertyObjectViewId and SessionId, which cannot be predicted (section 8).
    """
    return {
        "PropertyObjectId": str(view.property_object_id),
        "AnonymousId": str(session.anonymous_id),
        "UserId": None,
        "ViewSource": VIEW_SOURCE,
        "ViewedAt": format_time(view.created_at),
        "LastActivityAt": format_time(view.last_activity_at),
        "DurationSeconds": whole_seconds(view.duration),
        "FilterSnapshot": None,
    }


def session_totals(sessions: Sequence[ExpectedSession]) -> Totals:
    """Return the number of sessions and the sum of their whole seconds."""
    return Totals(len(sessions), sum(whole_seconds(session.duration) for session in sessions))


def view_totals(sessions: Sequence[ExpectedSession]) -> Totals:
    """Return the number of views of all sessions and the sum of their whole seconds."""
    seconds = [whole_seconds(view.duration) for session in sessions for view in session.views]
    return Totals(len(seconds), sum(seconds))


def last_viewed_by_object(sessions: Sequence[ExpectedSession]) -> dict[UUID, datetime]:
    """Return, per PropertyObjectId, when its newest view was opened: LastViewedAt (section 6)."""
    newest: dict[UUID, datetime] = {}
    for session in sessions:
        for view in session.views:
            object_id = view.property_object_id
            newest[object_id] = max(newest.get(object_id, view.created_at), view.created_at)
    return newest


def view_totals_by_object(sessions: Sequence[ExpectedSession]) -> dict[UUID, Totals]:
    """Return, per PropertyObjectId, the number of views and the sum of their whole seconds.

    These are ViewsCount and TotalDurationSeconds of the view statistics (section 6).
    """
    totals: dict[UUID, Totals] = {}
    for session in sessions:
        for view in session.views:
            before = totals.get(view.property_object_id, Totals())
            totals[view.property_object_id] = Totals(
                before.count + 1, before.total_seconds + whole_seconds(view.duration)
            )
    return totals
