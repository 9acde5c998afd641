"""What a device does to its views (design, section 6). Each service owns its transaction."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction

from pinactivity.postgres.clock import time_expression
from sessions.device import Device
from sessions.lifecycle import CloseReason
from sessions.services import ClosedNow, record_heartbeat
from views.closing import close_views
from views.lifecycle import ViewSource
from views.models import PropertyObjectView

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedView:
    view_id: UUID
    session_id: UUID
    is_new: bool
    restarted: bool


def open_view(
    *,
    session_id: UUID,
    anonymous_id: UUID,
    device: Device,
    property_object_id: UUID,
    view_source: ViewSource,
    filter_snapshot: dict[str, Any] | None,
    restart_for: Callable[[], UUID | None] = lambda: None,
    now: datetime | None = None,
) -> OpenedView:
    """Open a view, or extend the one of that object that is open in the session.

    The ordinary case is one statement, which extends the session too. What it finds nothing for
    takes a transaction, so that no restart stands without its view:

    1. Extend the session, which locks it: it cannot close until this commits (INV-LV-007). A
       session that is gone restarts.
    2. Insert or extend. An abandoned view of that object is closed, and a new one inserted.

    `restart_for` is as in `sessions.services.record_heartbeat`.

    Raises:
        SessionActiveRace: as in `sessions.services.start_session`.
    """

    def open_in(session_id: UUID) -> tuple[UUID, bool] | None:
        return PropertyObjectView.objects.open(
            session_id=session_id,
            anonymous_id=anonymous_id,
            property_object_id=property_object_id,
            view_source=view_source,
            filter_snapshot=filter_snapshot,
            abandoned_after=settings.ACTIVITY_CLOSER.abandoned_after,
            now=now,
        )

    opened = open_in(session_id)
    if opened is not None:
        return OpenedView(opened[0], session_id, is_new=opened[1], restarted=False)
    with transaction.atomic():
        heartbeat = record_heartbeat(
            session_id=session_id,
            anonymous_id=anonymous_id,
            device=device,
            restart_for=restart_for,
            now=now,
        )
        session_id = heartbeat.session.session_id
        opened = open_in(session_id)
        if opened is None:
            abandoned = (
                PropertyObjectView.objects.active()
                .filter(session_id=session_id, property_object_id=property_object_id)
                .select_for_update(no_key=True)
                .values_list("id", flat=True)
            )
            close_views(list(abandoned), reason=CloseReason.ABANDONED, now=now)
            opened = open_in(session_id)
        assert opened is not None  # the session, and the row that refused, are locked by us
    return OpenedView(opened[0], session_id, is_new=opened[1], restarted=heartbeat.restarted)


def extend_view(*, view_id: UUID, anonymous_id: UUID, now: datetime | None = None) -> bool:
    """Extend a view and its session: a session never closes under a live view.

    Returns:
        False when the view is closed, abandoned, unknown or another device's: nothing is
        written then (INV-LV-003), but that an abandoned view of this device is closed.
    """
    abandoned_after = settings.ACTIVITY_CLOSER.abandoned_after
    if PropertyObjectView.objects.extend(
        view_id=view_id, anonymous_id=anonymous_id, abandoned_after=abandoned_after, now=now
    ):
        return True
    with transaction.atomic():
        abandoned = (
            PropertyObjectView.objects.due(cutoff=time_expression(now) - abandoned_after)
            .filter(id=view_id, session__anonymous_id=anonymous_id)
            .select_for_update(no_key=True, of=("self",))
            .values_list("id", flat=True)
        )
        close_views(list(abandoned), reason=CloseReason.ABANDONED, now=now)
    return False


def close_views_now(*, view_ids: Collection[UUID], now: datetime | None = None) -> ClosedNow:
    """Close views at once, alone: as `sessions.services.close_sessions_now` does sessions."""
    with transaction.atomic():
        active = (
            PropertyObjectView.objects.active()
            .filter(id__in=view_ids)
            .order_by("id")
            .select_for_update(no_key=True)
        )
        ids = list(active.values_list("id", flat=True))
        closed = close_views(ids, reason=CloseReason.MANUAL, now=now)
    log.info("closed by hand", sessions=closed.sessions, views=closed.views)
    return ClosedNow(ids)
