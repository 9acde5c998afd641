"""Sessions and closer runs for support staff: read-only, but what is Active can be closed."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from outbox.selectors import events_of
from pinactivity.admin.close_now import CloseNowAdmin, write_count
from pinactivity.admin.read_only import ReadOnlyAdmin
from sessions.lifecycle import Status
from sessions.models import ActivityCloserRun, Session
from sessions.run_chart import chart_runs
from sessions.selectors import closer_history
from sessions.services import ClosedNow, close_sessions_now

_SHOWN = 200
"""How many views, and how many events, a session's page shows."""


@admin.register(Session)
class SessionAdmin(CloseNowAdmin):
    close_now_permission = "activity_sessions.close_now"
    next_heartbeat = "its next heartbeat starts a new session"
    id_fields = ("id", "anonymous_id", "user_id")
    list_display = (
        "id",
        "anonymous_id",
        "user_id",
        "status",
        "created_at",
        "last_activity_at",
        "duration",
        "close_reason",
        "browser",
        "device_type",
    )
    list_filter = ("status",)  # a rare value of another column would scan the table
    fields = (
        "id",
        "anonymous_id",
        ("user_id", "linked_at", "signed_in_at"),
        ("status", "close_reason", "version"),
        ("created_at", "last_activity_at"),
        ("ended_at", "duration"),
        ("browser", "os", "device_type"),
        "path",
        "events",
    )
    readonly_fields = ("path", "events")

    def get_fields(self, request: HttpRequest, obj: Session | None = None) -> Any:
        """Show address and User-Agent only to staff with the permission (section 13)."""
        if request.user.has_perm("activity_sessions.view_device_address"):
            return (*self.fields[:-2], ("ip_address", "user_agent"), *self.fields[-2:])
        return self.fields

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Refuse a filter by a hidden column: `?ip_address__startswith=` would reveal it."""
        hidden = lookup.split("__", maxsplit=1)[0] in {"ip_address", "user_agent"}
        return not hidden and super().lookup_allowed(lookup, value, request)

    def name_active(self, ids: Sequence[UUID]) -> str:
        """Count the Active sessions and their open views."""
        sessions = Session.objects.active().filter(id__in=ids).count()
        views = Session.objects.filter(id__in=ids, views__status=Status.ACTIVE).count()
        return f"{write_count(sessions, 'session')} with {write_count(views, 'open view')}"

    def close_active(self, ids: Sequence[UUID]) -> ClosedNow:
        """Close sessions with their open views."""
        return close_sessions_now(session_ids=ids)

    @admin.display(description="Views")
    def path(self, session: Session) -> SafeString:
        """The visitor's path: the session's views in the order of opening."""
        views = session.views.order_by("created_at")[:_SHOWN]
        return _table(
            ("Opened", "Last activity", "Property object", "Source", "Status", "Duration"),
            (
                (
                    _link("views_propertyobjectview", view.id, f"{view.created_at:%H:%M:%S}"),
                    f"{view.last_activity_at:%H:%M:%S}",
                    view.property_object_id,
                    view.view_source,
                    view.close_reason or view.status,
                    view.duration if view.duration is not None else "",
                )
                for view in views
            ),
        )

    @admin.display(description="Events")
    def events(self, session: Session) -> SafeString:
        """The events of the session and of the views shown, with their delivery state."""
        view_ids = session.views.order_by("created_at").values_list("id", flat=True)[:_SHOWN]
        return _table(
            ("Written", "Topic", "Key", "Delivery"),
            (
                (
                    _link(
                        "outbox_outboxmessage", event.id, f"{event.created_at:%Y-%m-%d %H:%M:%S}"
                    ),
                    event.topic,
                    event.key,
                    event.delivery,
                )
                for event in (
                    *events_of(view_ids, limit=_SHOWN),
                    *events_of([session.id], limit=_SHOWN),  # apart: never cut off by views
                )
            ),
        )


@admin.register(ActivityCloserRun)
class ActivityCloserRunAdmin(ReadOnlyAdmin):
    list_display = (
        "started_at",
        "outcome",
        "closed_sessions",
        "closed_views",
        "failures",
        "backlog_remaining",
        "active_sessions",
        "finished_at",
        "id",
    )
    list_filter = ("outcome",)
    change_list_template = "activity_sessions/closer_runs.html"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Show a chart of the last day above the list."""
        chart = chart_runs(closer_history())
        return super().changelist_view(request, {**(extra_context or {}), "chart": chart})


def _link(page: str, pk: object, text: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', reverse(f"admin:{page}_change", args=[pk]), text)


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> SafeString:
    head = format_html_join("", "<th>{}</th>", ((heading,) for heading in headings))
    body = format_html_join(
        "",
        "<tr>{}</tr>",
        ((format_html_join("", "<td>{}</td>", ((cell,) for cell in row)),) for row in rows),
    )
    return format_html("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, body)
