"""The services that open and extend views against bare SQL that does the same.

`make bench NAME=views` opens a view in each of 1,500 sessions, then extends a view in each, by

- `views.services.open_view` and `extend_view`, in turn with
- the same prepared statements, sent by psycopg without Django.

One connection sends one call after the other. So the ratio compares the work of a call, not the
use of the cores. bench/heartbeat.py measures what comes before a service: HTTP, tokens, limits.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext

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
from sessions.device import Device, DeviceType
from views.lifecycle import ViewSource
from views.models import EXTEND, OPEN
from views.services import extend_view, open_view

SERVICE, BARE = "service", "bare SQL"
_DEVICE = Device("bench", None, "", "", DeviceType.UNKNOWN)
_SNAPSHOT = {"City": "Tallinn", "Rooms": [2, 3], "PriceMax": 250_000, "Sort": "PriceAscending"}


class Visits:
    """Devices, each with an Active session, and for heartbeats with an Active view."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sessions: list[tuple[UUID, UUID]] = []
        """(SessionId, AnonymousId)"""
        self.views: list[tuple[UUID, UUID]] = []
        """(PropertyObjectViewId, AnonymousId)"""

    def make_sessions(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE property_object_views, sessions")
            cursor.execute(
                "INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at, user_agent,"
                " browser, os, device_type)"
                " SELECT gen_random_uuid(), gen_random_uuid(), statement_timestamp(),"
                " statement_timestamp(), 'bench', '', '', 'Unknown' FROM generate_series(1, %s)"
                " RETURNING id, anonymous_id",
                [self.count],
            )
            self.sessions = cursor.fetchall()
            cursor.execute("VACUUM (ANALYZE) sessions, property_object_views")
            cursor.execute("CHECKPOINT")

    def make_views(self) -> None:
        self.make_sessions()
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO property_object_views (id, session_id, property_object_id,"
                " view_source, created_at, last_activity_at)"
                " SELECT gen_random_uuid(), id, gen_random_uuid(), 'Map', created_at, created_at"
                " FROM sessions RETURNING id,"
                " (SELECT anonymous_id FROM sessions WHERE sessions.id = session_id)"
            )
            self.views = cursor.fetchall()
            cursor.execute("VACUUM (ANALYZE) property_object_views")
            cursor.execute("CHECKPOINT")

    def check(self, name: str) -> None:
        """Check that each device has one Active view, and its session that view's last activity.

        Raises:
            BenchFailed: the work was not done.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM sessions JOIN property_object_views AS view"
                " ON view.session_id = sessions.id"
                " WHERE view.status = 'Active' AND sessions.last_activity_at > sessions.created_at"
                " AND view.last_activity_at = sessions.last_activity_at"
            )
            (done,) = cursor.fetchone()
        if done != self.count:
            raise BenchFailed(f"{name} did its work for {done} of {self.count}")

    # -- the service ---------------------------------------------------------------------

    def open(self) -> None:
        for session_id, anonymous_id in self.sessions:
            open_view(
                session_id=session_id,
                anonymous_id=anonymous_id,
                device=_DEVICE,
                property_object_id=new_id(),
                view_source=ViewSource.MAP,
                filter_snapshot=_SNAPSHOT,
            )

    def extend(self) -> None:
        for view_id, anonymous_id in self.views:
            extend_view(view_id=view_id, anonymous_id=anonymous_id)

    # -- bare SQL ------------------------------------------------------------------------

    def open_bare(self, database: psycopg.Connection[Any]) -> None:
        for session_id, anonymous_id in self.sessions:
            parameters = {
                "id": new_id(),
                "session_id": session_id,
                "anonymous_id": anonymous_id,
                "property_object_id": new_id(),
                "view_source": ViewSource.MAP.value,
                "filter_snapshot": json.dumps(_SNAPSHOT),
                "abandoned_after": settings.ACTIVITY_CLOSER.abandoned_after,
                "now": None,
            }
            database.execute(OPEN.text, parameters, prepare=True).fetchone()

    def extend_bare(self, database: psycopg.Connection[Any]) -> None:
        for view_id, anonymous_id in self.views:
            parameters = {
                "id": view_id,
                "anonymous_id": anonymous_id,
                "abandoned_after": settings.ACTIVITY_CLOSER.abandoned_after,
                "now": None,
            }
            database.execute(EXTEND.text, parameters, prepare=True).fetchone()


def connect_bare() -> psycopg.Connection[Any]:
    """Connect with Django's parameters, without its additions to psycopg."""
    parameters = connection.get_connection_params()
    for name in ("context", "cursor_factory", "prepare_threshold"):
        parameters.pop(name, None)
    return psycopg.connect(**parameters, autocommit=True)


def count_statements(call: Callable[[], None]) -> int:
    """Count the statements of a call, including BEGIN and COMMIT."""
    with CaptureQueriesContext(connection) as captured:
        call()
    return len(captured)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.views", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_500)
    parser.add_argument("--repeats", type=int, default=15, help="of each way")
    arguments = parser.parse_args()
    with own_database(), connect_bare() as database:
        one, visits = Visits(1), Visits(arguments.sessions)
        one.make_sessions()
        statements = {"open": count_statements(one.open)}
        one.make_views()
        statements["extend"] = count_statements(one.extend)
        say("opening")
        opened = interleave(
            {SERVICE: visits.open, BARE: lambda: visits.open_bare(database)},
            work=visits.count,
            repeats=arguments.repeats,
            prepare=visits.make_sessions,
            check=visits.check,
        )
        say("extending")
        extended = interleave(
            {SERVICE: visits.extend, BARE: lambda: visits.extend_bare(database)},
            work=visits.count,
            repeats=arguments.repeats,
            prepare=visits.make_views,
            check=visits.check,
        )
    conclude(
        {
            "name": "views",
            **_summarise("open", opened, statements["open"]),
            **_summarise("extend", extended, statements["extend"]),
            "sessions": arguments.sessions,
            "repeats": arguments.repeats,
        }
    )


def _summarise(call: str, samples: dict[str, Samples], statements: int) -> dict[str, Any]:
    """Rates are medians; the range is of the pairs that ran one after the other."""
    service, bare = samples[SERVICE], samples[BARE]
    return {
        f"{call}s_per_second": round(service.per_second),
        f"bare_{call}s_per_second": round(bare.per_second),
        f"{call}_ratio": round(service.per_second / bare.per_second, 3),
        f"{call}_ratio_range": ratio_range(service, bare),
        f"{call}_ratio_of_fastest": round(service.fastest / bare.fastest, 3),
        f"{call}_statements": statements,
    }


if __name__ == "__main__":
    main()
