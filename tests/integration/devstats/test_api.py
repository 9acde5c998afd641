"""Who may read what from the API (design, section 11): scope first, then periods, then errors."""

from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client as ClickHouse
from django.conf import settings
from django.test import Client

from devstats.clickhouse import connect_reader
from devstats.facts import (
    UNKNOWN_DEVELOPER,
)
from devstats.selectors import reader
from devstats.writer import FactWriter
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from tests.api import assert_invalid
from tests.dev_stats import lossy_clickhouse
from tests.dev_stats_api import BOTH, MARCH, OBJECTS, SESSIONS, get, read, refused
from tests.facts import NOON, OTHER, OWNER, session_fact, store, view_fact
from tests.tokens import bearer, development_token

pytestmark = pytest.mark.usefixtures("development_secret")

MINUTE = timedelta(minutes=1)


# -- scope: fail-closed --------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("claim", [None, "", "x", str(UNKNOWN_DEVELOPER), "*", [str(OWNER)]])
def test_token_that_names_no_developer_gets_403_and_no_data(
    path: str, claim: Any, writer: FactWriter
) -> None:
    session = session_fact()
    store(writer, session, view_fact(session), view_fact(session, developer_id=UNKNOWN_DEVELOPER))
    refused(get(path, claim, **MARCH), 403, "DEV_STATS_FORBIDDEN")


@BOTH
@pytest.mark.parametrize(
    "name", ["DeveloperId", "developerId", "developer_id", "developer-id", "DEVELOPERID"]
)
def test_another_developers_id_in_the_query_gets_403_and_no_data(path: str, name: str) -> None:
    refused(get(path, **MARCH, **{name: str(OTHER)}), 403, "DEV_STATS_FORBIDDEN")
    refused(get(path, **MARCH, **{name: [str(OWNER), str(OTHER)]}), 403, "DEV_STATS_FORBIDDEN")
    refused(get(path, **MARCH, **{name: ""}), 403, "DEV_STATS_FORBIDDEN")


@BOTH
def test_the_tokens_own_developer_may_be_named(path: str, clickhouse: ClickHouse) -> None:
    assert read(path, **MARCH, DeveloperId=str(OWNER).upper())


@BOTH
@pytest.mark.parametrize("developer", [OWNER, None])
def test_nobody_on_the_way_keeps_an_answer(
    path: str, developer: UUID | None, clickhouse: ClickHouse
) -> None:
    kept = get(path, developer, **MARCH).headers["Cache-Control"]
    assert {"no-store", "private"} <= set(kept.split(", "))


@BOTH
def test_token_that_is_absent_expired_or_forged_gets_401(path: str) -> None:
    refused(Client().get(path, MARCH), 401, "UNAUTHORIZED")
    expired = development_token(
        new_id(), developer_id=str(OWNER), exp=datetime.now(UTC) - timedelta(minutes=5)
    )
    refused(Client().get(path, MARCH, headers=bearer(expired)), 401, "UNAUTHORIZED")
    sound = development_token(new_id(), developer_id=str(OWNER))
    forged = sound[:-2] + ("AA" if not sound.endswith("AA") else "BB")
    refused(Client().get(path, MARCH, headers=bearer(forged)), 401, "UNAUTHORIZED")


@BOTH
def test_scope_is_checked_before_the_period(path: str) -> None:
    refused(get(path, None), 403, "DEV_STATS_FORBIDDEN")


def test_only_sessions_that_met_the_developers_objects_are_read_ac_scope(
    writer: FactWriter,
) -> None:
    """A session of both developers counts for each; one that met neither for nobody."""
    both, own, foreign, nobodys = (session_fact(100 * n) for n in range(1, 5))
    store(
        writer,
        *(both, own, foreign, nobodys),
        view_fact(both),
        view_fact(both, developer_id=OTHER),
        view_fact(own),
        view_fact(foreign, developer_id=OTHER),
        view_fact(nobodys, developer_id=UNKNOWN_DEVELOPER),
    )
    assert read(SESSIONS)["Total"] == {
        "Sessions": 2,
        "AvgDurationSeconds": 150.0,
        "MedianDurationSeconds": 150.0,
        "P95DurationSeconds": 195.0,
    }
    assert read(SESSIONS, OTHER)["Total"]["AvgDurationSeconds"] == 200.0
    assert len(read(OBJECTS)["Items"]) == len(read(OBJECTS, OTHER)["Items"]) == 2
    assert read(SESSIONS, UUID(int=0xD3))["Total"]["Sessions"] == 0


