"""The ActivityCloserJob: closes silent sessions and views (its specification; design, section 7).

A run computes the cutoff once, then works in two phases, views before sessions:

A. silent views of live sessions, one batch a transaction;
B. silent sessions with their open views, `unit_size` sessions a transaction.

A transaction claims the oldest due rows by `select_for_update(skip_locked=True)`, closes them,
writes their events and commits. A run keeps no state for the next one: a row's status shows
whether it is done. So each row closes once, whatever runs twice, runs late or is killed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import structlog
from django.db import Error, connection, transaction

from pinactivity.core.error_info import (
    LOCK_TIMEOUT,
    STATEMENT_TIMEOUT,
    describe_error,
    is_storage_error,
    sqlstate,
)
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time, time_expression
from pinactivity.postgres.locks import CLOSER, REPLAY, advisory_lock
from pinactivity.telemetry import metrics
from pinactivity.telemetry.tracing import correlate, open_span
from sessions.ended_rows import Closed
from sessions.lifecycle import CloseReason, RunOutcome
from sessions.models import ActivityCloserRun, Session
from sessions.options import ActivityCloserOptions
from sessions.querysets import ActivityQuerySet
from sessions.selectors import count_active_sessions
from sessions.transitions import close_sessions
from views.closing import close_views
from views.models import PropertyObjectView

log = structlog.get_logger(__name__)

_CONNECTION_SETTINGS = {
    # A hung transaction that has locked one view must not block a whole unit, nor the heartbeats
    # that wait for its sessions.
    "lock_timeout": "1s",
    # Force index scans. Otherwise PostgreSQL may choose plans that read all sessions, or all
    # Active ones, for each unit. Such a run slows down as the tables grow.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
"""Settings of the connection during a run and during its final count."""
_BACKLOG_COUNTED_TO = 100_000
_RUNS_KEPT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class ActivityCloserResult:
    """The totals of a run. `failures`: rows set aside, plus the error that ended the run."""

    run_id: UUID
    outcome: RunOutcome
    closed_sessions: int
    closed_views: int
    failures: int
    backlog_remaining: int | None
    """Active rows past the cutoff, counted to 100,000; None when they could not be counted."""
    duration: timedelta


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    row_type: str
    """As in the events' AggregateType."""
    unit: int
    rows: ActivityQuerySet[Any]
    close: Callable[..., Closed]


@dataclass(slots=True)
class _RunState:
    run_id: UUID
    cutoff: datetime
    now: datetime | None
    deadline: float
    """On time.monotonic()."""
    closed_sessions: int = 0
    closed_views: int = 0
    failures: int = 0
    set_aside: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _BatchLog:
    """Sums units up to BatchSize rows, then logs one line `batch processed`."""

    phase: str
    size: int
    rows: int = 0
    closed: int = 0

    def add(self, rows: int, closed: int) -> None:
        self.rows += rows
        self.closed += closed
        if self.rows >= self.size:
            self.log()

    def log(self) -> None:
        if self.rows:
            log.info("batch processed", phase=self.phase, rows=self.rows, closed=self.closed)
        self.rows = self.closed = 0


