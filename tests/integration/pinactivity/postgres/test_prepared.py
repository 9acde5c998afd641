"""The prepared statement of a heartbeat: planned once a connection, its errors Django's."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import Client

from pinactivity.core.error_info import LOCK_TIMEOUT, is_connection_lost, sqlstate
from pinactivity.core.ids import new_id
from pinactivity.postgres.prepared import PreparedStatement
from sessions.models import EXTEND, Session, TouchedSession
from tests.concurrency import beside
from tests.factories import make_session
from tests.plans import index_scans

pytestmark = pytest.mark.django_db(transaction=True)

ANSWER = PreparedStatement("answer", "SELECT * FROM answers WHERE id = %(id)s")
ABANDONED_AFTER = timedelta(minutes=24)


@pytest.fixture
def session() -> Session:
    return make_session()


@pytest.fixture
def answers() -> Iterator[None]:
    connection.close()  # for a connection where the statement has not failed yet
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE answers AS SELECT 42 AS id")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS answers")


def extend(session: Session) -> TouchedSession | None:
    return Session.objects.extend(
        session_id=session.id,
        anonymous_id=session.anonymous_id,
        abandoned_after=ABANDONED_AFTER,
        now=None,
    )


def send_heartbeat(client: Client, session: Session) -> int:
    return client.post(
        "/api/user-activity/sessions/heartbeat",
        {"SessionId": str(session.id)},
        "application/json",
        headers={"X-Anonymous-Id": str(session.anonymous_id), "User-Agent": "test"},
    ).status_code


def executions(name: str) -> int:
    """Count the runs of a prepared statement on this thread's connection, as PostgreSQL does."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(generic_plans + custom_plans), 0)::int"
            " FROM pg_prepared_statements WHERE name = %s",
            [name],
        )
        (count,) = cursor.fetchone()
    assert isinstance(count, int)
    return count


def test_beat_is_one_prepared_statement(
    client: Client, session: Session, count_statements: Callable[[], Any]
) -> None:
    before = executions("extend_session")
    for _ in range(3):
        assert send_heartbeat(client, session) == 200
    assert executions("extend_session") == before + 3

    with count_statements() as statements:
        assert send_heartbeat(client, session) == 200
    assert len(statements) == 1
    assert "UPDATE sessions" in statements[0]["sql"]


def test_both_ways_give_the_same(session: Session) -> None:
    prepared = extend(session)
    with transaction.atomic():
        ordinary = extend(session)
    assert prepared is not None
    assert ordinary is not None
    assert prepared.session_id == ordinary.session_id == session.id
    assert prepared.anonymous_id == ordinary.anonymous_id == session.anonymous_id
    assert prepared.user_id is ordinary.user_id is None
    assert prepared.moment < ordinary.moment < prepared.moment + timedelta(minutes=1)
    assert prepared.moment.utcoffset() == timedelta(0)


def test_explicit_time_is_taken(session: Session) -> None:
    moment = session.last_activity_at + timedelta(minutes=5)
    touched = Session.objects.extend(
        session_id=session.id,
        anonymous_id=session.anonymous_id,
        abandoned_after=ABANDONED_AFTER,
        now=moment,
    )
    assert touched is not None
    assert touched.moment == moment
    session.refresh_from_db()
    assert session.last_activity_at == moment


def test_no_row_is_none(session: Session) -> None:
    session.anonymous_id = new_id()
    assert extend(session) is None


def test_in_a_transaction_it_is_rolled_back_with_it(session: Session) -> None:
    with transaction.atomic():
        assert extend(session) is not None
        transaction.set_rollback(True)
    before = session.last_activity_at
    session.refresh_from_db()
    assert session.last_activity_at == before


def test_server_connection_without_the_statement_is_no_error(answers: None) -> None:
    """As behind a pooler that knows no prepared statements: 26000."""
    assert ANSWER.fetch_one({"id": 42}) == (42,)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    assert ANSWER.fetch_one({"id": 42}) == (42,)
    assert ANSWER.fetch_one({"id": 42}) == (42,)


def test_migration_under_the_statement_is_no_error(answers: None) -> None:
    """What it returns has changed: 0A000, "cached plan must not change result type"."""
    assert ANSWER.fetch_one({"id": 42}) == (42,)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE answers ADD COLUMN question text")
    assert ANSWER.fetch_one({"id": 42}) == (42, None)


def test_errors_are_those_of_django(session: Session) -> None:
    with pytest.raises(DatabaseError) as raised:
        EXTEND.fetch_one(
            {"session_id": "no id", "anonymous_id": None, "abandoned_after": None, "now": None}
        )
    assert sqlstate(raised.value) == "22P02"
    assert extend(session) is not None

    with beside() as other, connection.cursor() as cursor:
        other.execute("SELECT FROM user_activity.sessions WHERE id = %s FOR UPDATE", [session.id])
        cursor.execute("SET lock_timeout = '50ms'")
        with pytest.raises(OperationalError) as raised_late:
            extend(session)
        cursor.execute("RESET lock_timeout")
    assert sqlstate(raised_late.value) == LOCK_TIMEOUT


def test_lost_connection_is_reported_and_the_next_heartbeat_has_a_new_one(
    client: Client, session: Session
) -> None:
    assert extend(session) is not None
    with beside() as other:
        other.autocommit = True
        other.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
    with pytest.raises(DatabaseError) as raised:
        extend(session)
    assert is_connection_lost(raised.value)

    assert send_heartbeat(client, session) == 200
    assert executions("extend_session") == 1


def test_plan_is_a_unique_index_with_any_parameters(session: Session) -> None:
    """Among many sessions of many devices: at most one row is read, by either of the two."""
    extend(session)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO sessions (id, anonymous_id, status, created_at, last_activity_at, ended_at,
                                  duration, close_reason, user_agent, browser, os, device_type)
            SELECT gen_random_uuid(), lpad(to_hex(n % 4000), 32, 'a')::uuid, 'Inactive',
                   moment, moment, moment + interval '12 min', interval '0', 'Inactivity',
                   'test', '', '', 'Unknown'
            FROM (SELECT n, statement_timestamp() - n * interval '1 min' AS moment
                  FROM generate_series(1, 20000) AS n) AS made
            """
        )
        cursor.execute("ANALYZE sessions")
        for mode in ("force_generic_plan", "force_custom_plan"):
            cursor.execute(f"SET plan_cache_mode = {mode}")
            cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE extend_session({_in_order(session)})")
            (plan,) = cursor.fetchone()
            (index,) = index_scans(plan[0]["Plan"])
            assert index in ("sessions_pkey", "ux_sessions_active_anonymous"), json.dumps(plan)
        cursor.execute("RESET plan_cache_mode")


def _in_order(session: Session) -> str:
    """Write the arguments in the order of the statement's parameters."""
    values: dict[str, UUID | str] = {
        "now": "NULL",
        "session_id": f"'{session.id}'",
        "anonymous_id": f"'{session.anonymous_id}'",
        "abandoned_after": "'24 min'",
    }
    return ", ".join(str(values[field]) for field in EXTEND.fields)