@BOTH
def test_values_are_parameters_so_that_the_statement_is_the_same_for_everybody(
    path: str, clickhouse: ClickHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = reader(settings.CLICKHOUSE_URL)
    asked = Mock(wraps=client.query)
    monkeypatch.setattr(client, "query", asked)
    read(path)
    read(path, OTHER, From="2026-01-01T00:00:00.5+03:00", To="2026-01-02", DeveloperId=str(OTHER))
    first, second = asked.call_args_list
    assert first.args == second.args
    assert first.kwargs["parameters"] != second.kwargs["parameters"]


def test_reads_cannot_write(clickhouse: ClickHouse) -> None:
    reader = connect_reader()
    assert reader.query("SELECT getSetting('readonly')").result_rows == [(1,)]
    reader.close()


# -- periods -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("query", "faulty"),
    [
        ({}, "From To"),
        ({"From": "2026-03-01"}, "To"),
        ({"From": "2026-03-01", "To": "2026-03-01"}, "From"),
        ({"From": "2026-03-02", "To": "2026-03-01"}, "From"),
        ({"From": "2026-03-01T00:00:00", "To": "2026-03-02"}, "From"),
        ({"From": "2026-03-01", "To": "tomorrow"}, "To"),
        ({"From": "2026-03-01", "To": "2027-03-03"}, "To"),
        ({"From": "2026-03-01' OR 1=1 --", "To": "2026-04-01"}, "From"),
        ({"From": "2026-03-01\x00", "To": "2026-04-01"}, "From"),
    ],
)
def test_period_that_is_none_is_named(path: str, query: dict[str, str], faulty: str) -> None:
    assert_invalid(get(path, **query), *faulty.split())


@BOTH
@pytest.mark.parametrize(
    ("since", "until"),
    [
        ("2026-03-01", "2027-03-02"),  # 366 days
        ("0001-01-01", "0001-02-01"),
        ("1969-12-31", "1970-01-02"),
        ("9999-01-01", "9999-12-31"),
        ("2026-03-01T03:00:00.000001+03:00", "2026-03-01T00:00:00.000002Z"),
    ],
)
def test_any_sound_period_is_answered(
    path: str, since: str, until: str, clickhouse: ClickHouse
) -> None:
    body = read(path, From=since, To=until)
    assert body["FreshAsOf"] is None
    assert body["From"] < body["To"]


def test_nothing_is_returned_as_nothing(clickhouse: ClickHouse) -> None:
    nothing = {
        "Sessions": 0,
        "AvgDurationSeconds": None,
        "MedianDurationSeconds": None,
        "P95DurationSeconds": None,
    }
    bounds = {"From": "2026-03-01T00:00:00.000000Z", "To": "2026-04-01T00:00:00.000000Z"}
    assert read(SESSIONS) == {
        **bounds,
        "FreshAsOf": None,
        "Total": nothing,
        "ByViewerKind": [],
        "ByDay": [],
    }
    assert read(OBJECTS) == {**bounds, "FreshAsOf": None, "Items": []}


def test_bounds_are_half_open_to_the_microsecond_c23(writer: FactWriter) -> None:
    since = datetime(2026, 3, 29, tzinfo=UTC)  # clocks go forward in Europe: no matter here
    until, microsecond = since + timedelta(days=1), timedelta(microseconds=1)
    for moment in (since - microsecond, since, until - microsecond, until):
        session = session_fact(start=moment)
        store(writer, session, view_fact(session))
    query = {"From": iso_utc(since), "To": iso_utc(until)}
    assert read(SESSIONS, **query)["Total"]["Sessions"] == 2
    assert sum(item["Views"] for item in read(OBJECTS, **query)["Items"]) == 2


