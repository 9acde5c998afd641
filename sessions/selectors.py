"""Reads on sessions: bounded, by an index, no counts of whole tables."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pinactivity.pages import Page, take
from sessions.lifecycle import RunOutcome
from sessions.models import ActivityCloserRun, Session
from views.models import PropertyObjectView

COUNTED_TO = 1_000_000


@dataclass(frozen=True, slots=True)
class ActivitySnapshot:
    active_sessions: int
    """Counted to 1,000,000."""
    oldest_activity_at: datetime | None
    """LastActivityAt of the Active session or view that is silent for longest."""
    last_success_at: datetime | None
    """When the last run of the ActivityCloserJob that succeeded ended."""


def activity_snapshot() -> ActivitySnapshot:
    """Tell what must be seen even when the worker is dead (design, section 7)."""
    active = Session.objects.active()
    oldest = [
        rows.order_by("last_activity_at").values_list("last_activity_at", flat=True).first()
        for rows in (active, PropertyObjectView.objects.active())
    ]
    success = ActivityCloserRun.objects.filter(outcome=RunOutcome.SUCCEEDED)
    return ActivitySnapshot(
        active_sessions=active[:COUNTED_TO].count(),
        oldest_activity_at=min((moment for moment in oldest if moment), default=None),
        last_success_at=success.order_by("-started_at")
        .values_list("finished_at", flat=True)
        .first(),
    )


def sessions_of_user(user_id: UUID, page: Page) -> tuple[list[Session], str | None]:
    """Return a page of a user's sessions, the newest first, and the next page's cursor."""
    return take(Session.objects.filter(user_id=user_id), page)
