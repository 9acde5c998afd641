"""Assertions on closed rows, which hold whoever closed them and whatever failed."""

from django.db import connection

from outbox.models import OutboxMessage
from sessions.events import SessionEnded
from sessions.models import Session
from views.events import PropertyObjectViewEnded
from views.models import PropertyObjectView


def assert_one_event_for_each_closed_row_and_none_else() -> None:
    """Check INV-SES-006, INV-LV-007 and INV-LV-008 in the rows and in the outbox."""
    for topic, model in (
        (SessionEnded.TOPIC, Session),
        (PropertyObjectViewEnded.TOPIC, PropertyObjectView),
    ):
        closed = model.objects.filter(status="Inactive").values_list("id", flat=True)
        keys = OutboxMessage.objects.filter(topic=topic).values_list("key", flat=True)
        assert len(keys) == len(set(keys))
        assert {str(pk) for pk in closed} == set(keys)
    assert not sessions_closed_around_a_view()
    assert not views_reported_after_their_session()


def sessions_closed_around_a_view() -> int:
    """Count the sessions that are Inactive and have an Active view."""
    return Session.objects.filter(status="Inactive", views__status="Active").count()


def views_reported_after_their_session() -> int:
    """Count the views that ended after their session, in the tables or in the outbox."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(*) FROM property_object_views AS view
            JOIN sessions AS session ON session.id = view.session_id
            JOIN outbox_messages AS view_ended
              ON view_ended.key = view.id::text AND view_ended.topic = %s
            JOIN outbox_messages AS session_ended
              ON session_ended.key = session.id::text AND session_ended.topic = %s
            WHERE view_ended.id > session_ended.id OR view.ended_at > session.ended_at
            """,
            [PropertyObjectViewEnded.TOPIC, SessionEnded.TOPIC],
        )
        return int(cursor.fetchone()[0])