def test_session_over_midnight_belongs_to_the_day_of_its_first_view_c23(
    writer: FactWriter,
) -> None:
    """From 23:58 to 00:05: one session of 420 s, whole, on whichever day a view began."""
    start = datetime(2026, 3, 1, 23, 58, tzinfo=UTC)
    session = session_fact(420, start)
    store(writer, session, view_fact(session), view_fact(session, event_time=start + 3 * MINUTE))
    (day,) = read(SESSIONS)["ByDay"]
    assert (day["Day"], day["Sessions"], day["AvgDurationSeconds"]) == ("2026-03-01", 1, 420.0)
    # Of the second day only the second view is seen; the session's Duration is whole all the same.
    (day,) = read(SESSIONS, From="2026-03-02", To="2026-03-03")["ByDay"]
    assert (day["Day"], day["Sessions"], day["AvgDurationSeconds"]) == ("2026-03-02", 1, 420.0)


def test_session_that_began_before_the_period_counts_where_its_view_is(
    writer: FactWriter,
) -> None:
    """A month of beats (C22), viewed on its last day."""
    month = timedelta(days=30)
    session = session_fact(int(month.total_seconds()), NOON)
    store(writer, session, view_fact(session, event_time=NOON + month - MINUTE))
    assert read(SESSIONS, From="2026-03-31", To="2026-04-01")["Total"] == {
        "Sessions": 1,
        "AvgDurationSeconds": 2_592_000.0,
        "MedianDurationSeconds": 2_592_000.0,
        "P95DurationSeconds": 2_592_000.0,
    }


# -- errors --------------------------------------------------------------------------------


@BOTH
def test_clickhouse_away_is_503_with_retry_after(path: str, settings: Any) -> None:
    settings.CLICKHOUSE_URL = "http://default:@127.0.0.1:1/"
    response = get(path, **MARCH)
    refused(response, 503, "DEV_STATS_STORAGE_UNAVAILABLE")
    assert int(response.headers["Retry-After"]) > 0


def answer(
    body: bytes, *, status: str = "200 OK", declared: int | None = None, encoding: str = ""
) -> bytes:
    """Make an answer over HTTP; `declared` is the length that it claims to have."""
    length = len(body) if declared is None else declared
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/octet-stream\r\n"
        f"{encoding}Content-Length: {length}\r\n\r\n"
    ).encode() + body


BLOCK = b"\x01\x01\x01a\x06String\x02\xff\xfe"
"""A column `a` of one row, whose text is no text; in the format Native."""


@pytest.mark.parametrize(
    "spoilt",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        answer(b""),
        answer(BLOCK, declared=5000),
        *(answer(BLOCK[:length]) for length in range(1, len(BLOCK))),
        answer(BLOCK, encoding="Content-Encoding: gzip\r\n"),
        answer(b"<!DOCTYPE html><html><body>Welcome</body></html>"),
        answer(b"\xff" * 40),
        answer(b"", status="204 No Content"),
        answer(b"", status="401 Unauthorized"),
        answer(b"", status="404 Not Found"),
        answer(b"\xff", status="500 Internal Server Error"),
        answer(b"", status="503 Service Unavailable"),
    ],
)
def test_answer_that_is_half_or_not_clickhouses_is_503(
    spoilt: bytes, clickhouse: ClickHouse
) -> None:
    with lossy_clickhouse() as proxy:
        assert get(SESSIONS, **MARCH).status_code == 200
        proxy.spoil = lambda _: [spoilt]
        refused(get(SESSIONS, **MARCH), 503, "DEV_STATS_STORAGE_UNAVAILABLE")
        proxy.spoil = None
        assert get(SESSIONS, **MARCH).status_code == 200


@BOTH
def test_table_that_is_gone_is_503_and_then_read_again(path: str, clickhouse: ClickHouse) -> None:
    table = "pin_dev_stats.property_object_view_facts"
    clickhouse.command(f"RENAME TABLE {table} TO {table}_away")
    try:
        refused(get(path, **MARCH), 503, "DEV_STATS_STORAGE_UNAVAILABLE")
    finally:
        clickhouse.command(f"RENAME TABLE {table}_away TO {table}")
    assert read(path)
