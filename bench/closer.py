"""ActivityCloser against its limit: one set-based SQL statement that does the same work.

`make bench NAME=closer` closes 50,000 due sessions with 3 views each, in turn by

- a real run, `ActivityCloser(options).run()`;
- a data-modifying CTE that claims a unit, closes it and writes its events in PostgreSQL. It is a
  limit, not a replacement: its single snapshot misses a view that opens while it waits for a
  session (INV-LV-007), and one failing row stops it.

Both start with the same rows, and must leave the same rows and the same events.

Two options measure the real run alone:

- `--growth 5000000`: how much longer it takes beside so many closed sessions with a view each;
- `--memory 1000000`: how much the process grows while it closes so many rows in many runs.
"""

import argparse
import gc
import json
import re
from datetime import datetime
from typing import Any

import psutil
from django.db import connection

from bench.backlog import VIEWS_PER_SESSION, Backlog
from bench.measure import (
    BenchFailed,
    Samples,
    conclude,
    interleave,
    own_database,
    ratio_range,
    say,
    unbounded_statements,
)
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc_sql
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry import tracing
from sessions.closer import ActivityCloser
from sessions.events import SessionEnded
from sessions.lifecycle import CloseReason, RunOutcome
from sessions.options import ActivityCloserOptions
from views.events import PropertyObjectViewEnded

REAL, SET_BASED = "real run", "set-based statement"


# -- the two ways ----------------------------------------------------------------------------


def run_closer(options: ActivityCloserOptions) -> None:
    """Close the backlog by a real run."""
    result = ActivityCloser(options).run()
    if result.outcome is not RunOutcome.SUCCEEDED or result.failures or result.backlog_remaining:
        raise BenchFailed(f"The run left rows open: {result}")


def run_set_based(options: ActivityCloserOptions) -> None:
    """Close the backlog by one statement, which is one transaction, for each unit.

    As in a real run, a claim starts at the last row of the previous one.
    """
    parameters: dict[str, Any] = {
        "cutoff": statement_time() - options.inactivity_threshold,
        "unit": options.unit_size,
        "reason": CloseReason.INACTIVITY.value,
        "correlation_id": str(new_id()),
        "traceparent": tracing.traceparent(),
    }
    since: datetime | str = "-infinity"
    claimed = options.unit_size
    with connection.cursor() as cursor:
        while claimed == options.unit_size:
            cursor.execute(_CLOSE_UNIT, {**parameters, "since": since})
            claimed, since = cursor.fetchone()


def _event(event: type[SessionEnded | PropertyObjectViewEnded], payload: str) -> str:
    """Select the columns of an event from the rows `ended`; `payload` is SQL."""
    return f"""
        SELECT uuidv7(), '{event.TOPIC}', id::text,
               json_build_object(
                   'EventType', '{event.EVENT_TYPE}', 'AggregateType', '{event.AGGREGATE_TYPE}',
                   'AggregateId', id, 'ContractVersion', '{event.CONTRACT_VERSION}',
                   'Version', version::text, 'CorrelationId', %(correlation_id)s,
                   'traceparent', %(traceparent)s
               )::text,
               {payload}::text
    """


_END = """
    status = 'Inactive', ended_at = greatest(statement_timestamp(), row.last_activity_at),
    duration = row.last_activity_at - row.created_at, close_reason = %(reason)s,
    version = row.version + 1
"""
_DURATION_SECONDS = "floor(extract(epoch FROM duration))::integer"
_SESSION_PAYLOAD = f"""json_build_object(
    'SessionId', id, 'AnonymousId', anonymous_id, 'UserId', user_id,
    'CreatedAt', {iso_utc_sql("created_at")}, 'LastActivityAt', {iso_utc_sql("last_activity_at")},
    'DurationSeconds', {_DURATION_SECONDS}
)"""
_VIEW_PAYLOAD = f"""json_build_object(
    'PropertyObjectViewId', id, 'PropertyObjectId', property_object_id,
    'SessionId', session_id, 'AnonymousId', anonymous_id, 'UserId', user_id,
    'ViewSource', view_source, 'ViewedAt', {iso_utc_sql("created_at")},
    'LastActivityAt', {iso_utc_sql("last_activity_at")}, 'DurationSeconds', {_DURATION_SECONDS},
    'FilterSnapshot', filter_snapshot
)"""

