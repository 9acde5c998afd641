"""Open, extend and close views (design, section 6). Each service owns its transaction."""

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
    """Open a view, or extend the session's open view of that object.

    The ordinary case is one statement, which also extends the session. When it matches no row, a
    transaction does the rest, so that a restarted session always has its view:

    1. Extend the session, or restart it. The row's lock keeps it open until the commit
       (INV-LV-007).
    2. Insert or extend the view. Before that, close an abandoned view of that object.

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
        assert opened is not None  # this transaction has locked the session and the abandoned view
    return OpenedView(opened[0], session_id, is_new=opened[1], restarted=heartbeat.restarted)


def extend_view(*, view_id: UUID, anonymous_id: UUID, now: datetime | None = None) -> bool:
    """Extend a view and its session, so that a session never closes before a live view.

    Returns:
        False when the view is closed, abandoned, unknown or another device's. Then nothing is
        extended (INV-LV-003); an abandoned view of this device is closed.
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
    """Close views now, without their sessions; as `sessions.services.close_sessions_now`."""
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
