"""What must be seen of sessions and views even while no worker runs (design, section 7)."""

from dataclasses import dataclass
from datetime import datetime

from sessions.lifecycle import RunOutcome
from sessions.models import ActivityCloserRun, Session
from sessions.selectors import count_active_sessions
from views.models import PropertyObjectView


@dataclass(frozen=True, slots=True)
class ActivitySnapshot:
    active_sessions: int
    """Counted to 1,000,000."""
    oldest_activity_at: datetime | None
    """LastActivityAt of the Active session or view that is silent for longest."""
    last_success_at: datetime | None
    """When the last run of the ActivityCloserJob that succeeded ended."""


def activity_snapshot() -> ActivitySnapshot:
    """Read the snapshot from PostgreSQL, each part by an index."""
    oldest = [
        rows.order_by("last_activity_at").values_list("last_activity_at", flat=True).first()
        for rows in (Session.objects.active(), PropertyObjectView.objects.active())
    ]
    success = ActivityCloserRun.objects.filter(outcome=RunOutcome.SUCCEEDED)
    return ActivitySnapshot(
        active_sessions=count_active_sessions(),
        oldest_activity_at=min((moment for moment in oldest if moment), default=None),
        last_success_at=success.order_by("-started_at")
        .values_list("finished_at", flat=True)
        .first(),
    )
