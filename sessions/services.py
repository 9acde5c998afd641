"""Start, extend, link and close sessions (design, section 5). A service owns its transaction."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Greatest

from outbox.services import enqueue
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.postgres.clock import statement_time, time_expression
from pinactivity.telemetry.metrics import SESSIONS_STARTED
from sessions.device import Device
from sessions.errors import SessionActiveRace, SessionNotFound
from sessions.events import SessionLinked
from sessions.lifecycle import CloseReason, LinkOutcome, LinkState, Status, decide_link
from sessions.models import Session, TouchedSession
from sessions.transitions import close_sessions

log = structlog.get_logger(__name__)

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class StartedSession:
    session: TouchedSession
    is_new: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session: TouchedSession
    restarted: bool


@dataclass(frozen=True, slots=True)
class LinkedSession:
    session_id: UUID
    outcome: LinkOutcome


def start_session(
    *,
    anonymous_id: UUID | None,
    user_id: UUID | None,
    device: Device,
    now: datetime | None = None,
) -> StartedSession:
    """Start the device's session, or restore the Active one it has (INV-SES-001).

    Args:
        anonymous_id: None issues a new one; a given one is kept even if never seen (AC8).
        user_id: From a valid token; a new session is then born linked, without an event (A5).
        device: Described from this request.
        now: None is the database's clock.

    Raises:
        SessionActiveRace: three attempts met an abandoned session each.
    """
    anonymous_id = anonymous_id or new_id()

    def start() -> StartedSession | None:
        started = Session.objects.start(
            anonymous_id=anonymous_id,
            user_id=user_id,
            device=device,
            abandoned_after=settings.ACTIVITY_CLOSER.abandoned_after,
            now=now,
        )
        return started and StartedSession(*started)

    started = start()  # the ordinary case: one statement is one transaction
    attempts = 1
    while started is None and attempts < _ATTEMPTS:
        attempts += 1
        with transaction.atomic():
            _close_abandoned(anonymous_id=anonymous_id, now=now)
            started = start()
    if started is None:
        raise SessionActiveRace
    if started.is_new:
        transaction.on_commit(SESSIONS_STARTED.inc)
    return started


def record_heartbeat(
    *,
    session_id: UUID,
    anonymous_id: UUID,
    device: Device,
    restart_for: Callable[[], UUID | None] = lambda: None,
    now: datetime | None = None,
) -> Heartbeat:
    """Extend the device's session by a conditional update, or restart (INV-SES-003).

    A session that is closed, abandoned, unknown or foreign is not an error. The device then gets
    its Active session, which another tab may have started, or a new one.

    Args:
        session_id: As the device knows it.
        anonymous_id: The device.
        device: Described from this request.
        restart_for: Called before a restart only. Returns the user of a valid token, None for a
            guest, and may raise to refuse the restart.
        now: None is the database's clock.

    Raises:
        SessionActiveRace: as in `start_session`.
    """
    session = Session.objects.extend(
        session_id=session_id,
        anonymous_id=anonymous_id,
        abandoned_after=settings.ACTIVITY_CLOSER.abandoned_after,
        now=now,
    )
    if session is not None:
        return Heartbeat(session, restarted=False)
    started = start_session(
        anonymous_id=anonymous_id, user_id=restart_for(), device=device, now=now
    )
    return Heartbeat(started.session, restarted=True)


def link_session(
    *,
    anonymous_id: UUID,
    user_id: UUID,
    signed_in_at: datetime | None = None,
    now: datetime | None = None,
) -> LinkedSession:
    """Link the device's Active session to a user who signed in (INV-SES-002).

    Both the front end's call and identity's event call this, in any order. The second call
    returns AlreadyLinked (A4).

    Args:
        anonymous_id: The device.
        user_id: Who signed in.
        signed_in_at: The time in identity's event, which may arrive late. None is a call of the
            front end: the user signs in now, and the call extends the session.
        now: None is the database's clock.

    Returns:
        The outcome, and the user's session; for Stale the device's unchanged session.

    Raises:
        SessionNotFound: the device has no Active session, or this call closed an abandoned one.
    """
    with transaction.atomic():
        session = _lock_active(anonymous_id)
        linked = session and _link_locked(session, user_id, signed_in_at, statement_time(now), now)
    if not linked:
        raise SessionNotFound  # after the commit, which keeps the closing of an abandoned session
    return linked


@dataclass(frozen=True, slots=True)
class ClosedNow:
    """The rows that support staff closed."""

    ids: list[UUID]
    """The requested rows that were Active."""
    views: int = 0
    """Open views that closed with their sessions."""


def close_sessions_now(*, session_ids: Collection[UUID], now: datetime | None = None) -> ClosedNow:
    """Close sessions now, with their open views: EndedAt is now, Duration as usual.

    Waits for the locks of heartbeats and of the closer. Sessions that are closed by then stay as
    they are.

    Args:
        session_ids: Few enough for one transaction: their heartbeats wait for its locks.
        now: None is the database's clock.
    """
    with transaction.atomic():
        # Lock in the order of ids: otherwise two calls for the same sessions could deadlock.
        active = (
            Session.objects.active()
            .filter(id__in=session_ids)
            .order_by("id")
            .select_for_update(no_key=True)
        )
        ids = list(active.values_list("id", flat=True))
        closed = close_sessions(ids, reason=CloseReason.MANUAL, now=now)
    log.info("closed by hand", sessions=closed.sessions, views=closed.views)
    return ClosedNow(ids, closed.views)


def _lock_active(anonymous_id: UUID) -> Session | None:
    """Lock the device's Active session.

    A read that waits for a switch or a restart returns no row: its snapshot does not contain the
    new session that the other call committed. So it is repeated while the device has an Active
    session. Each repetition means that another call succeeded: competing calls make progress.
    """
    rows = Session.objects.active().filter(anonymous_id=anonymous_id)
    while (session := rows.select_for_update(no_key=True).first()) is None:
        if not rows.exists():
            return None
    return session


def _link_locked(
    session: Session,
    user_id: UUID,
    signed_in_at: datetime | None,
    moment: datetime,
    now: datetime | None,
) -> LinkedSession | None:
    if session.last_activity_at < moment - settings.ACTIVITY_CLOSER.abandoned_after:
        close_sessions([session.id], reason=CloseReason.ABANDONED, now=now)
        return None
    sign_in_time = moment if signed_in_at is None else min(signed_in_at, moment)
    outcome = decide_link(
        LinkState(session.user_id, session.created_at, session.signed_in_at),
        user_id=user_id,
        signed_in_at=sign_in_time,
        may_be_late=signed_in_at is not None,
    )
    row = Session.objects.filter(id=session.id)
    match outcome:
        case LinkOutcome.ALREADY_LINKED:
            row.update(signed_in_at=Greatest("signed_in_at", sign_in_time))
        case LinkOutcome.LINKED:
            changes: dict[str, Any] = {
                "user_id": user_id,
                "linked_at": moment,
                "signed_in_at": sign_in_time,
                "version": session.version + 1,
            }
            if signed_in_at is None:
                changes["last_activity_at"] = max(session.last_activity_at, moment)
            row.update(**changes)
            _enqueue_linked(session, user_id, moment, session.version + 1)
        case LinkOutcome.SWITCHED:
            close_sessions([session.id], reason=CloseReason.SWITCHED, now=now)
            session = _start_switched(session, user_id, sign_in_time, statement_time(now))
        case LinkOutcome.STALE:
            pass
    return LinkedSession(session.id, outcome)


def _start_switched(
    closed: Session, user_id: UUID, signed_in_at: datetime, moment: datetime
) -> Session:
    """Create the session of the new user of the device, with the same Device fields (A3)."""
    session = Session.objects.create(
        anonymous_id=closed.anonymous_id,
        user_id=user_id,
        linked_at=moment,
        signed_in_at=signed_in_at,
        status=Status.ACTIVE,
        created_at=moment,
        last_activity_at=moment,
        version=1,
        **{column: getattr(closed, column) for column in Session.DEVICE_COLUMNS},
    )
    transaction.on_commit(SESSIONS_STARTED.inc)
    _enqueue_linked(session, user_id, moment, session.version)
    return session


def _enqueue_linked(session: Session, user_id: UUID, linked_at: datetime, version: int) -> None:
    enqueue(
        [
            SessionLinked(
                session_id=session.id,
                anonymous_id=session.anonymous_id,
                user_id=user_id,
                linked_at=iso_utc(linked_at),
                version=version,
            )
        ]
    )


def _close_abandoned(*, anonymous_id: UUID, now: datetime | None) -> None:
    """Close the device's session if it is Active and silent for more than twice the threshold."""
    silent_since = time_expression(now) - settings.ACTIVITY_CLOSER.abandoned_after
    abandoned = (
        Session.objects.due(cutoff=silent_since)
        .filter(anonymous_id=anonymous_id)
        .select_for_update(no_key=True)
        .values_list("id", flat=True)
    )
    close_sessions(list(abandoned), reason=CloseReason.ABANDONED, now=now)