_CLOSE_UNIT = f"""
    WITH claimed AS MATERIALIZED (
        SELECT id, anonymous_id, user_id, last_activity_at FROM sessions
        WHERE status = 'Active' AND last_activity_at < %(cutoff)s
          AND last_activity_at >= %(since)s
        ORDER BY last_activity_at LIMIT %(unit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ), ended_views AS (
        UPDATE property_object_views AS row SET {_END}
        FROM claimed WHERE row.session_id = claimed.id AND row.status = 'Active'
        RETURNING row.id, row.property_object_id, row.session_id, claimed.anonymous_id,
                  claimed.user_id, row.view_source, row.created_at, row.last_activity_at,
                  row.duration, row.filter_snapshot, row.version
    ), ended_sessions AS (
        UPDATE sessions AS row SET {_END}
        FROM claimed WHERE row.id = claimed.id
        RETURNING row.id, row.anonymous_id, row.user_id, row.created_at, row.last_activity_at,
                  row.duration, row.version
    ), events AS (
        INSERT INTO outbox_messages (message_id, topic, key, headers, payload)
        {_event(PropertyObjectViewEnded, _VIEW_PAYLOAD)} FROM ended_views
        UNION ALL
        {_event(SessionEnded, _SESSION_PAYLOAD)} FROM ended_sessions
    )
    SELECT count(*), max(last_activity_at) FROM claimed
"""


# -- the proof that both did the work --------------------------------------------------------

_COUNTS = """
    SELECT
        (SELECT count(*) FROM sessions
         WHERE status = 'Inactive' AND close_reason = 'Inactivity'
           AND ended_at >= last_activity_at AND duration = last_activity_at - created_at),
        (SELECT count(*) FROM property_object_views
         WHERE status = 'Inactive' AND close_reason = 'Inactivity'
           AND ended_at >= last_activity_at AND duration = last_activity_at - created_at),
        (SELECT count(*) FROM outbox_messages),
        (SELECT count(DISTINCT message_id) FROM outbox_messages
         WHERE uuid_extract_version(message_id) = 7),
        (SELECT count(DISTINCT key) FROM outbox_messages JOIN sessions ON key = sessions.id::text
         WHERE topic = %(session_topic)s),
        (SELECT count(DISTINCT key) FROM outbox_messages
         JOIN property_object_views AS view ON key = view.id::text WHERE topic = %(view_topic)s)
"""

# Over all columns and fields that are equal in each run.
_DIGEST = """
    SELECT sum(hashtextextended(concat_ws(
        ' ', topic, key, shard, attempts, published_at,
        headers::jsonb - '{CorrelationId,traceparent}'::text[], payload::jsonb
    ), 0)::numeric)
    FROM outbox_messages
"""

_EXAMPLE = """
    SELECT topic, headers, payload FROM outbox_messages
    WHERE key IN (
        SELECT id::text FROM property_object_views
        WHERE session_id = (SELECT min(id::text)::uuid FROM sessions WHERE user_id IS NOT NULL)
        UNION ALL SELECT min(id::text) FROM sessions WHERE user_id IS NOT NULL
    )
    ORDER BY key
"""


class Proof:
    """Checks after each measurement that the work was done, with the same result as before."""

    def __init__(self, sessions: int) -> None:
        views = VIEWS_PER_SESSION * sessions
        events = sessions + views
        self._counts = (sessions, views, events, events, sessions, views)
        self._example: list[Any] | None = None
        self._digest: Any = None

    def check(self, name: str) -> None:
        """Compare the rows and events with the expected ones.

        1. All rows are Inactive, with one event each, whose MessageId is a unique UUID v7.
        2. The four events of one linked session equal those of the previous measurement, apart
           from the ids of the run.
        3. A digest compares all events in the same way.

        Raises:
            BenchFailed: a comparison failed.
        """
        with unbounded_statements() as execute:
            counts = execute(
                _COUNTS, session_topic=SessionEnded.TOPIC, view_topic=PropertyObjectViewEnded.TOPIC
            )[0]
            example = [_read_event(*row) for row in execute(_EXAMPLE)]
            digest = execute(_DIGEST)[0][0]
        if counts != self._counts:
            raise BenchFailed(f"{name} left {counts}, not {self._counts}")
        self._example, self._digest = self._example or example, self._digest or digest
        if example != self._example:
            raise BenchFailed(f"{name} wrote {example}, not {self._example}")
        if digest != self._digest:
            raise BenchFailed(f"{name} wrote other events than the measurement before it")


def _read_event(topic: str, headers: str, payload: str) -> tuple[str, dict[str, str], Any]:
    """Parse an event, with the ids of the run reduced to their shape."""
    parsed = json.loads(headers)
    for name in ("CorrelationId", "traceparent"):
        parsed[name] = re.sub("[0-9a-f]", "x", parsed[name])
    return topic, parsed, json.loads(payload)


# -- the bench -------------------------------------------------------------------------------


