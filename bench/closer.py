"""ActivityCloser against its limit: one set-based SQL statement that does the same work.

`make bench NAME=closer` closes 50,000 due sessions with 3 views each, in turn by

- a real run, `ActivityCloser(options).run()`;
- a data-modifying CTE that claims a unit, closes it and writes its events, built by PostgreSQL.
  It is the limit and no replacement: its one snapshot misses a view that is opened while it
  waits for a session (INV-LV-007), and one faulty row stops it. Its JSON is json_build_object's;
  gluing strings together makes it about a tenth faster, and escapes nothing.

Both start from the same rows, and must leave the same rows and the same events behind.

Two options ask other questions of the real run alone:

- `--growth 5000000`: how much longer does it take when so many closed sessions are there, with
  a closed view each?
- `--memory 1000000`: does the process grow while it closes so many rows, one run after another?
"""

import argparse
import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings
from django.db import connection

from bench.measure import (
    BenchFailed,
    Samples,
    conclude,
    interleave,
    own_database,
    ratio_range,
    say,
)
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc_sql
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry import tracing
from sessions.closer import ActivityCloser
from sessions.device import identify_device
from sessions.events import SessionEnded
from sessions.lifecycle import CloseReason, RunOutcome
from sessions.options import ActivityCloserOptions
from views.events import PropertyObjectViewEnded
from views.lifecycle import ViewSource

REAL, SET_BASED = "real run", "set-based statement"
VIEWS_PER_SESSION = 3
_CLOSED_A_STATEMENT = 500_000
_TABLES = ("sessions", "property_object_views", "outbox_messages", "activity_closer_runs")
_USER_AGENTS = Path(settings.BASE_DIR) / "data" / "user-agents.txt"


# -- the rows --------------------------------------------------------------------------------


def _uuid7(moment: str, seed: str) -> str:
    """Write a UUID v7 in SQL that is the same in every load; `moment` and `seed` are SQL."""
    return (
        f"(lpad(to_hex((extract(epoch FROM {moment}) * 1000)::bigint), 12, '0')"
        f" || '7' || left(md5({seed}), 3) || '8' || right(md5({seed}), 15))::uuid"
    )


_LOAD_SESSIONS = f"""
    INSERT INTO sessions (
        id, anonymous_id, user_id, linked_at, signed_in_at, version, created_at,
        last_activity_at, ip_address, user_agent, browser, os, device_type
    )
    SELECT {_uuid7("created_at", "'session' || n")}, {_uuid7("created_at", "'device' || n")},
           CASE WHEN linked THEN md5('user' || n)::uuid END,
           CASE WHEN linked THEN created_at + lasted / 2 END,
           CASE WHEN linked THEN created_at + lasted / 2 END,
           CASE WHEN linked THEN 2 ELSE 1 END,
           created_at, created_at + lasted,
           '198.51.100.0'::inet + n %% 256, user_agent, browser, os, device_type
    FROM (
        SELECT n, n %% 3 = 0 AS linked, lasted, %(loaded_at)s - silent - lasted AS created_at
        FROM (
            SELECT n, random() * interval '30 minutes' AS lasted,
                   interval '13 minutes' + random() * interval '47 minutes' AS silent
            FROM generate_series(1, %(sessions)s) AS n
        ) AS spans
    ) AS times
    JOIN unnest(%(user_agents)s::text[], %(browsers)s::text[], %(systems)s::text[],
                %(device_types)s::text[])
         WITH ORDINALITY AS device (user_agent, browser, os, device_type, number)
      ON number = 1 + n %% %(devices)s
    ORDER BY created_at
"""

# Views follow one another; the last one lasts as long as its session.
_LOAD_VIEWS = f"""
    INSERT INTO property_object_views (
        id, session_id, property_object_id, user_id, view_source, filter_snapshot, created_at,
        last_activity_at
    )
    SELECT {_uuid7("opened_at", "'view' || n || ' ' || k")}, session_id,
           md5('object' || (n * 7 + k) %% 20000)::uuid,
           CASE WHEN opened_at >= linked_at THEN user_id END,
           (%(view_sources)s::text[])[1 + (n + k) %% cardinality(%(view_sources)s::text[])],
           CASE WHEN (n + k) %% 3 = 0 THEN jsonb_build_object(
               'City', 'Tallinn', 'District', 'Põhja-Tallinn', 'Rooms', jsonb_build_array(2, 3),
               'PriceMax', 100000 + n %% 400 * 1000, 'Sort', 'PriceAscending'
           ) END,
           opened_at, opened_at + lasted
    FROM (
        SELECT id AS session_id, user_id, linked_at, n, k,
               created_at + k * (last_activity_at - created_at) / %(views)s AS opened_at,
               (last_activity_at - created_at) / %(views)s AS lasted
        FROM (
            SELECT *, row_number() OVER (ORDER BY id) AS n FROM sessions WHERE status = 'Active'
        ) AS numbered
        CROSS JOIN generate_series(0, %(views)s - 1) AS k
    ) AS times
    ORDER BY opened_at
"""


