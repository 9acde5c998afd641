"""The plans of the closer's statements: each uses an index, whatever the statistics are.

They mislead when ANALYZE met a table empty, or before its rows fell silent or closed.
"""

import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from sessions.closer import ActivityCloser, ActivityCloserResult
from sessions.options import ActivityCloserOptions
from tests.factories import MINUTE, make_due_sessions, make_view, silent_session
from tests.plans import index_scans

pytestmark = pytest.mark.django_db(transaction=True)

ACTIVE_SESSIONS = "ix_sessions_active_last_activity"
ACTIVE_VIEWS = "ix_property_object_views_active_last_activity"
STATEMENTS: dict[str, tuple[str, set[str]]] = {
    "claim of views": (
        r'SELECT .* FROM "property_object_views" .* FOR NO KEY UPDATE SKIP LOCKED',
        {ACTIVE_VIEWS},
    ),
    "claim of sessions": (
        r'SELECT .* FROM "sessions" .* FOR NO KEY UPDATE SKIP LOCKED',
        {ACTIVE_SESSIONS},
    ),
    "locking of the views of a unit": (
        r"SELECT id::text FROM property_object_views .* FOR NO KEY UPDATE",
        {"ix_property_object_views_session"},
    ),
    "closing of views": (
        r"UPDATE property_object_views AS row",
        {"property_object_views_pkey", "sessions_pkey"},
    ),
    "closing of sessions": (r"UPDATE sessions AS row", {"sessions_pkey"}),
    "backlog of sessions": (
        r'SELECT COUNT\(\*\) FROM \(SELECT .* FROM "sessions" WHERE \(.* "sessions"."last_activ',
        {ACTIVE_SESSIONS},
    ),
    "backlog of views": (
        r'SELECT COUNT\(\*\) FROM \(SELECT .* FROM "property_object_views" WHERE',
        {ACTIVE_VIEWS},
    ),
    "count of active sessions": (
        r'SELECT COUNT\(\*\) FROM \(SELECT .* FROM "sessions" WHERE "sessions"."status" = \S+ LIM',
        {ACTIVE_SESSIONS, "ux_sessions_active_anonymous"},
    ),
}
"""The kinds of statements, with the indexes that each may use; nothing else may find rows."""


def plans_of_a_run(**options: Any) -> tuple[ActivityCloserResult, dict[str, list[Any]]]:
    """Run the closer; return the plans of each kind of its statements, custom and generic ones."""
    plans: dict[str, list[Any]] = {name: [] for name in STATEMENTS}

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        kinds = [
            name
            for name, (pattern, _) in STATEMENTS.items()
            if re.search(pattern, " ".join(sql.split()))
        ]
        if kinds:
            (kind,) = kinds
            ways = [_custom(sql, parameters)]
            if "Active'" in sql or "Inactive'" in sql:
                ways.append(_generic(sql, parameters))
            # Other statements are Django's. They are never prepared, because Django's cursors bind
            # parameters on the client's side.
            for statements in ways:
                for text, given in statements:
                    execute(text, given, many, context)
                plans[kind].append(context["cursor"].fetchone()[0][0]["Plan"])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        result = ActivityCloser(ActivityCloserOptions(**options)).run()
    return result, plans


def _custom(sql: str, parameters: Any) -> list[tuple[str, Any]]:
    return [(f"EXPLAIN (FORMAT JSON) {sql}", parameters)]


def _generic(sql: str, parameters: Any) -> list[tuple[str, Any]]:
    """Return the statements that show the generic plan, made before the values are known."""
    numbers: dict[str, int] = {}
    values: list[Any] = []

    def number(match: re.Match[str]) -> str:
        name = match[1] or f"#{len(values)}"
        if name not in numbers:
            values.append(parameters[name] if match[1] else parameters[len(values)])
            numbers[name] = len(values)
        return f"${numbers[name]}"

    text = re.sub(r"%(?:\((\w+)\))?s", number, sql)
    name = f"looked_at_{uuid4().hex}"
    return [
        (f"PREPARE {name} AS {text}", None),
        ("SET plan_cache_mode = force_generic_plan", None),
        (f"EXPLAIN (FORMAT JSON) EXECUTE {name}({', '.join(['%s'] * len(values))})", values),
    ]


@pytest.fixture(autouse=True)
def _fresh_connection() -> Iterator[None]:
    yield
    connection.close()  # with its settings and its prepared statements


def make_closed_sessions(count: int) -> None:
    """Insert sessions that have ended, each with a view of its own."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH new AS (
                INSERT INTO sessions (id, anonymous_id, status, created_at, last_activity_at,
                                      ended_at, duration, close_reason, user_agent, browser, os,
                                      device_type)
                SELECT gen_random_uuid(), gen_random_uuid(), 'Inactive', moment, moment,
                       moment + interval '12 min', interval '0', 'Inactivity',
                       'test', '', '', 'Unknown'
                FROM (SELECT statement_timestamp() - n * interval '1 min'
                      FROM generate_series(1, %s) AS n) AS made (moment)
                RETURNING id, created_at
            )
            INSERT INTO property_object_views (id, session_id, property_object_id, view_source,
                                               status, created_at, last_activity_at, ended_at,
                                               duration, close_reason)
            SELECT gen_random_uuid(), id, gen_random_uuid(), 'Map', 'Inactive', created_at,
                   created_at, created_at + interval '12 min', interval '0', 'Inactivity'
            FROM new
            """,
            [count],
        )


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE sessions, property_object_views")


@pytest.mark.parametrize("analyzed", ["empty", "all closed", "all due", "as it is"])
def test_each_statement_of_a_run_goes_by_its_index_whatever_the_statistics_say(
    analyzed: str,
) -> None:
    if analyzed == "empty":
        analyze()
    if analyzed == "all due":
        make_due_sessions(500, views=2)
        analyze()
        assert ActivityCloser(ActivityCloserOptions()).run().closed_views == 1000
    make_closed_sessions(20_000)
    if analyzed == "all closed":
        analyze()
    make_due_sessions(30, views=2)
    for _ in range(5):
        silent_session(minutes=3, views=2)
    # Phase A does not close this view; phase B does.
    make_view(session=silent_session(minutes=13), silent=MINUTE)
    if analyzed == "as it is":
        analyze()

    result, plans = plans_of_a_run(batch_size=20, sessions_per_transaction=10)

    assert (result.closed_sessions, result.closed_views) == (31, 61)
    assert [kind for kind, found in plans.items() if not found] == []
    read = {
        kind: {index for plan in found for index in index_scans(plan)}
        for kind, found in plans.items()
    }
    assert {
        kind: sorted(indexes)
        for kind, indexes in read.items()
        if not indexes or not indexes <= STATEMENTS[kind][1]
    } == {}
