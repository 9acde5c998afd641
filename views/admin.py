"""Property object views for support staff; read-only."""

from django.contrib import admin

from pinactivity.admin import ReadOnlyAdmin
from views.models import PropertyObjectView
from views.stats_models import PropertyObjectViewStats


@admin.register(PropertyObjectView)
class PropertyObjectViewAdmin(ReadOnlyAdmin):
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
