"""Sessions, views and their events in plain Python, from the rules alone.

The model imports nothing of the project. A test drives the real services and the model with the
same calls, and compares every row and every event after each of them.

The rules, with their sections of the design (INV-.. are the specification's):

* A device has at most one Active session (INV-SES-001). **start** extends it, or creates one. With
  a user the new session is linked from its beginning, without an event (5).
* **heartbeat** extends the session of that id if it is the device's and Active. Otherwise it does
  what start does: there is no error, and no other device's session changes (INV-SES-003).
* **link** finds the device's Active session. No user: Linked, with an event. The same user:
  AlreadyLinked; only `signed_in_at` moves, forward. Another user: Switched. It closes the session
  with its views and creates a linked one on the same device, with an event (INV-SES-002).
  No session: None. Only Linked from the front end also extends the session (5).
* **sign_in** is identity's event. It does what link does, at min(SignedInAt, now). It is Stale, and
  skipped, when the users differ and it is not newer than the session's `signed_in_at`, or without
  one, than one minute before the session's start. It is Poison when more than an hour ahead (5).
* **open_view** first does what heartbeat does, then extends that object's Active view, or creates
  one with a snapshot of the session's user (6).
* **extend_view** extends a view and its session. It refuses a closed, unknown or foreign view, and
  writes nothing then (INV-LV-003).
* **tick** closes every Active view, then every Active session, that was last active before
  `now - threshold`. A silence of exactly the threshold is not enough (7, INV-LV-004).
* A row that is silent for more than 2 x threshold is abandoned: no call extends it. start,
  heartbeat, open_view, link and sign_in close it, then continue as if it did not exist;
  extend_view closes the view alone, and refuses (5, "Abandoned rows").
* Closing a session closes its views (INV-LV-007). `ended_at` is max(now, last activity),
  `duration` is last activity - creation (INV-SES-005). Each closed row has one event, the views'
  before the session's (INV-SES-006, INV-LV-008). `version` grows by one on link and on close (3).
* `last_activity_at` only moves forward. A call dated before the session's start, after a wait or
  with a clock set back, counts as of the start (4).

The services create the ids. A method that may create a row gets the ids of the services' answers.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from uuid import UUID

Status = Literal["Active", "Inactive"]
CloseReason = Literal["Inactivity", "Switched", "Abandoned"]
Linking = Literal["Linked", "AlreadyLinked", "Switched", "Stale"]

CLOCK_TOLERANCE: Final = timedelta(minutes=1)
FUTURE_TOLERANCE: Final = timedelta(hours=1)


@dataclass(slots=True, kw_only=True)
class _Row:
    id: UUID
    user_id: UUID | None
    created_at: datetime
    last_activity_at: datetime
    status: Status = "Active"
    ended_at: datetime | None = None
    duration: timedelta | None = None
    close_reason: CloseReason | None = None
    version: int = 1

    @property
    def is_active(self) -> bool:
        return self.status == "Active"

    def extend(self, now: datetime) -> None:
        self.last_activity_at = max(self.last_activity_at, now)

    def close(self, now: datetime, reason: CloseReason) -> None:
        self.status = "Inactive"
        self.ended_at = max(now, self.last_activity_at)
        self.duration = self.last_activity_at - self.created_at
        self.close_reason = reason
        self.version += 1


@dataclass(slots=True, kw_only=True)
class Session(_Row):
    """A row of `sessions`; `device` is the values of its device columns."""

    anonymous_id: UUID
    device: tuple[str, ...]
    linked_at: datetime | None = None
    signed_in_at: datetime | None = None

    @property
    def newest_sign_in(self) -> datetime:
        """A sign-in of another user must be newer than this."""
        return self.signed_in_at or self.created_at - CLOCK_TOLERANCE


@dataclass(slots=True, kw_only=True)
class View(_Row):
    """A row of `property_object_views`."""

    session_id: UUID
    property_object_id: UUID
    view_source: str
    filter_snapshot: object


@dataclass(frozen=True, slots=True)
class Event:
    """A message in the outbox, with the header Version."""

    topic: str
    event_type: str
    aggregate_type: str
    key: str
    version: int
    payload: dict[str, object]


@dataclass(frozen=True, slots=True)
class Started:
    session_id: UUID
    is_new: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session_id: UUID
    restarted: bool


@dataclass(frozen=True, slots=True)
class Opened:
    view_id: UUID
    session_id: UUID
    is_new: bool
    restarted: bool


@dataclass(frozen=True, slots=True)
class Linked:
    session_id: UUID
    outcome: Linking


class Model:
    """The expected tables. Rows are never removed. Events are blocks in order.

    A block contains the events of one kind and one call, in any order.
    """

    def __init__(self, threshold: timedelta) -> None:
        self._threshold = threshold
        self.sessions: dict[UUID, Session] = {}
        self.views: dict[UUID, View] = {}
        self.events: list[list[Event]] = []

    def find_active(self, anonymous_id: UUID) -> Session | None:
        """Return the device's Active session."""
        for session in self.sessions.values():
            if session.is_active and session.anonymous_id == anonymous_id:
                return session
        return None

    def is_abandoned(self, row: _Row, now: datetime) -> bool:
        """Return whether an Active row is abandoned."""
        return now - row.last_activity_at > 2 * self._threshold

    def start(
        self,
        *,
        anonymous_id: UUID,
        user_id: UUID | None,
        device: tuple[str, ...],
        now: datetime,
        new_id: UUID,
    ) -> Started:
        session = self._find_alive(anonymous_id, now)
        if session is not None:
            session.extend(now)
            return Started(session.id, is_new=False)
        linked_at = None if user_id is None else now
        self._add_session(
            Session(
                id=new_id,
                anonymous_id=anonymous_id,
                device=device,
                user_id=user_id,
                linked_at=linked_at,
                signed_in_at=linked_at,
                created_at=now,
                last_activity_at=now,
            )
        )
        return Started(new_id, is_new=True)

    def heartbeat(
        self,
        *,
        session_id: UUID,
        anonymous_id: UUID,
        user_id: UUID | None,
        device: tuple[str, ...],
        now: datetime,
        new_id: UUID,
    ) -> Heartbeat:
        session = self._find_alive(anonymous_id, now)
        if session is not None and session.id == session_id:
            session.extend(now)
            return Heartbeat(session_id, restarted=False)
        started = self.start(
            anonymous_id=anonymous_id, user_id=user_id, device=device, now=now, new_id=new_id
        )
        return Heartbeat(started.session_id, restarted=True)

    def link(
        self, *, anonymous_id: UUID, user_id: UUID, now: datetime, new_id: UUID | None
    ) -> Linked | None:
        """Link as the front end does. None: the device has no session."""
        return self._link(anonymous_id, user_id, now, now, new_id, from_front_end=True)

    def sign_in(
        self,
        *,
        anonymous_id: UUID,
        user_id: UUID,
        signed_in_at: datetime,
        now: datetime,
        new_id: UUID | None,
    ) -> Linked | Literal["Poison"] | None:
        """Link as identity's event does. None: the device has no session."""
        if signed_in_at > now + FUTURE_TOLERANCE:
            return "Poison"
        newest_sign_in = min(signed_in_at, now)
        return self._link(anonymous_id, user_id, newest_sign_in, now, new_id, from_front_end=False)

    def open_view(
        self,
        *,
        session_id: UUID,
        anonymous_id: UUID,
        user_id: UUID | None,
        device: tuple[str, ...],
        property_object_id: UUID,
        view_source: str,
        filter_snapshot: object,
        now: datetime,
        new_session_id: UUID,
        new_view_id: UUID,
    ) -> Opened:
        heartbeat = self.heartbeat(
            session_id=session_id,
            anonymous_id=anonymous_id,
            user_id=user_id,
            device=device,
            now=now,
            new_id=new_session_id,
        )
        session = self.sessions[heartbeat.session_id]
        moment = max(now, session.created_at)
        for view in self._active_views(session):
            if view.property_object_id != property_object_id:
                continue
            if not self.is_abandoned(view, moment):
                view.extend(moment)
                return Opened(view.id, session.id, is_new=False, restarted=heartbeat.restarted)
            self._close_views([view], now, "Abandoned")
        assert new_view_id not in self.views
        self.views[new_view_id] = View(
            id=new_view_id,
            session_id=session.id,
            property_object_id=property_object_id,
            user_id=session.user_id,
            view_source=view_source,
            filter_snapshot=filter_snapshot,
            created_at=moment,
            last_activity_at=moment,
        )
        return Opened(new_view_id, session.id, is_new=True, restarted=heartbeat.restarted)

    def extend_view(self, *, view_id: UUID, anonymous_id: UUID, now: datetime) -> bool:
        """Extend a view and its session; False when refused."""
        view = self.views.get(view_id)
        if view is None or not view.is_active:
            return False
        session = self.sessions[view.session_id]
        if session.anonymous_id != anonymous_id:
            return False
        if self.is_abandoned(view, now):
            self._close_views([view], now, "Abandoned")
            return False
        session.extend(now)
        view.extend(now)
        return True

    def tick(self, now: datetime) -> tuple[int, int]:
        """Run the closer; return how many sessions and views it closed."""
        cutoff = now - self._threshold
        views = [
            view
            for view in self.views.values()
            if view.is_active and view.last_activity_at < cutoff
        ]
        self._close_views(views, now, "Inactivity")
        sessions = [
            session
            for session in self.sessions.values()
            if session.is_active and session.last_activity_at < cutoff
        ]
        # A session is active at least as long as its views, so its views are closed already.
        assert not any(self._active_views(session) for session in sessions)
        self._close_sessions(sessions, now, "Inactivity")
        return len(sessions), len(views)

    def _find_alive(self, anonymous_id: UUID, now: datetime) -> Session | None:
        """Return the device's Active session; close it instead when it is abandoned."""
        session = self.find_active(anonymous_id)
        if session is None or not self.is_abandoned(session, now):
            return session
        self._close_sessions([session], now, "Abandoned")
        return None

    def _link(
        self,
        anonymous_id: UUID,
        user_id: UUID,
        newest_sign_in: datetime,
        now: datetime,
        new_id: UUID | None,
        *,
        from_front_end: bool,
    ) -> Linked | None:
        session = self._find_alive(anonymous_id, now)
        if session is None:
            return None
        if session.user_id == user_id:
            session.signed_in_at = max(session.newest_sign_in, newest_sign_in)
            return Linked(session.id, "AlreadyLinked")
        if not from_front_end and newest_sign_in <= session.newest_sign_in:
            return Linked(session.id, "Stale")
        if session.user_id is None:
            session.user_id, session.linked_at, session.signed_in_at = user_id, now, newest_sign_in
            session.version += 1
            if from_front_end:
                session.extend(now)
            self.events.append([_linked_event(session)])
            return Linked(session.id, "Linked")
        assert new_id is not None
        self._close_sessions([session], now, "Switched")
        switched = Session(
            id=new_id,
            anonymous_id=anonymous_id,
            device=session.device,
            user_id=user_id,
            linked_at=now,
            signed_in_at=newest_sign_in,
            created_at=now,
            last_activity_at=now,
        )
        self._add_session(switched)
        self.events.append([_linked_event(switched)])
        return Linked(new_id, "Switched")

    def _add_session(self, session: Session) -> None:
        assert session.id not in self.sessions
        self.sessions[session.id] = session

    def _active_views(self, session: Session) -> list[View]:
        return [
            view for view in self.views.values() if view.is_active and view.session_id == session.id
        ]

    def _close_sessions(self, sessions: list[Session], now: datetime, reason: CloseReason) -> None:
        for session in sessions:
            self._close_views(self._active_views(session), now, reason)
        for session in sessions:
            session.close(now, reason)
        if sessions:
            self.events.append([_session_ended_event(session) for session in sessions])

    def _close_views(self, views: list[View], now: datetime, reason: CloseReason) -> None:
        for view in views:
            view.close(now, reason)
        if views:
            self.events.append(
                [_view_ended_event(view, self.sessions[view.session_id]) for view in views]
            )


