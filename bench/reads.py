"""The read API of dev-stats over a year's worth of facts: how long, and how many rows are read.

`make bench NAME=reads` fills empty tables with 5 M session facts and 15 M view facts of 200
developers over 90 days, a fifth of them the first developer's, and asks for both summaries, of the
large developer and of ordinary ones, for a week and for the whole time. An object in a hundred was
another developer's before (`--shared`). Requests go through the
service's own WSGI application, without a network. It empties the tables again.
"""

import argparse
import re
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import jwt
from django.conf import settings
from django.core.management import call_command
from django.test import Client

from bench.measure import BenchFailed, conclude, say
from devstats.clickhouse import connect_writer
from devstats.facts import TENANT
from devstats.selectors import reader
from devstats.tables import PROPERTY_OBJECTS, SESSION_FACTS, VIEW_FACTS
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc

_DAYS, _DEVELOPERS, _OBJECTS = 90, 200, 20_000
_SECRET = "of-a-bench-only-0123456789-0123456789-0123456789"
_UNTIL = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
_SINCE = _UNTIL - timedelta(days=_DAYS)
_PATHS = {
    "sessions": "/api/dev-stats/sessions/summary",
    "objects": "/api/dev-stats/property-objects/summary",
}

# Ids by number, so that the views find their sessions. Developer 1 has a fifth of the objects.
_FILL_SESSIONS = f"""
    INSERT INTO session_facts ({", ".join(SESSION_FACTS.columns)})
    SELECT toString(number), _id(number, 1), _id(number, 2),
           number % 3 = 0 ? _id(number % 100000, 3) : NULL, began, began,
           began + toIntervalSecond(seconds), seconds, {{tenant:String}}, NULL, NULL,
           number % 3 = 0 ? 'User' : 'Guest'
    FROM (
        SELECT number, 60 + cityHash64(number) % 3000 AS seconds,
               {{since:DateTime64(6, 'UTC')}}
               + toIntervalMicrosecond(number * {{step:UInt64}}) AS began
        FROM numbers({{first:UInt64}}, {{chunk:UInt64}})
    )
"""
_FILL_VIEWS = f"""
    INSERT INTO property_object_view_facts ({", ".join(VIEW_FACTS.columns)})
    SELECT concat('v', toString(number)), _id(number, 4), _id(object, 5), _id(session, 1),
           _id(session, 2), session % 3 = 0 ? _id(session % 100000, 3) : NULL, 'Map', began,
           began + toIntervalSecond(30), 30, '', {{tenant:String}}, NULL,
           object % 5 = 0 ? _id(1, 6) : _id(object % {_DEVELOPERS}, 6),
           session % 3 = 0 ? 'Investor' : 'Guest'
    FROM (
        SELECT number, intDiv(number, 3) AS session, cityHash64(number, 7) % {_OBJECTS} AS object,
               {{since:DateTime64(6, 'UTC')}}
               + toIntervalMicrosecond(number * {{step:UInt64}}) AS began
        FROM numbers({{first:UInt64}}, {{chunk:UInt64}})
    )
"""
_FILL_OBJECTS = f"""
    INSERT INTO property_objects ({", ".join(PROPERTY_OBJECTS.columns)})
    SELECT _id(number, 5),
           number % 5 = 0 AND NOT before ? _id(1, 6)
                                         : _id((number + before) % {_DEVELOPERS}, 6),
           NULL, {{since:DateTime64(6, 'UTC')}} - toIntervalDay(1 + before), 0
    FROM numbers({_OBJECTS}) ARRAY JOIN [0, 1] AS before
    WHERE NOT before OR ({{shared:UInt64}} AND number % {{shared:UInt64}} = 0)
"""
_CHUNK = 1_000_000


def _with_ids(statement: str) -> str:
    """Write `_id(number, kind)` out: a UUID that looks random and is always the same."""
    return re.sub(r"_id\(([^,]+), (\d)\)", r"reinterpretAsUUID(sipHash128(\1, \2))", statement)


def _developer(number: int) -> UUID:
    client = connect_writer()
    try:
        statement = _with_ids(f"SELECT _id({number}, 6)")
        found: UUID = client.query(statement).result_rows[0][0]
        return found
    finally:
        client.close()


