"""One clock, the database's (INV-SES-004), and how its times are written."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import time_machine
from django.db import connection, transaction

from pinactivity.core.times import iso_utc, iso_utc_sql
from pinactivity.postgres.clock import statement_time, time_expression
from sessions.models import Session
from tests.factories import make_session

GIVEN = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)


def test_given_time_is_taken_without_a_word_to_the_database(
    count_statements: Callable[[], Any], db: None
) -> None:
    with count_statements() as statements:
        assert statement_time(GIVEN) == GIVEN
    assert len(statements) == 0


@pytest.mark.django_db
def test_time_is_aware_and_utc() -> None:
    assert statement_time().utcoffset() == timedelta(0)


@pytest.mark.django_db
@pytest.mark.parametrize("hours", [-1, 1])
def test_hosts_own_clock_decides_nothing_c20(hours: int) -> None:
    before = statement_time()
    with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):
        wrong = statement_time()
    assert before < wrong < statement_time()


@pytest.mark.django_db(transaction=True)
def test_time_goes_on_within_a_transaction() -> None:
    with transaction.atomic():
        first = statement_time()
        second = statement_time()
    assert first < second


@pytest.mark.django_db(transaction=True)
def test_expression_is_the_statements_time_and_not_the_transactions() -> None:
    """The transaction's is older than what a lock wait let pass."""
    make_session()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        (begun,) = cursor.fetchone()
        (expressed,) = Session.objects.annotate(at=time_expression()).values_list("at", flat=True)
    assert expressed > begun


@pytest.mark.django_db
def test_expression_of_a_given_time_is_that_time() -> None:
    make_session()
    assert (
        Session.objects.annotate(at=time_expression(GIVEN)).values_list("at", flat=True).get()
        == GIVEN
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (GIVEN, "2026-03-01T12:00:00.000005Z"),
        (GIVEN.replace(microsecond=0), "2026-03-01T12:00:00.000000Z"),
        (
            GIVEN.astimezone(timezone(timedelta(hours=-9, minutes=-30))),
            "2026-03-01T12:00:00.000005Z",
        ),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00.000000Z"),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "9999-12-31T23:59:59.999999Z"),
    ],
)
def test_time_is_written_as_iso_8601_in_utc_with_microseconds_by_python_and_sql(
    given: datetime, text: str
) -> None:
    assert iso_utc(given) == text
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL TimeZone = 'Asia/Kathmandu'")
        cursor.execute(f"SELECT {iso_utc_sql('%s::timestamptz')}", [given])
        assert cursor.fetchone() == (text,)
