"""The page of dev-stats: what the API returns, for a building developer in a browser.

Users are the admin's (Django's own), and need not be staff. A token opens nothing here, and a
cookie nothing in the API.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import LoginView, LogoutView
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from devstats.charts import (
    chart_durations,
    chart_sessions,
    chart_viewer_kinds,
    fill_days,
    tabulate_objects,
    write_duration,
)
from devstats.clickhouse import StorageUnavailable
from devstats.models import DeveloperAccess
from devstats.requested_developers import requested_developers
from devstats.selectors import (
    LONGEST_PERIOD,
    MOST_OBJECTS,
    summarise_objects,
    summarise_sessions,
)
from pinactivity.http.periods import Period
from pinactivity.http.problems import PROBLEMS

_PAGE, _LOGIN = "dev-stats", "dev-stats-login"
"""Names of their URLs."""
_PRESETS = (7, 30, 90)
_DAY = "%Y-%m-%d"
_FIRST, _LAST = date(1970, 1, 1), date(2199, 12, 31)
"""Of what ClickHouse can hold; one more day is a date still."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)


def _sealed(view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Let a page load and send nothing but what is ours, and nobody keep a copy of it."""

    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = view(request, *args, **kwargs)
        response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
        return response

    return never_cache(answer)


@method_decorator(_sealed, name="dispatch")
class LoginPage(LoginView):
    template_name = "devstats/login.html"
    next_page = _PAGE


@method_decorator(_sealed, name="dispatch")
class LogoutPage(LogoutView):
    http_method_names = ["post"]
    next_page = _LOGIN


def _day_field(label: str) -> forms.DateField:
    return forms.DateField(
        label=label,
        input_formats=[_DAY],
        widget=forms.DateInput(attrs={"type": "date"}, format=_DAY),
        error_messages={"invalid": "Enter a date, such as 2026-03-01."},
    )


class PeriodForm(forms.Form):
    """Whole days in UTC, the last one included: a person's way to write a half-open period."""

    From = _day_field("From")
    Through = _day_field("To (included)")

    def clean(self) -> dict[str, Any]:
        for name in self.fields:
            day = self.cleaned_data.get(name)
            if day and not _FIRST <= day <= _LAST:
                self.add_error(name, f"Must be from {_FIRST} to {_LAST}.")
        first, last = (self.cleaned_data.get(name) for name in ("From", "Through"))
        if first and last and first > last:
            self.add_error("From", "Must not be after the last day.")
        elif first and last and last - first >= LONGEST_PERIOD:
            self.add_error("Through", f"Must end a period of {LONGEST_PERIOD.days} days at most.")
        return self.cleaned_data

    @property
    def days(self) -> Sequence[date]:
        """Every day of a valid period."""
        first, last = self.cleaned_data["From"], self.cleaned_data["Through"]
        return [first + timedelta(days=number) for number in range((last - first).days + 1)]


@_sealed
@require_safe
@login_required(login_url=_LOGIN)
def show_statistics(request: HttpRequest) -> HttpResponseBase:
    """Show one of the user's own developers over a period; by default the last 30 days.

    400 with a reason beside each invalid field; 403 without access, or to whom the query names;
    503 while ClickHouse is away.
    """
    own = list(
        DeveloperAccess.objects.filter(user=request.user.pk)
        .order_by("developer_id")
        .values_list("developer_id", flat=True)
    )
    developer_id = _choose(request, own)
    if developer_id is None:
        return render(request, "devstats/forbidden.html", {"has_access": bool(own)}, status=403)

    today = datetime.now(UTC).date()
    form = PeriodForm(
        request.GET if {"From", "Through"} & set(request.GET) else _last_days(30, today)
    )
    context = {
        "form": form,
        "developer_id": developer_id,
        "developers": own,
        "presets": [
            (days, urlencode({"DeveloperId": developer_id, **_last_days(days, today)}))
            for days in _PRESETS
        ],
    }
    if not form.is_valid():
        return render(request, "devstats/page.html", context, status=400)
    try:
        statistics = _present(developer_id, form.days)
    except StorageUnavailable as exc:
        problem = PROBLEMS[exc.code]
        response = render(
            request, "devstats/page.html", {**context, "unavailable": True}, status=problem.status
        )
        response.headers["Retry-After"] = str(problem.retry_after)
        return response
    return render(request, "devstats/page.html", {**context, **statistics})


def _choose(request: HttpRequest, own: Sequence[UUID]) -> UUID | None:
    """Return the developer that the query names, if they are the user's own, else the first."""
    try:
        named = requested_developers(request.GET)
    except ValueError:
        return None
    if len(named) > 1 or not named <= set(own):
        return None
    return next(iter([*named, *own]), None)


def _last_days(days: int, today: date) -> Mapping[str, str]:
    return {
        "From": (today - timedelta(days=days - 1)).isoformat(),
        "Through": today.isoformat(),
    }


def _present(developer_id: UUID, days: Sequence[date]) -> Mapping[str, Any]:
    """Read the statistics and chart them.

    Raises:
        StorageUnavailable: ClickHouse does not answer.
    """
    since, until = (
        datetime.combine(day, time(), tzinfo=UTC) for day in (days[0], days[-1] + timedelta(days=1))
    )
    period = Period(since, until)
    sessions = summarise_sessions(developer_id, period)
    objects = summarise_objects(developer_id, period)
    fresh = [each.fresh_as_of for each in (sessions, objects) if each.fresh_as_of]
    durations = (
        ("Average duration", sessions.total.average),
        ("Median duration", sessions.total.median),
        ("P95 of duration", sessions.total.percentile_95),
    )
    by_day = fill_days(days, sessions.by_day)
    return {
        "since": since,
        "until": until,
        "fresh_as_of": max(fresh, default=None),
        "cards": (
            ("Sessions", f"{sessions.total.sessions:,}"),
            ("Unique viewers", f"{objects.total.unique_viewers if objects.total else 0:,}"),
            *((title, write_duration(seconds)) for title, seconds in durations),
        ),
        "charts": (
            chart_sessions(by_day),
            chart_viewer_kinds(sessions.by_viewer_kind),
            chart_durations(by_day),
        )
        if sessions.total.sessions
        else (),
        "objects": tabulate_objects(objects.objects) if objects.objects else None,
        "most_objects": MOST_OBJECTS,
        "more_objects": len(objects.objects) == MOST_OBJECTS,
    }