class _RunEnded(Exception):
    """The run ends between two transactions."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class ActivityCloser:
    """Runs the job.

    Args:
        options: Validated at start.
        stop: Asked between transactions; True ends the run normally.
    """

    def __init__(
        self, options: ActivityCloserOptions, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._options = options
        self._stop = stop
        self._phases = (
            _Phase(
                "A",
                "PropertyObjectView",
                options.batch_size,
                PropertyObjectView.objects.all(),
                close_views,
            ),
            _Phase("B", "Session", options.unit_size, Session.objects.all(), close_sessions),
        )

    def run(self, *, now: datetime | None = None) -> ActivityCloserResult:
        """Close every row that is silent for longer than the threshold.

        An exception never leaves this method: it is logged, counted and reported by the outcome.

        Args:
            now: None is the database's clock. A value is for the replay and for tests: such a
                run takes no lock and leaves no row in `activity_closer_runs`.
        """
        run_id = new_id()
        started = time.monotonic()
        run: _RunState | None = None
        backlog: int | None = None
        failures = 0
        with (
            correlate(run_id),
            open_span("activity-closer run", attributes={"jobRunId": str(run_id)}) as span,
        ):
            try:
                with self._admitted(live=now is None), _connection_set_up():
                    run = self._begin(run_id, now)
                    for phase in self._phases:
                        self._close_due(phase, run)
                outcome = RunOutcome.SUCCEEDED
            except _RunEnded as end:
                outcome = end.outcome
            except Exception as exc:
                outcome, failures = RunOutcome.FAILED, 1
                metrics.CLOSER_ERRORS.inc()
                log.error("job failed", **describe_error(exc))
            if run is not None:
                backlog = self._finish(run, outcome, live=now is None)
                failures += run.failures
            result = ActivityCloserResult(
                run_id=run_id,
                outcome=outcome,
                closed_sessions=run.closed_sessions if run else 0,
                closed_views=run.closed_views if run else 0,
                failures=failures,
                backlog_remaining=backlog,
                duration=timedelta(seconds=time.monotonic() - started),
            )
            _report(result)
            span.set_attribute("outcome", outcome.value)
            span.set_attribute("closedCount", result.closed_sessions + result.closed_views)
        return result

    @contextmanager
    def _admitted(self, *, live: bool) -> Iterator[None]:
        """Skip the run during a replay, or beside another run where only one instance may work."""
        with ExitStack() as locks:
            if live and not locks.enter_context(advisory_lock(REPLAY, shared=True)):
                raise _RunEnded(RunOutcome.SKIPPED)
            if (
                live
                and self._options.single_instance
                and not locks.enter_context(advisory_lock(CLOSER))
            ):
                raise _RunEnded(RunOutcome.SKIPPED)
            yield

    def _begin(self, run_id: UUID, now: datetime | None) -> _RunState:
        started_at = statement_time(now)
        cutoff = started_at - self._options.inactivity_threshold
        if now is None:
            ActivityCloserRun.objects.create(
                id=run_id, started_at=started_at, cutoff=cutoff, outcome=RunOutcome.RUNNING
            )
        log.info("job started", jobRunId=str(run_id), cutoff=cutoff.isoformat())
        deadline = time.monotonic() + self._options.max_run_duration.total_seconds()
        return _RunState(run_id, cutoff, now, deadline)

    def _finish(self, run: _RunState, outcome: RunOutcome, *, live: bool) -> int | None:
        """Count the backlog and complete the run's row; log an error of the database."""
        try:
            with _connection_set_up():
                backlog = _count_backlog(run.cutoff)
                active_sessions = count_active_sessions() if live else None
            if live:
                ActivityCloserRun.objects.filter(id=run.run_id).update(
                    finished_at=time_expression(),
                    closed_sessions=run.closed_sessions,
                    closed_views=run.closed_views,
                    failures=run.failures + (outcome is RunOutcome.FAILED),
                    backlog_remaining=backlog,
                    active_sessions=active_sessions,
                    outcome=outcome,
                )
                ActivityCloserRun.objects.filter(
                    started_at__lt=time_expression() - _RUNS_KEPT
                ).delete()
        except Error as exc:
            log.warning("run not recorded", jobRunId=str(run.run_id), **describe_error(exc))
            return None
        return backlog

    def _close_due(self, phase: _Phase, run: _RunState) -> None:
        """Claim and close units until a claim is not full.

        A failed unit is retried row by row, so that only the failing row stays Active.
        A unit that exceeds the statement timeout is retried in halves.

        Raises:
            _RunEnded: cancelled, or out of time.
            Exception: the database is lost, cannot write, or refuses even the claim.
        """
        batch = _BatchLog(phase.name, self._options.batch_size)
        try:
            self._close_units(phase, run, batch)
        finally:
            batch.log()

    def _close_units(self, phase: _Phase, run: _RunState, batch: _BatchLog) -> None:
        unit = phase.unit
        since: str | None = None
        while True:
            self._check_end(run)
            claimed: list[tuple[str, str]] = []
            try:
                closed = self._close_unit(phase, run, claimed, since=since, limit=unit)
            except Exception as exc:
                if is_storage_error(exc):
                    raise
                if sqlstate(exc) == STATEMENT_TIMEOUT and unit > 1:
                    _log_unit_failed(phase, unit, exc)
                    unit //= 2
                    continue
                if not claimed:
                    if sqlstate(exc) == LOCK_TIMEOUT:
                        return  # another session has locked the whole table; the next tick retries
                    raise
                closed = self._close_one_by_one(phase, run, claimed, exc)
            batch.add(len(claimed), closed)
            if len(claimed) < unit:
                return
            # Continue behind the last claimed row. This skips the index entries of closed rows,
            # which PostgreSQL cannot remove while an old transaction is open. Rows that were
            # skipped as locked are left to the next tick.
            since = claimed[-1][1]

    def _close_one_by_one(
        self, phase: _Phase, run: _RunState, failed: list[tuple[str, str]], error: Exception
    ) -> int:
        """Close the rows of a failed unit, each in a transaction; set aside those that fail."""
        if len(failed) == 1:
            _set_aside(phase, run, failed[0][0], error)
            return 0
        _log_unit_failed(phase, len(failed), error)
        closed = 0
        for row_id, _ in failed:
            self._check_end(run)
            try:
                closed += self._close_unit(phase, run, [], row_id=row_id, limit=1)
            except Exception as exc:
                if is_storage_error(exc):
                    raise
                _set_aside(phase, run, row_id, exc)
        return closed

    def _close_unit(
        self,
        phase: _Phase,
        run: _RunState,
        claimed: list[tuple[str, str]],
        *,
        limit: int,
        since: str | None = None,
        row_id: str | None = None,
    ) -> int:
        """Claim up to `limit` due rows, close them and commit.

        Args:
            claimed: Receives (id, LastActivityAt) of the claimed rows, also when this raises.
            since: Only rows whose LastActivityAt is not before it.
            row_id: Only this row, if it is still due: a heartbeat may have extended it.

        Returns:
            How many of the claimed rows were closed.
        """
        with open_span(
            "activity-closer transaction", attributes={"phase": phase.name, "batchSize": limit}
        ) as span:
            with transaction.atomic():
                claimed.extend(
                    phase.rows.claim(
                        cutoff=run.cutoff,
                        limit=limit,
                        since=since,
                        row_id=row_id,
                        set_aside=run.set_aside,
                    )
                )
                closed = phase.close(
                    [row_id for row_id, _ in claimed], reason=CloseReason.INACTIVITY, now=run.now
                )
            span.set_attribute("closedCount", closed.sessions + closed.views)
        run.closed_sessions += closed.sessions
        run.closed_views += closed.views
        metrics.CLOSER_SESSIONS_CLOSED.inc(closed.sessions)
        metrics.CLOSER_VIEWS_CLOSED.inc(closed.views)
        for lag in closed.lags:
            metrics.CLOSER_CLOSE_LAG.observe(lag)
        return closed.sessions if phase.row_type == "Session" else closed.views

    def _check_end(self, run: _RunState) -> None:
        if self._stop():
            raise _RunEnded(RunOutcome.CANCELLED)
        if time.monotonic() >= run.deadline:
            raise _RunEnded(RunOutcome.OUT_OF_TIME)


