"""What a device does to its session (design, section 5). Each service owns its transaction."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from pinactivity.clock import moment
from pinactivity.ids import new_id
from pinactivity.metrics import SESSIONS_STARTED
from sessions.closing import close_sessions
from sessions.device import Device
from sessions.errors import SessionActiveRace
from sessions.lifecycle import CloseReason
from sessions.models import Session, TouchedSession

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class StartedSession:
    session: TouchedSession
    is_new: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session: TouchedSession
    restarted: bool


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
        user_id: Of a valid token: a new session is born linked, without an event (A5).
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

    started = start()  # one statement, one transaction: the ordinary case
    attempts = 1
    while started is None and attempts < _ATTEMPTS:
        attempts += 1
        with transaction.atomic():
            _close_abandoned(anonymous_id=anonymous_id, now=now)
            started = start()
    if started is None:
        raise SessionActiveRace
    if started.is_new:
        SESSIONS_STARTED.inc()
    return started


def beat_session(
    *,
    session_id: UUID,
    anonymous_id: UUID,
    user_id: UUID | None,
    device: Device,
    now: datetime | None = None,
) -> Heartbeat:
    """Extend the device's session by a conditional update, or restart (INV-SES-003).

    A session that is closed, abandoned, unknown or foreign is no error: the device gets the
    Active session that another tab has, or a new one. Arguments and errors as in
    `start_session`.
    """
    session = Session.objects.extend(
        session_id=session_id,
        anonymous_id=anonymous_id,
        abandoned_after=settings.ACTIVITY_CLOSER.abandoned_after,
        now=now,
    )
    if session is not None:
        return Heartbeat(session, restarted=False)
    started = start_session(anonymous_id=anonymous_id, user_id=user_id, device=device, now=now)
    return Heartbeat(started.session, restarted=True)


def _close_abandoned(*, anonymous_id: UUID, now: datetime | None) -> None:
    """Close the device's session if it is Active and silent for more than twice the threshold."""
    silent_since = moment(now) - settings.ACTIVITY_CLOSER.abandoned_after
    abandoned = (
        Session.objects.due(cutoff=silent_since)
        .filter(anonymous_id=anonymous_id)
        .select_for_update(no_key=True)
        .values_list("id", flat=True)
    )
    close_sessions(list(abandoned), reason=CloseReason.ABANDONED, now=now)
