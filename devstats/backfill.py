"""Facts made of PostgreSQL's rows, for events that were lost or are older than their topic.

A fact belongs to the session or the view, whatever its FactId: readers count one that was consumed
too once. Its FactId names its origin, so backfilling is idempotent.
"""

from collections.abc import Sequence
from datetime import timedelta

from devstats.contracts import SessionEnded, ViewEnded
from devstats.facts import SessionFact, ViewFact, make_session_fact, make_view_fact
from devstats.ownership import with_owner
from devstats.property_objects import find_versions
from devstats.tables import SESSION_FACTS, VIEW_FACTS
from devstats.writer import FactWriter
from sessions.models import Session
from views.models import PropertyObjectView


def backfill_sessions(writer: FactWriter, sessions: Sequence[Session]) -> None:
    """Add the facts of ended sessions, in one insert.

    Raises:
        RowRefused, StorageUnavailable: see `FactWriter.append`.
    """
    facts = [_session_fact(session) for session in sessions]
    writer.append(SESSION_FACTS, {fact.fact_id: fact for fact in facts})


def backfill_views(writer: FactWriter, views: Sequence[PropertyObjectView]) -> None:
    """Add the facts of ended views, read with their sessions, each with its object's owner.

    Raises:
        RowRefused, StorageUnavailable: see `FactWriter.append`.
    """
    versions = find_versions(writer.client, [view.property_object_id for view in views])
    facts = [
        with_owner(_view_fact(view), versions.get(view.property_object_id, ())) for view in views
    ]
    writer.append(VIEW_FACTS, {fact.fact_id: fact for fact in facts})


def _session_fact(session: Session) -> SessionFact:
    assert session.duration is not None  # it has ended
    event = SessionEnded(
        session_id=session.id,
        anonymous_id=session.anonymous_id,
        user_id=session.user_id,
        created_at=session.created_at,
        last_activity_at=session.last_activity_at,
        duration_seconds=session.duration // timedelta(seconds=1),
    )
    return make_session_fact(f"backfill:{session.id}", event)


def _view_fact(view: PropertyObjectView) -> ViewFact:
    assert view.duration is not None  # it has ended
    assert view.ended_at is not None
    # As the event: the session's user when the view ended, not the snapshot of the opening.
    linked_at = view.session.linked_at
    is_users = linked_at is not None and linked_at <= view.ended_at
    event = ViewEnded(
        property_object_view_id=view.id,
        property_object_id=view.property_object_id,
        session_id=view.session_id,
        anonymous_id=view.session.anonymous_id,
        user_id=view.session.user_id if is_users else None,
        view_source=view.view_source,
        viewed_at=view.created_at,
        last_activity_at=view.last_activity_at,
        duration_seconds=view.duration // timedelta(seconds=1),
        filter_snapshot=view.filter_snapshot,
    )
    return make_view_fact(f"backfill:{view.id}", event)
