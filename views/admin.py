"""Property object views for support staff; read-only."""

from django.contrib import admin

from pinactivity.admin import ReadOnlyAdmin
from views.models import PropertyObjectView


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
