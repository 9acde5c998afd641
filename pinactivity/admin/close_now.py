"""The action *close now* of an admin: asks first, closes in one transaction, logs each row."""

from collections.abc import Sequence
from typing import Any, Protocol
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

from pinactivity.admin.read_only import ReadOnlyAdmin
from pinactivity.core.error_info import LOCK_TIMEOUT, describe_error, is_connection_lost, sqlstate

log = structlog.get_logger(__name__)

CLOSED_AT_ONCE = 100
"""How many rows the action takes: they are one transaction, which their heartbeats wait for."""


class Closed(Protocol):
    """What a closing has done."""

    @property
    def ids(self) -> Sequence[UUID]:
        """Those of the chosen rows that were Active."""

    @property
    def views(self) -> int:
        """Open views that closed with their sessions."""


class CloseNowAdmin(ReadOnlyAdmin):
    """Offers the action *close now* to users with the permission (design, section 14).

    Its rows have a queryset with `active()`.
    """

    actions = ("close_now",)
    close_now_permission: str
    """As `user.has_perm` takes it."""
    next_heartbeat: str
    """What happens to a device that is still in use, for the page that asks."""

    def name_active(self, ids: Sequence[UUID]) -> str:
        """Name what of the chosen rows would be closed, for the page that asks."""
        raise NotImplementedError

    def close_active(self, ids: Sequence[UUID]) -> Closed:
        """Close what of the chosen rows is Active."""
        raise NotImplementedError

    def has_close_now_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may close; Django's admin finds the method by its name."""
        return request.user.has_perm(self.close_now_permission)

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
            active: QuerySet[Any] = queryset.active()  # type: ignore[attr-defined]  # see the class
            return self._ask(request, ids, active.count())
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
            "pinactivity/close_now.html",
            {
                **self.admin_site.each_context(request),
                "title": "Close now?",
                "opts": self.opts,
                "what": self.name_active(ids),
                "already": len(ids) - active,
                "next": self.next_heartbeat,
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
        parts = [write_count(len(closed.ids), self.opts.verbose_name)]
        if closed.views:
            parts.append(write_count(closed.views, "open view"))
        text = f"Closed: {', '.join(parts)}."
        # Not `ids`: a filter of the list may leave out what has closed since the page asked.
        if already := len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))) - len(closed.ids):
            text += f" Closed already: {already}."
        level = messages.SUCCESS if closed.ids else messages.WARNING
        self.message_user(request, text, level)


def write_count(number: int, noun: object) -> str:
    """Write a number with its noun: `1 view`, `2 views`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _explain(exc: Error) -> str:
    """Explain to support staff what an error of PostgreSQL left behind."""
    if is_connection_lost(exc):
        return "PostgreSQL went away: whether anything was closed, the list will show."
    if sqlstate(exc) == LOCK_TIMEOUT:
        return "Nothing was closed: somebody else is at work on one of them. Try again."
    return f"Nothing was closed: PostgreSQL refused ({sqlstate(exc)})."
