"""Runs of the closer, and the events that they write."""

import json
from datetime import datetime
from typing import Any

from outbox.models import OutboxMessage
from sessions.closer import ActivityCloser, ActivityCloserResult
from sessions.options import ActivityCloserOptions

SESSION_ENDED = "pin.user-activity.session-ended.v1"
VIEW_ENDED = "pin.user-activity.property-object-view-ended.v1"


def close_inactive(*, now: datetime | None = None, **options: Any) -> ActivityCloserResult:
    return ActivityCloser(ActivityCloserOptions(**options)).run(now=now)


def read_events(topic: str) -> list[dict[str, Any]]:
    """Return the payloads of a topic in the order of the outbox."""
    rows = OutboxMessage.objects.filter(topic=topic).order_by("id")
    return [json.loads(payload) for payload in rows.values_list("payload", flat=True)]