def _fill(sessions: int, shared: int) -> None:
    client = connect_writer(timeout=timedelta(minutes=5))
    since = _SINCE.strftime("%Y-%m-%d %H:%M:%S")
    try:
        client.command(_with_ids(_FILL_OBJECTS), parameters={"since": since, "shared": shared})
        for table, statement, count in (
            (SESSION_FACTS, _FILL_SESSIONS, sessions),
            (VIEW_FACTS, _FILL_VIEWS, 3 * sessions),
        ):
            for first in range(0, count, _CHUNK):
                client.command(
                    _with_ids(statement),
                    parameters={
                        "tenant": TENANT,
                        "since": since,
                        "step": _DAYS * 86_400_000_000 // count,
                        "first": first,
                        "chunk": min(_CHUNK, count - first),
                    },
                )
                say(f"{table.name}: {min(first + _CHUNK, count):,} rows")
    finally:
        client.close()


class ReadRows:
    """Notes how many rows each query of the reader read."""

    def __init__(self) -> None:
        self._reader = reader(settings.CLICKHOUSE_URL)
        self._query = self._reader.query
        self.rows: list[int] = []
        self._reader.query = self._noting  # type: ignore[method-assign]  # the service's own client, listened to

    def _noting(self, *arguments: Any, **options: Any) -> Any:
        result = self._query(*arguments, **options)
        self.rows.append(int(result.summary["read_rows"]))
        return result


def _measure(calls: int) -> dict[str, Any]:
    settings.JWT_DEVELOPMENT_SECRET = _SECRET
    noted = ReadRows()
    results: dict[str, Any] = {}
    for size, developer in (("large", _developer(1)), ("ordinary", _developer(2))):
        claims = {
            "iss": settings.JWT_ISSUER,
            "aud": settings.JWT_AUDIENCE,
            "sub": str(new_id()),
            "exp": datetime.now(UTC) + timedelta(hours=1),
            "developer_id": str(developer),
        }
        token = jwt.encode(claims, _SECRET, algorithm="HS256")
        for what, path in _PATHS.items():
            for days in (7, _DAYS):
                query = {"From": iso_utc(_UNTIL - timedelta(days=days)), "To": iso_utc(_UNTIL)}
                noted.rows.clear()
                seconds, counted = [], 0
                for _ in range(calls):
                    began = time.perf_counter()
                    response = Client(SERVER_NAME="127.0.0.1").get(
                        path, query, headers={"Authorization": f"Bearer {token}"}
                    )
                    seconds.append(time.perf_counter() - began)
                    if response.status_code != 200:
                        raise BenchFailed(f"{path} answered {response.status_code}.")
                    counted = _counted(response.json())
                cuts = statistics.quantiles(seconds, n=100)
                name = f"{what}, {size} developer, {days} days"
                results[name] = {
                    "p50_ms": round(cuts[49] * 1000),
                    "p99_ms": round(cuts[98] * 1000),
                    "rows_read": noted.rows[-1],
                    "counted": counted,
                }
                say(f"{name}: {results[name]}")
    return results


def _counted(body: dict[str, Any]) -> int:
    """Sessions, or views of the objects that are shown."""
    if "Total" in body:
        return int(body["Total"]["Sessions"])
    return sum(item["Views"] for item in body["Items"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=5_000_000, help="with 3 views each")
    parser.add_argument("--calls", type=int, default=30, help="of each kind")
    parser.add_argument(
        "--shared", type=int, default=100, help="one object in so many had an owner before; 0: none"
    )
    options = parser.parse_args()
    call_command("migrate_clickhouse", verbosity=0)
    client = connect_writer()
    tables = (SESSION_FACTS.name, VIEW_FACTS.name, PROPERTY_OBJECTS.name)
    try:
        if any(client.query(f"SELECT 1 FROM {table} LIMIT 1").result_rows for table in tables):
            raise BenchFailed("ClickHouse holds facts; this bench would delete them.")
        try:
            _fill(options.sessions, options.shared)
            results = _measure(options.calls)
        finally:
            for table in tables:
                client.command(f"TRUNCATE TABLE {table}")
    finally:
        client.close()
    conclude({"name": "reads", "session_facts": options.sessions, "reads": results})


if __name__ == "__main__":
    main()