# As a year's traffic leaves them; told from the backlog by their reason.
_LOAD_CLOSED = f"""
    WITH new AS (
        INSERT INTO sessions (
            id, anonymous_id, status, created_at, last_activity_at, ended_at, duration,
            close_reason, version, user_agent, browser, os, device_type
        )
        SELECT {_uuid7("at", "'closed' || n")}, {_uuid7("at", "'visitor' || n")}, 'Inactive', at,
               at + interval '5 min', at + interval '17 min', interval '5 min', 'Manual', 2,
               'Mozilla/5.0', 'Firefox 120', 'Linux', 'Desktop'
        FROM (
            SELECT n, %(loaded_at)s - interval '2 hours' - n * interval '6 seconds' AS at
            FROM generate_series(%(first)s, %(last)s) AS n
        ) AS times
        RETURNING id, created_at, last_activity_at, ended_at, duration
    )
    INSERT INTO property_object_views (
        id, session_id, property_object_id, view_source, status, created_at, last_activity_at,
        ended_at, duration, close_reason, version
    )
    SELECT id, id, md5(id::text)::uuid, 'Catalog', 'Inactive', created_at, last_activity_at,
           ended_at, duration, 'Manual', 2
    FROM new
"""


class Backlog:
    """Due sessions, the same ones at every load.

    Args:
        sessions: How many; each has VIEWS_PER_SESSION due views.
        closed: How many closed sessions lie beside them, with a closed view each.
    """

    def __init__(self, sessions: int, *, closed: int = 0) -> None:
        self.sessions = sessions
        self._closed = closed
        self._closed_are_there = False
        self._loaded_at = statement_time()
        lines = _USER_AGENTS.read_text().splitlines()
        self._devices = [identify_device(line, None) for line in lines]

    def load(self) -> None:
        """Replace all rows by the backlog, and bring the tables and the WAL to rest."""
        with _unbounded_statements() as execute:
            if self._closed_are_there:
                execute("TRUNCATE outbox_messages, activity_closer_runs RESTART IDENTITY")
                for table in ("property_object_views", "sessions"):
                    execute(f"DELETE FROM {table} WHERE close_reason IS DISTINCT FROM 'Manual'")
            else:
                execute(f"TRUNCATE {', '.join(_TABLES)} RESTART IDENTITY")
                self._load_closed(execute)
            execute("SELECT setseed(0.5)")
            execute(
                _LOAD_SESSIONS,
                loaded_at=self._loaded_at,
                sessions=self.sessions,
                devices=len(self._devices),
                user_agents=[device.user_agent for device in self._devices],
                browsers=[device.browser for device in self._devices],
                systems=[device.os for device in self._devices],
                device_types=[device.device_type.value for device in self._devices],
            )
            execute(
                _LOAD_VIEWS,
                views=VIEWS_PER_SESSION,
                view_sources=[source.value for source in ViewSource],
            )
            execute(f"VACUUM (ANALYZE) {', '.join(_TABLES)}")
            execute("CHECKPOINT")

    def _load_closed(self, execute: Callable[..., list[Any]]) -> None:
        for first in range(1, self._closed + 1, _CLOSED_A_STATEMENT):
            last = min(first + _CLOSED_A_STATEMENT - 1, self._closed)
            execute(_LOAD_CLOSED, loaded_at=self._loaded_at, first=first, last=last)
            say(f"{last:,} closed sessions are there")
        self._closed_are_there = self._closed > 0


# -- the two ways ----------------------------------------------------------------------------


def run_closer(options: ActivityCloserOptions) -> None:
    """Close the backlog by a real run."""
    result = ActivityCloser(options).run()
    if result.outcome is not RunOutcome.SUCCEEDED or result.failures or result.backlog_remaining:
        raise BenchFailed(f"The run did not do its work: {result}")


def run_set_based(options: ActivityCloserOptions) -> None:
    """Close the backlog by one statement, and thereby one transaction, a unit.

    As in a real run, a claim starts where the last one ended.
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


# -- the proof that both did it --------------------------------------------------------------

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

# Over everything but what differs from run to run.
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
    """Checks after every measurement that the work was done, and the same as ever before."""

    def __init__(self, sessions: int) -> None:
        views = VIEWS_PER_SESSION * sessions
        events = sessions + views
        self._counts = (sessions, views, events, events, sessions, views)
        self._example: list[Any] | None = None
        self._digest: Any = None

    def check(self, name: str) -> None:
        """Compare rows and events with what they must be.

        1. All rows are Inactive, with one event each, its MessageId a UUID v7 of its own.
        2. The four events of one linked session are alike: the same JSON, ids of the run apart.
        3. So are all events, by a digest.

        Raises:
            BenchFailed: something is not as it must be.
        """
        with _unbounded_statements() as execute:
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
    """Parse an event; of the ids that each run makes anew only the shape is kept."""
    parsed = json.loads(headers)
    for name in ("CorrelationId", "traceparent"):
        parsed[name] = re.sub("[0-9a-f]", "x", parsed[name])
    return topic, parsed, json.loads(payload)


@contextmanager
def _unbounded_statements() -> Iterator[Callable[..., list[Any]]]:
    """Give a function that runs a statement, without the connection's statement_timeout."""

    def execute(statement: str, **parameters: Any) -> list[Any]:
        cursor.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
        try:
            yield execute
        finally:
            cursor.execute("RESET statement_timeout")


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

    The fastest repeats are those that the rest of the machine disturbed least.
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
    """Watch the resident memory of this process, from the end of the first run on."""
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
    """Take the default options, but for the size of a unit when one is asked for."""
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
