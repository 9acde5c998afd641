"""Fixtures of tests of sessions."""

from typing import Any

import pytest
from django.db import connection

from sessions.models import Session


@pytest.fixture
def refuse_one(request: pytest.FixtureRequest) -> Any:
    """Make a trigger of the test refuse the closing of given sessions."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE refused (id uuid)")
        cursor.execute("CREATE SEQUENCE refusals")  # no rollback resets a sequence
        cursor.execute(
            """
            CREATE FUNCTION refuse_listed() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF EXISTS (SELECT FROM refused WHERE refused.id = new.id) THEN
                    PERFORM nextval('refusals');
                    RAISE EXCEPTION 'refused' USING ERRCODE = 'raise_exception';
                END IF;
                RETURN new;
            END $$
            """
        )
        cursor.execute(
            "CREATE TRIGGER refuse_listed BEFORE UPDATE ON sessions"
            " FOR EACH ROW EXECUTE FUNCTION refuse_listed()"
        )

    def refuse(session: Session) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO refused VALUES (%s)", [session.id])

    yield refuse
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER refuse_listed ON sessions")
        cursor.execute("DROP FUNCTION refuse_listed")
        cursor.execute("DROP TABLE refused")
        cursor.execute("DROP SEQUENCE refusals")
