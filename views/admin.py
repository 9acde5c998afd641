"""Property object views for support staff: read-only, but what is Active can be closed."""

from collections.abc import Sequence
from uuid import UUID

from django.contrib import admin

from pinactivity.admin.close_now import CloseNowAdmin, write_count
from pinactivity.admin.read_only import ReadOnlyAdmin
from sessions.services import ClosedNow
from views.models import PropertyObjectView
from views.services import close_views_now
from views.stats_models import PropertyObjectViewStats


@admin.register(PropertyObjectView)
class PropertyObjectViewAdmin(CloseNowAdmin):
    close_now_permission = "activity_sessions.close_now"
    next_heartbeat = "its next heartbeat of the view is not accepted, and it opens the view anew"
    id_fields = ("id", "session_id", "property_object_id")  # each has an index
    list_display = (
        "id",
        "property_object_id",
        "session_id",
        "view_source",
        "status",
        "created_at",
        "last_activity_at",
        "duration",
        "close_reason",
    )
    list_filter = ("status",)  # a rare value of another column would scan the table
    raw_id_fields = ("session",)

    def name_active(self, ids: Sequence[UUID]) -> str:
        """Count the Active views."""
        count = PropertyObjectView.objects.active().filter(id__in=ids).count()
        return f"{write_count(count, 'view')}, alone: their sessions go on"

    def close_active(self, ids: Sequence[UUID]) -> ClosedNow:
        """Close views without their sessions."""
        return close_views_now(view_ids=ids)


@admin.register(PropertyObjectViewStats)
class PropertyObjectViewStatsAdmin(ReadOnlyAdmin):
    id_fields = ("property_object_id",)
    ordering = ("property_object_id",)  # the only order that has an index
    list_display = (
        "property_object_id",
        "views_count",
        "total_duration_seconds",
        "last_viewed_at",
        "purged_views_count",
        "purged_duration_seconds",
    )
