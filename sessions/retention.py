"""The ActivityRetentionJob: deletes sessions that ended long ago (design, section 7).

A transaction claims the sessions that ended first, deletes their views, then the sessions. The
totals of the deleted views are added to `purged_*` of the statistics. A run keeps no state for the
next one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.db import connection, transaction

from pinactivity.core.error_info import describe_error, is_storage_error
from pinactivity.core.ids import array_text, earliest_id, new_id
from pinactivity.postgres.clock import statement_time
from pinactivity.postgres.locks import REPLAY, advisory_lock
from pinactivity.telemetry import metrics
from pinactivity.telemetry.tracing import correlate, open_span
from sessions.lifecycle import RunOutcome
from sessions.options import ActivityRetentionOptions
from views.retention import delete_views

log = structlog.get_logger(__name__)

for _outcome in RunOutcome:  # at 0: Prometheus sees no increase in a series that begins with 1
    metrics.RETENTION_RUNS.labels(_outcome.value)

_BATCH = 500
"""Sessions in one transaction. It bounds how long consumers wait for rows of the statistics."""


@dataclass(frozen=True, slots=True)
class ActivityRetentionResult:
    """The totals of a run. `failures`: sessions skipped, plus the error that ended the run."""

    outcome: RunOutcome
    deleted_sessions: int
    deleted_views: int
    failures: int
    duration: timedelta


@dataclass(slots=True)
class _RetentionRun:
    deadline: float
    """On time.monotonic()."""
    deleted_sessions: int = 0
    deleted_views: int = 0
    failures: int = 0


class ActivityRetention:
    """Runs the job.

    Args:
        options: Validated at start.
        stop: Asked between transactions; True ends the run normally.
    """

    def __init__(
        self, options: ActivityRetentionOptions, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._options = options
        self._stop = stop

    def run(self, *, now: datetime | None = None) -> ActivityRetentionResult:
        """Delete the Inactive sessions that ended longer ago than the age, with their views.

        An exception never leaves this method: it is logged, counted and reported by the outcome.

        Args:
            now: None is the database's clock; a value is for tests.
        """
        run_id = new_id()
        started = time.monotonic()
        run = _RetentionRun(started + self._options.max_run_duration.total_seconds())
        with correlate(run_id), open_span("activity-retention run") as span:
            try:
                with advisory_lock(REPLAY, shared=True) as free:
                    outcome = self._run(run, now) if free else RunOutcome.SKIPPED
            except Exception as exc:
                outcome = RunOutcome.FAILED
                run.failures += 1
                metrics.RETENTION_ERRORS.inc()
                log.error("retention failed", **describe_error(exc))
            span.set_attributes(
                {"outcome": outcome.value, "deletedCount": run.deleted_sessions + run.deleted_views}
            )
        result = ActivityRetentionResult(
            outcome=outcome,
            deleted_sessions=run.deleted_sessions,
            deleted_views=run.deleted_views,
            failures=run.failures,
            duration=timedelta(seconds=time.monotonic() - started),
        )
        metrics.RETENTION_RUNS.labels(outcome.value).inc()
        log.info(
            "retention completed",
            outcome=outcome.value,
            deletedSessions=result.deleted_sessions,
            deletedViews=result.deleted_views,
            failures=result.failures,
            durationMs=result.duration // timedelta(milliseconds=1),
        )
        return result

    def _run(self, run: _RetentionRun, now: datetime | None) -> RunOutcome:
        """Delete batches until a claim is not full.

        A failed batch, or one that exceeds the statement timeout, is retried in halves, down to
        the one session that fails. The run skips that session.

        Raises:
            Exception: the database is lost or cannot write.
        """
        cutoff = statement_time(now) - self._options.age
        limit = _BATCH
        after = ("-infinity", str(UUID(int=0)))
        while True:
            if self._stop():
                return RunOutcome.CANCELLED
            if time.monotonic() >= run.deadline:
                return RunOutcome.OUT_OF_TIME
            claimed: list[tuple[str, str]] = []
            try:
                _delete_batch(run, claimed, cutoff=cutoff, after=after, limit=limit)
            except Exception as exc:
                if is_storage_error(exc) or (limit == 1 and not claimed):
                    raise
                metrics.RETENTION_ERRORS.inc()
                log.warning("retention batch failed", rows=limit, **describe_error(exc))
                if limit > 1:
                    limit //= 2
                    continue
                run.failures += 1
            if len(claimed) < limit:
                return RunOutcome.SUCCEEDED
            after = claimed[-1]
            limit = min(2 * limit, _BATCH)


def _delete_batch(
    run: _RetentionRun,
    claimed: list[tuple[str, str]],
    *,
    cutoff: datetime,
    after: tuple[str, str],
    limit: int,
) -> None:
    """Claim sessions, delete their views and them, and commit.

    Args:
        claimed: Receives (EndedAt, id) of the claimed sessions, also when this raises.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            _CLAIM,
            {
                "cutoff": cutoff,
                "made_before": earliest_id(cutoff),
                "after_ended_at": after[0],
                "after_id": after[1],
                "limit": limit,
            },
        )
        claimed.extend(cursor.fetchall())
        if not claimed:
            return
        ids = array_text(row_id for _, row_id in claimed)
        views = delete_views(session_ids=ids)
        cursor.execute("DELETE FROM sessions WHERE id = ANY(%s::uuid[])", [ids])
    run.deleted_sessions += len(claimed)
    run.deleted_views += views
    metrics.RETENTION_SESSIONS_DELETED.inc(len(claimed))
    metrics.RETENTION_VIEWS_DELETED.inc(views)


# `made_before` compares the creation time in the id. A replay inserts rows today that ended long
# ago by its own clock: the statistics may not have counted the events of such views yet.
_CLAIM = """
    SELECT ended_at::text, id::text FROM sessions
    WHERE status = 'Inactive' AND ended_at < %(cutoff)s AND id < %(made_before)s
      AND ended_at >= %(after_ended_at)s::timestamptz
      AND (ended_at, id) > (%(after_ended_at)s::timestamptz, %(after_id)s::uuid)
    ORDER BY sessions.ended_at, sessions.id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
"""
