"""Facts that tests store: sessions and views of developers' objects."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from devstats.contracts import SessionEnded
from devstats.facts import (
    TENANT,
    SessionFact,
    ViewFact,
    make_session_fact,
)
from devstats.tables import SESSION_FACTS, VIEW_FACTS
from devstats.writer import FactWriter
from pinactivity.core.ids import new_id

OWNER, OTHER = UUID(int=0xD1), UUID(int=0xD2)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def session_fact(seconds: int = 300, start: datetime = NOON, **fields: Any) -> SessionFact:
    fact_id = fields.pop("fact_id", str(new_id()))
    event = SessionEnded(
        **{
            "session_id": new_id(),
            "anonymous_id": new_id(),
            "user_id": None,
            "created_at": start,
            "last_activity_at": start + timedelta(seconds=seconds),
            "duration_seconds": seconds,
            **fields,
        }
    )
    return make_session_fact(fact_id, event)


def view_fact(session: SessionFact, **fields: Any) -> ViewFact:
    """A view of 60 s of an object of OWNER, opened as the session began."""
    sound: dict[str, Any] = {
        "fact_id": str(new_id()),
        "property_object_view_id": new_id(),
        "property_object_id": new_id(),
        "session_id": session.session_id,
        "anonymous_id": session.anonymous_id,
        "user_id": session.user_id,
        "view_source": "Map",
        "event_time": session.started_at,
        "duration_seconds": 60,
        "filter_snapshot": "",
        "tenant_id": TENANT,
        "brand_id": None,
        "developer_id": OWNER,
        "viewer_kind": "Guest" if session.user_id is None else "Investor",
        **fields,
    }
    ended = sound["event_time"] + timedelta(seconds=sound["duration_seconds"])
    return ViewFact(**{"last_activity_at": ended, **sound})


def store(writer: FactWriter, *facts: SessionFact | ViewFact) -> None:
    for table, kind in ((SESSION_FACTS, SessionFact), (VIEW_FACTS, ViewFact)):
        if rows := {str(place): fact for place, fact in enumerate(facts) if isinstance(fact, kind)}:
            writer.append(table, rows)