@contextmanager
def _connection_set_up() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(";".join(f"SET {name} = '{v}'" for name, v in _CONNECTION_SETTINGS.items()))
    try:
        yield
    finally:
        # A lost connection has nothing to reset.
        if connection.is_usable():
            with connection.cursor() as cursor:
                cursor.execute(";".join(f"RESET {name}" for name in _CONNECTION_SETTINGS))


def _count_backlog(cutoff: datetime) -> int:
    counted = 0
    for rows in (Session.objects, PropertyObjectView.objects):
        due = rows.due(cutoff=cutoff).order_by()
        counted += due[: _BACKLOG_COUNTED_TO - counted].count()
    return counted


def _set_aside(phase: _Phase, run: _RunState, row_id: str, error: Exception) -> None:
    """Exclude a row from the rest of this run; the next tick retries it."""
    run.set_aside.append(row_id)
    item = {"id": row_id, "type": phase.row_type, **describe_error(error)}
    if sqlstate(error) == LOCK_TIMEOUT:
        log.info("item busy", **item)  # a long transaction has locked it: not an error
        return
    run.failures += 1
    metrics.CLOSER_ERRORS.inc()
    log.error("item failed", **item)


def _log_unit_failed(phase: _Phase, rows: int, error: Exception) -> None:
    if sqlstate(error) != LOCK_TIMEOUT:
        metrics.CLOSER_ERRORS.inc()
    log.warning("unit failed", phase=phase.name, rows=rows, **describe_error(error))


def _report(result: ActivityCloserResult) -> None:
    if result.outcome is not RunOutcome.SKIPPED:
        metrics.CLOSER_RUN_DURATION.observe(result.duration / timedelta(milliseconds=1))
    if result.backlog_remaining is not None:
        metrics.CLOSER_BACKLOG.set(result.backlog_remaining)
    log.info(
        "job completed",
        jobRunId=str(result.run_id),
        outcome=result.outcome.value,
        closedSessions=result.closed_sessions,
        closedViews=result.closed_views,
        failures=result.failures,
        durationMs=result.duration // timedelta(milliseconds=1),
        backlogRemaining=result.backlog_remaining,
    )
