"""The table of property object views and the statements on one view (design, sections 3 and 6)."""

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import models
from django.db.models import F, Q

from pinactivity.core.ids import new_id
from pinactivity.postgres.prepared import PreparedStatement
from sessions.lifecycle import CloseReason, Status
from sessions.models import Session, choices, status_fields_agree
from sessions.querysets import ActivityQuerySet
from views.lifecycle import ViewSource
from views.stats_models import PropertyObjectViewStats, PropertyObjectViewStatsSeen

__all__ = [
    "PropertyObjectView",
    "PropertyObjectViewStats",  # Django finds an app's models here
    "PropertyObjectViewStatsSeen",
]


class PropertyObjectViewQuerySet(ActivityQuerySet["PropertyObjectView"]):
    def open(
        self,
        *,
        session_id: UUID,
        anonymous_id: UUID,
        property_object_id: UUID,
        view_source: ViewSource,
        filter_snapshot: dict[str, Any] | None,
        abandoned_after: timedelta,
        now: datetime | None,
    ) -> tuple[UUID, bool] | None:
        """Extend the device's session, and in it insert a view or extend the object's Active one.

        Returns:
            The view's id and whether it is new; None when the session is closed, abandoned,
            unknown or foreign, or the Active view abandoned.
        """
        proposed = new_id()
        row = OPEN.fetch_one(
            {
                "id": proposed,
                "session_id": session_id,
                "anonymous_id": anonymous_id,
                "property_object_id": property_object_id,
                "view_source": view_source.value,
                "filter_snapshot": (
                    None if filter_snapshot is None else json.dumps(filter_snapshot)
                ),
                "abandoned_after": abandoned_after,
                "now": now,
            }
        )
        return (row[0], row[0] == proposed) if row else None

    def extend(
        self,
        *,
        view_id: UUID,
        anonymous_id: UUID,
        abandoned_after: timedelta,
        now: datetime | None,
    ) -> bool:
        """Move LastActivityAt of the device's view, and of its session, forward.

        Returns:
            False when the view is closed, abandoned, unknown or another device's. Then
            nothing is written.
        """
        parameters = {
            "id": view_id,
            "anonymous_id": anonymous_id,
            "abandoned_after": abandoned_after,
            "now": now,
        }
        return EXTEND.fetch_one(parameters) is not None


class PropertyObjectView(models.Model):
    """A stay on one property object's page, inside a session."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    # Migration 0001 creates the constraint and the index by name. Django's foreign key would be
    # checked only at COMMIT, and its index would repeat the one below.
    session = models.ForeignKey(
        Session,
        on_delete=models.RESTRICT,
        related_name="views",
        db_constraint=False,
        db_index=False,
    )
    property_object_id = models.UUIDField()
    user_id = models.UUIDField(
        null=True, blank=True, help_text="The session's user when the view was opened."
    )
    view_source = models.TextField(choices=choices(ViewSource))
    filter_snapshot = models.JSONField(null=True, blank=True)
    status = models.TextField(choices=choices(Status), db_default=Status.ACTIVE.value)
    created_at = models.DateTimeField()
    last_activity_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    duration = models.DurationField(null=True, blank=True)
    close_reason = models.TextField(choices=choices(CloseReason), null=True, blank=True)
    version = models.IntegerField(db_default=1)

    objects = PropertyObjectViewQuerySet.as_manager()

    class Meta:
        db_table = "property_object_views"
        indexes = (
            models.Index(
                fields=["last_activity_at"],
                name="ix_property_object_views_active_last_activity",
                condition=Q(status=Status.ACTIVE.value),
            ),
            models.Index(
                fields=["session", "created_at"],
                # views/selectors.py reads a user's views of one object.
                include=["property_object_id", "id"],
                name="ix_property_object_views_session",
            ),
            models.Index(
                fields=["property_object_id", "created_at"], name="ix_property_object_views_object"
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["session", "property_object_id"],
                name="ux_property_object_views_active",
                condition=Q(status=Status.ACTIVE.value),
            ),
            models.CheckConstraint(
                name="chk_property_object_views_duration_nonneg",
                condition=Q(duration__gte=timedelta(0)),
            ),
            models.CheckConstraint(
                name="chk_property_object_views_activity_order",
                condition=Q(last_activity_at__gte=F("created_at")),
            ),
            models.CheckConstraint(
                name="chk_property_object_views_status_fields", condition=status_fields_agree()
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


# Raw SQL for the reasons in sessions/models.py. Each statement is one transaction, which locks the
# session, then the view. So no view can open in a session that closes (INV-LV-007): when a closing
# commits first, the predicates match no row.
_NOW = "coalesce(%(now)s, statement_timestamp())"

OPEN = PreparedStatement(
    "open_view",
    f"""
    WITH session AS (
        UPDATE sessions SET last_activity_at = greatest(last_activity_at, {_NOW})
        WHERE id = %(session_id)s AND anonymous_id = %(anonymous_id)s AND status = 'Active'
          AND last_activity_at >= {_NOW} - %(abandoned_after)s::interval
        RETURNING id, user_id, greatest({_NOW}, created_at) AS moment
    )
    INSERT INTO property_object_views AS view (
        id, session_id, property_object_id, user_id, view_source, filter_snapshot,
        created_at, last_activity_at
    )
    SELECT %(id)s::uuid, session.id, %(property_object_id)s::uuid, user_id, %(view_source)s,
           %(filter_snapshot)s::jsonb, moment, moment
    FROM session
    ON CONFLICT (session_id, property_object_id) WHERE status = 'Active'
    DO UPDATE SET last_activity_at = greatest(view.last_activity_at, excluded.last_activity_at)
    WHERE view.last_activity_at >= excluded.last_activity_at - %(abandoned_after)s::interval
    RETURNING id
    """,
)

# The session is updated last: if the view closes while this statement waits for it, the session
# must stay as it was (INV-LV-003).
EXTEND = PreparedStatement(
    "extend_view",
    f"""
    WITH locked AS (
        SELECT sessions.id, view.id AS view_id
        FROM property_object_views AS view JOIN sessions ON sessions.id = view.session_id
        WHERE view.id = %(id)s AND view.status = 'Active'
          AND view.last_activity_at >= {_NOW} - %(abandoned_after)s::interval
          AND sessions.status = 'Active' AND sessions.anonymous_id = %(anonymous_id)s
        FOR NO KEY UPDATE OF sessions
    ), extended AS (
        UPDATE property_object_views AS view
        SET last_activity_at = greatest(view.last_activity_at, {_NOW})
        FROM locked WHERE view.id = locked.view_id AND view.status = 'Active'
        RETURNING locked.id
    )
    UPDATE sessions SET last_activity_at = greatest(last_activity_at, {_NOW})
    FROM extended WHERE sessions.id = extended.id
    RETURNING sessions.id
    """,
)
