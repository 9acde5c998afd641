"""Sessions and closer runs for support staff: read-only, but what is Active can be closed."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import structlog
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import Error, transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from outbox.selectors import events_of
from pinactivity.admin.read_only import ReadOnlyAdmin
from pinactivity.core.error_info import LOCK_TIMEOUT, describe_error, is_connection_lost, sqlstate
from sessions.lifecycle import Status
from sessions.models import ActivityCloserRun, Session
from sessions.run_chart import chart_runs
from sessions.selectors import closer_history
from sessions.services import ClosedNow, close_sessions_now
from views.models import PropertyObjectView

log = structlog.get_logger(__name__)

_SHOWN = 200
"""How many views, and how many events, a session's page shows."""
CLOSED_AT_ONCE = 100
"""How many rows the action takes: one transaction, which beats of theirs wait for."""


class CloseNowAdmin(ReadOnlyAdmin):
    """Offers the action *close now* to whom the permission was given (design, section 14)."""

    actions = ("close_now",)
    next_beat: str
    """What happens to a device that is still in use, for the page that asks."""

    def name_active(self, ids: Sequence[UUID]) -> str:
        """Say what of the chosen rows would be closed, for the page that asks."""
        raise NotImplementedError

    def close_active(self, ids: Sequence[UUID]) -> ClosedNow:
        """Close what of the chosen rows is Active."""
        raise NotImplementedError

    def has_close_now_permission(self, request: HttpRequest) -> bool:
        """Tell whether the action is for this user; called by the admin for its name."""
        return request.user.has_perm("activity_sessions.close_now")

    @admin.action(description="Close now", permissions=["close_now"])
    def close_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponseBase | None:
        """Ask, then close the chosen rows that are Active; each gets a log entry."""
        try:
            ids = list(queryset.order_by("pk").values_list("pk", flat=True)[: CLOSED_AT_ONCE + 1])
            if len(ids) > CLOSED_AT_ONCE:
                text = f"Nothing was closed: choose {CLOSED_AT_ONCE} at most."
                self.message_user(request, text, messages.ERROR)
                return None
            if "confirmed" in request.POST:
                self._close(request, ids)
                return None
            return self._ask(request, ids, queryset.filter(status=Status.ACTIVE).count())
        except Error as exc:
            log.warning("close now failed", **describe_error(exc))
            self.message_user(request, _explain(exc), messages.ERROR)
            return None

    def _ask(
        self, request: HttpRequest, ids: Sequence[UUID], active: int
    ) -> HttpResponseBase | None:
        if not active:
            self.message_user(request, "All of them are closed already.", messages.WARNING)
            return None
        return TemplateResponse(
            request,
            "activity_sessions/close_now.html",
            {
                **self.admin_site.each_context(request),
                "title": "Close now?",
                "opts": self.opts,
                "what": self.name_active(ids),
                "already": len(ids) - active,
                "next": self.next_beat,
                "ids": ids,
                "action_checkbox_name": ACTION_CHECKBOX_NAME,
            },
        )

    def _close(self, request: HttpRequest, ids: Sequence[UUID]) -> None:
        assert request.user.pk is not None  # nobody else has the permission
        with transaction.atomic():
            closed = self.close_active(ids)
            LogEntry.objects.log_actions(
                request.user.pk,
                [self.model(pk=pk) for pk in closed.ids],
                CHANGE,
                "Closed now.",
            )
        parts = [_count(len(closed.ids), self.opts.verbose_name)]
        if closed.views:
            parts.append(_count(closed.views, "open view"))
        text = f"Closed: {', '.join(parts)}."
        # Not `ids`: a filter of the list may leave out what has closed since the page asked.
        if already := len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))) - len(closed.ids):
            text += f" Closed already: {already}."
        level = messages.SUCCESS if closed.ids else messages.WARNING
        self.message_user(request, text, level)


def _count(number: int, noun: object) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _explain(fault: Error) -> str:
    """Tell support staff what a fault of PostgreSQL left behind."""
    if is_connection_lost(fault):
        return "PostgreSQL went away: whether anything was closed, the list will show."
    if sqlstate(fault) == LOCK_TIMEOUT:
        return "Nothing was closed: somebody else is at work on one of them. Try again."
    return f"Nothing was closed: PostgreSQL refused ({sqlstate(fault)})."


@admin.register(Session)
class SessionAdmin(CloseNowAdmin):
    next_beat = "its next beat starts a new session"
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
        """Show address and User-Agent only to whom the permission was given (section 13)."""
        if request.user.has_perm("activity_sessions.view_device_address"):
            return (*self.fields[:-2], ("ip_address", "user_agent"), *self.fields[-2:])
        return self.fields

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Refuse to filter by what may not be seen: `?ip_address__startswith=` would tell it."""
        hidden = lookup.split("__", maxsplit=1)[0] in {"ip_address", "user_agent"}
        return not hidden and super().lookup_allowed(lookup, value, request)

    def name_active(self, ids: Sequence[UUID]) -> str:
        """Count the Active sessions and their open views."""
        sessions = Session.objects.active().filter(id__in=ids).count()
        views = PropertyObjectView.objects.active().filter(session_id__in=ids).count()
        return f"{_count(sessions, 'session')} with {_count(views, 'open view')}"

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