def main() -> None:
    """Measure, prove, print."""
    arguments = _parse_arguments()
    options = _options(arguments.sessions_per_transaction)
    with own_database():
        version = _require_server()
        if arguments.growth:
            conclude(_measure_growth(arguments, options, version))
            return
        if arguments.memory:
            conclude(_measure_memory(arguments, options, version))
            return
        backlog, proof = Backlog(arguments.sessions), Proof(arguments.sessions)
        say(
            f"{backlog.sessions:,} sessions with {VIEWS_PER_SESSION} views each,"
            f" {options.unit_size} a transaction, PostgreSQL {version}"
        )
        samples = interleave(
            {REAL: lambda: run_closer(options), SET_BASED: lambda: run_set_based(options)},
            work=backlog.sessions,
            repeats=arguments.repeats,
            prepare=backlog.load,
            check=proof.check,
        )
    conclude(_summarise(samples[REAL], samples[SET_BASED], options, version))


def _summarise(
    real: Samples, limit: Samples, options: ActivityCloserOptions, version: str
) -> dict[str, Any]:
    """Build the result; rates are medians, spreads are (slowest - fastest) / median.

    Other processes on the machine disturb the fastest repeats least.
    """
    return {
        "name": "closer",
        "sessions_per_second": round(real.per_second),
        "set_based_sessions_per_second": round(limit.per_second),
        "ratio": round(real.per_second / limit.per_second, 3),
        "ratio_range": ratio_range(real, limit),
        "ratio_of_fastest": round(real.fastest / limit.fastest, 3),
        "spread": round(real.spread, 3),
        "set_based_spread": round(limit.spread, 3),
        "sessions": real.work,
        "views_per_session": VIEWS_PER_SESSION,
        "sessions_per_transaction": options.unit_size,
        "repeats": len(real.seconds),
        "postgresql": version,
    }


def _measure_growth(
    arguments: argparse.Namespace, options: ActivityCloserOptions, version: str
) -> dict[str, Any]:
    """Time runs without closed sessions, then with them; the fastest of each are compared."""
    samples = {
        closed: interleave(
            {f"beside {closed:,} closed": lambda: run_closer(options)},
            work=arguments.sessions,
            repeats=arguments.repeats,
            prepare=Backlog(arguments.sessions, closed=closed).load,
            check=lambda _: None,
        ).popitem()[1]
        for closed in (0, arguments.growth)
    }
    without, beside = samples.values()
    return {
        "name": "closer-growth",
        "growth": round(without.fastest / beside.fastest, 3),
        "sessions_per_second": round(without.fastest),
        "sessions_per_second_beside_closed": round(beside.fastest),
        "closed_sessions": arguments.growth,
        "sessions": arguments.sessions,
        "spread": round(without.spread, 3),
        "spread_beside_closed": round(beside.spread, 3),
        "repeats": arguments.repeats,
        "postgresql": version,
    }


def _measure_memory(
    arguments: argparse.Namespace, options: ActivityCloserOptions, version: str
) -> dict[str, Any]:
    """Measure the growth of this process's resident memory after its first run."""
    backlog = Backlog(arguments.sessions)
    process = psutil.Process()
    closings = 0
    resident: list[int] = []
    while closings < arguments.memory or len(resident) < 2:
        backlog.load()
        run_closer(options)
        closings += backlog.sessions * (1 + VIEWS_PER_SESSION)
        gc.collect()
        resident.append(process.memory_info().rss)
        say(f"{closings:,} rows closed, {resident[-1] / 2**20:.1f} MiB")
    return {
        "name": "closer-memory",
        "growth_mib": round((resident[-1] - resident[0]) / 2**20, 2),
        "first_mib": round(resident[0] / 2**20, 1),
        "highest_mib": round(max(resident) / 2**20, 1),
        "closings": closings,
        "runs": len(resident),
        "postgresql": version,
    }


def _options(sessions_per_transaction: int | None) -> ActivityCloserOptions:
    """Return the default options, with another size of a unit if given."""
    if sessions_per_transaction is None:
        return ActivityCloserOptions()
    return ActivityCloserOptions(
        sessions_per_transaction=sessions_per_transaction,
        batch_size=max(sessions_per_transaction, ActivityCloserOptions().batch_size),
    )


def _require_server() -> str:
    """Return PostgreSQL's version.

    Raises:
        BenchFailed: it has no uuidv7().
    """
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        (version,) = cursor.fetchone()
    if int(str(version).split(".", maxsplit=1)[0]) < 18:
        raise BenchFailed(f"This bench needs PostgreSQL 18 for uuidv7(), not {version}.")
    return str(version)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.closer", description=__doc__)
    parser.add_argument("--sessions", type=_positive, default=50_000)
    parser.add_argument("--repeats", type=_positive, default=3, help="of each way")
    parser.add_argument("--sessions-per-transaction", type=_positive, help="default: the option's")
    parser.add_argument("--quick", action="store_true", help="5,000 sessions, once: does it work?")
    parser.add_argument("--growth", type=_positive, metavar="CLOSED", help="5000000 is the limit's")
    parser.add_argument("--memory", type=_positive, metavar="CLOSINGS")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sessions, arguments.repeats = 5_000, 1
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    main()