def _linked_event(session: Session) -> Event:
    return Event(
        topic="pin.user-activity.session-linked.v1",
        event_type="SessionLinkedKafkaEvent",
        aggregate_type="Session",
        key=str(session.id),
        version=session.version,
        payload={
            "SessionId": str(session.id),
            "AnonymousId": str(session.anonymous_id),
            "UserId": _optional(session.user_id),
            "LinkedAt": session.linked_at and _format_time(session.linked_at),
        },
    )


def _session_ended_event(session: Session) -> Event:
    return Event(
        topic="pin.user-activity.session-ended.v1",
        event_type="SessionEndedKafkaEvent",
        aggregate_type="Session",
        key=str(session.id),
        version=session.version,
        payload={
            "SessionId": str(session.id),
            "AnonymousId": str(session.anonymous_id),
            "UserId": _optional(session.user_id),
            "CreatedAt": _format_time(session.created_at),
            "LastActivityAt": _format_time(session.last_activity_at),
            "DurationSeconds": _whole_seconds(session),
        },
    )


def _view_ended_event(view: View, session: Session) -> Event:
    """Return the event of a view's end, with the session's current user (6)."""
    return Event(
        topic="pin.user-activity.property-object-view-ended.v1",
        event_type="PropertyObjectViewEndedKafkaEvent",
        aggregate_type="PropertyObjectView",
        key=str(view.id),
        version=view.version,
        payload={
            "PropertyObjectViewId": str(view.id),
            "PropertyObjectId": str(view.property_object_id),
            "SessionId": str(session.id),
            "AnonymousId": str(session.anonymous_id),
            "UserId": _optional(session.user_id),
            "ViewSource": view.view_source,
            "ViewedAt": _format_time(view.created_at),
            "LastActivityAt": _format_time(view.last_activity_at),
            "DurationSeconds": _whole_seconds(view),
            "FilterSnapshot": view.filter_snapshot,
        },
    )


def _optional(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def _format_time(moment: datetime) -> str:
    """Format as events do: ISO 8601, UTC, microseconds, ``Z`` (8)."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _whole_seconds(row: _Row) -> int:
    """Return DurationSeconds, rounded down (8)."""
    return (row.last_activity_at - row.created_at) // timedelta(seconds=1)
