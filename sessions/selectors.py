"""Reads on sessions and closer runs: bounded, by an index, no counts of whole tables."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.db.models import Count, DateTimeField, F, Func, Max, Q, QuerySet, Sum, Value

from pinactivity.http.cursors import Page, take
from pinactivity.postgres.clock import statement_time
from sessions.lifecycle import Status
from sessions.models import ActivityCloserRun, Session

COUNTED_TO = 1_000_000

HISTORY_STEP = timedelta(minutes=10)
HISTORY_STEPS = 144
"""Of a day."""


def count_active_sessions() -> int:
    """Count the Active sessions, to 1,000,000, by their own index."""
    return Session.objects.active()[:COUNTED_TO].count()


@dataclass(frozen=True, slots=True)
class RunsOfStep:
    """The totals of the runs that began within one step of the history."""

    begins_at: datetime
    runs: int = 0
    closed_sessions: int = 0
    closed_views: int = 0
    failures: int = 0
    active_sessions: int | None = None
    """The highest count of a run; None when no run counted."""


def closer_history(*, now: datetime | None = None) -> list[RunsOfStep]:
    """Return the last day of the ActivityCloserJob in 144 steps of 10 minutes, the oldest first.

    Steps begin at whole ten minutes; the last one is not over. A step without runs is all zeros.

    Args:
        now: None is the database's clock.
    """
    epoch = datetime.fromtimestamp(0, UTC)
    last = (statement_time(now) - epoch) // HISTORY_STEP
    begins = [epoch + HISTORY_STEP * n for n in range(last - HISTORY_STEPS + 1, last + 1)]
    step = Func(
        Value(HISTORY_STEP),
        F("started_at"),
        Value(epoch),
        function="date_bin",
        output_field=DateTimeField(),
    )
    found = (
        ActivityCloserRun.objects.filter(started_at__gte=begins[0])
        .values(begins_at=step)
        .annotate(
            runs=Count("id"),
            closed_sessions=Sum("closed_sessions"),
            closed_views=Sum("closed_views"),
            failures=Sum("failures"),
            active_sessions=Max("active_sessions"),
        )
    )
    by_step = {row["begins_at"]: RunsOfStep(**row) for row in found}
    return [by_step.get(moment, RunsOfStep(moment)) for moment in begins]


def sessions_of_user(user_id: UUID, page: Page) -> tuple[list[Session], str | None]:
    """Return a page of a user's sessions, the newest first, and the next page's cursor."""
    return take(Session.objects.filter(user_id=user_id), page)


def ended_sessions(*, since: datetime, until: datetime) -> "QuerySet[Session]":
    """Return the sessions that ended at `since` or later and before `until`, in no order."""
    return Session.objects.filter(
        status=Status.INACTIVE.value, ended_at__gte=since, ended_at__lt=until
    )


def ended_session_chunks(
    *, since: datetime, until: datetime, size: int = 1000
) -> Iterator[list[Session]]:
    """Yield the sessions of `ended_sessions` in the order of their ends, `size` at a time.

    Each chunk is a statement of its own: a cursor that is open for hours would keep VACUUM from
    removing dead rows.
    """
    rows = ended_sessions(since=since, until=until).order_by("ended_at", "id")
    after = Q()
    while chunk := list(rows.filter(after)[:size]):
        last = chunk[-1]
        after = Q(ended_at__gte=last.ended_at) & (Q(ended_at__gt=last.ended_at) | Q(id__gt=last.id))
        yield chunk


def existing_sessions(ids: Iterable[UUID]) -> set[UUID]:
    """Return the given ids that belong to a session, Active or not."""
    return set(Session.objects.filter(id__in=list(ids)).values_list("id", flat=True))
