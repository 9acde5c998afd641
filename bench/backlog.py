"""Due sessions and views for benches of the closer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from bench.measure import say, unbounded_statements
from pinactivity.postgres.clock import statement_time
from sessions.device import identify_device
from views.lifecycle import ViewSource

VIEWS_PER_SESSION = 3
_CLOSED_A_STATEMENT = 500_000
_TABLES = ("sessions", "property_object_views", "outbox_messages", "activity_closer_runs")
_USER_AGENTS = Path(settings.BASE_DIR) / "data" / "user-agents.txt"


def _uuid7(moment: str, seed: str) -> str:
    """Return SQL for a UUID v7 that is the same at each load; `moment` and `seed` are SQL."""
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

# Views follow one another; the last one ends with its session.
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


# Closed sessions, as a year of traffic leaves them. Their CloseReason differs from the backlog's.
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
    """Due sessions, the same ones at each load.

    Args:
        sessions: How many; each has VIEWS_PER_SESSION due views.
        closed: How many closed sessions the tables contain besides, with a closed view each.
    """

    def __init__(self, sessions: int, *, closed: int = 0) -> None:
        self.sessions = sessions
        self._closed = closed
        self._closed_are_there = False
        self._loaded_at = statement_time()
        lines = _USER_AGENTS.read_text().splitlines()
        self._devices = [identify_device(line, None) for line in lines]

    def load(self) -> None:
        """Replace all rows by the backlog, then vacuum and checkpoint."""
        with unbounded_statements() as execute:
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
