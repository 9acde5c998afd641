"""What developers may read (design, section 11): scope first, then figures that count once."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest
from clickhouse_connect.driver.client import Client as ClickHouse
from django.conf import settings
from django.db import connection
from django.test import Client

from devstats.clickhouse import connect_reader
from devstats.enrichment import Enrichment
from devstats.facts import (
    TENANT,
    UNKNOWN_DEVELOPER,
    SessionFact,
    ViewFact,
    decode_session,
    decode_view,
    make_session_fact,
)
from devstats.ownership import PropertyObject
from devstats.selectors import reader
from devstats.tables import PROPERTY_OBJECTS, SESSION_FACTS, VIEW_FACTS
from devstats.writer import FactWriter
from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.record import Record
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, SESSION_ENDED
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from tests.dev_stats import lossy_clickhouse, merge, stop_merges
from tests.factories import make_session, make_view
from tests.integration.pinactivity.http.test_api import assert_invalid, problem
from tests.tokens import SECRET, bearer, development_token
from views.models import PropertyObjectView

SESSIONS = "/api/dev-stats/sessions/summary"
OBJECTS = "/api/dev-stats/property-objects/summary"
BOTH = pytest.mark.parametrize("path", [SESSIONS, OBJECTS])

OWNER, OTHER = UUID(int=0xD1), UUID(int=0xD2)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MARCH = {"From": "2026-03-01", "To": "2026-04-01"}


@pytest.fixture(autouse=True)
def _development_secret(settings: Any) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET


def get(path: str, developer: object = OWNER, **query: Any) -> Any:
    claim = developer if developer is None or isinstance(developer, list) else str(developer)
    token = development_token(new_id(), developer_id=claim)
    return Client().get(path, query, headers=bearer(token))


def read(path: str, developer: object = OWNER, **query: Any) -> dict[str, Any]:
    response = get(path, developer, **(query or MARCH))
    assert response.status_code == 200, response.content
    body: dict[str, Any] = response.json()
    return body


def session_fact(seconds: int = 300, start: datetime = NOON, **fields: Any) -> SessionFact:
    return make_session_fact(
        **{
            "fact_id": str(new_id()),
            "session_id": new_id(),
            "anonymous_id": new_id(),
            "user_id": None,
            "created_at": start,
            "last_activity_at": start + timedelta(seconds=seconds),
            "duration_seconds": seconds,
            **fields,
        }
    )


def view_fact(session: SessionFact, **fields: Any) -> ViewFact:
    """A view of 60 s of an object of OWNER, opened as the session began."""
    sound: dict[str, Any] = {
        "fact_id": str(new_id()),
        "property_object_view_id": new_id(),
        "property_object_id": new_id(),
        "session_id": session.session_id,
        "anonymous_id": session.anonymous_id,
        "user_id": session.user_id,
        "view_source": "Map",
        "event_time": session.started_at,
        "duration_seconds": 60,
        "filter_snapshot": "",
        "tenant_id": TENANT,
        "brand_id": None,
        "developer_id": OWNER,
        "viewer_kind": "Guest" if session.user_id is None else "Investor",
        **fields,
    }
    ended = sound["event_time"] + timedelta(seconds=sound["duration_seconds"])
    return ViewFact(**{"last_activity_at": ended, **sound})


def store(writer: FactWriter, *facts: SessionFact | ViewFact) -> None:
    for table, kind in ((SESSION_FACTS, SessionFact), (VIEW_FACTS, ViewFact)):
        if rows := {str(place): fact for place, fact in enumerate(facts) if isinstance(fact, kind)}:
            writer.append(table, rows)


def refused(response: Any, status: int, code: str) -> None:
    body = problem(response)
    assert (response.status_code, body["code"]) == (status, code)


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


def test_nothing_is_told_as_nothing(clickhouse: ClickHouse) -> None:
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


# -- every fact counts once ----------------------------------------------------------------


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "merges stopped"])
def test_each_fact_in_two_inserts_counts_once_c56(
    writer: FactWriter, clickhouse: ClickHouse, merges: bool
) -> None:
    facts: list[SessionFact | ViewFact] = []
    for number in range(20):
        session = session_fact(60 * (number + 1), NOON + number * timedelta(hours=5))
        facts += [session, view_fact(session), view_fact(session, property_object_id=OTHER)]
    if not merges:
        stop_merges(clickhouse)
    store(writer, *facts)
    once = read(SESSIONS), read(OBJECTS)
    assert once[0]["Total"]["Sessions"] == 20
    assert once[1]["Items"][0]["Views"] == 20

    other = FactWriter()  # as a topic read anew
    store(other, *facts)
    other.close()
    if merges:
        merge(clickhouse)

    twice = read(SESSIONS), read(OBJECTS)
    for before, after in zip(once, twice, strict=True):
        assert before.pop("FreshAsOf") < after.pop("FreshAsOf")
        assert before == after


def test_backfilled_session_is_the_consumed_one(writer: FactWriter) -> None:
    session = session_fact()
    store(writer, session, view_fact(session))
    store(writer, session._replace(fact_id=f"backfill:{session.session_id}"))
    assert read(SESSIONS)["Total"]["Sessions"] == 1


def test_view_counts_once_its_owner_is_known(writer: FactWriter) -> None:
    session = session_fact()
    view = view_fact(session, developer_id=UNKNOWN_DEVELOPER)
    store(writer, session, view)
    assert read(SESSIONS)["Total"]["Sessions"] == 0
    known = PropertyObject(view.property_object_id, OWNER, None, NOON)
    writer.append(PROPERTY_OBJECTS, {"0": known})
    assert Enrichment(writer).run() == 1
    assert read(SESSIONS)["Total"]["Sessions"] == 1
    (item,) = read(OBJECTS)["Items"]
    assert (item["PropertyObjectId"], item["Views"]) == (str(view.property_object_id), 1)


@BOTH
def test_months_before_the_period_are_not_read(
    path: str, writer: FactWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = reader(settings.CLICKHOUSE_URL)
    rows_read: list[int] = []
    query = client.query

    def noting(*arguments: Any, **options: Any) -> Any:
        result = query(*arguments, **options)
        rows_read.append(int(result.summary["read_rows"]))
        return result

    monkeypatch.setattr(client, "query", noting)
    for months_ago in range(6):
        start = NOON - months_ago * timedelta(days=31)
        # Ids without any order, so that those of all months lie among each other.
        sessions = [session_fact(start=start, session_id=uuid4()) for _ in range(9)]
        store(writer, *sessions, *map(view_fact, sessions))
        read(path)
    assert rows_read[0] > 0
    assert set(rows_read) == {rows_read[0]}


# -- figures -------------------------------------------------------------------------------


@pytest.mark.django_db
def test_percentiles_are_those_of_percentile_cont(writer: FactWriter) -> None:
    seconds = [0, 1, 7, 60, 61, 3_599, 86_400, 2_592_000]
    for each in seconds:
        session = session_fact(each)
        store(writer, session, view_fact(session))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT round(avg(s), 1), percentile_cont(0.5) WITHIN GROUP (ORDER BY s),"
            " percentile_cont(0.95) WITHIN GROUP (ORDER BY s) FROM unnest(%s::int[]) AS s",
            [seconds],
        )
        average, median, late = cursor.fetchone()
    assert read(SESSIONS)["Total"] == {
        "Sessions": len(seconds),
        "AvgDurationSeconds": float(average),
        "MedianDurationSeconds": median,
        "P95DurationSeconds": pytest.approx(late, abs=0.005),
    }


def test_fresh_as_of_is_when_the_newest_was_stored(
    writer: FactWriter, clickhouse: ClickHouse
) -> None:
    session = session_fact()
    store(writer, session, view_fact(session))
    ((stored,),) = clickhouse.query(
        "SELECT max(IngestionTime) FROM pin_dev_stats.property_object_view_facts"
    ).result_rows
    assert read(SESSIONS)["FreshAsOf"] == read(OBJECTS)["FreshAsOf"] == iso_utc(stored)


def test_a_hundred_objects_at_most_the_most_viewed_first(writer: FactWriter) -> None:
    session = session_fact()
    objects = [new_id() for _ in range(101)]
    views = [view_fact(session, property_object_id=each) for each in objects]
    views += [view_fact(session, property_object_id=objects[7]) for _ in range(3)]
    store(writer, session, *views)
    items = read(OBJECTS)["Items"]
    assert len(items) == 100
    assert (items[0]["PropertyObjectId"], items[0]["Views"]) == (str(objects[7]), 4)
    assert items[0]["UniqueViewers"] == 1


# -- against PostgreSQL's own rows ---------------------------------------------------------


def close_everything() -> None:
    ActivityCloser(ActivityCloserOptions()).run()
    assert not Session.objects.active().exists()


def store_events(writer: FactWriter, owners: Mapping[UUID, UUID]) -> None:
    """Store what the outbox says, as the consumers do."""
    facts: list[SessionFact | ViewFact] = []
    for message in OutboxMessage.objects.filter(
        topic__in=(SESSION_ENDED, PROPERTY_OBJECT_VIEW_ENDED)
    ):
        record = Record(
            topic=message.topic,
            partition=0,
            offset=message.id,
            key=None,
            value=message.payload.encode(),
            message_id=message.message_id,
            created_at=message.created_at,
        )
        if message.topic == SESSION_ENDED:
            facts.append(decode_session(record))
        else:
            view = decode_view(record)
            facts.append(view._replace(developer_id=owners[view.property_object_id]))
    store(writer, *facts)


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def session_figures(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "Sessions": len(seconds),
        "AvgDurationSeconds": pytest.approx(sum(seconds) / len(seconds), abs=0.0501),
        "MedianDurationSeconds": pytest.approx(percentile(seconds, 0.5), abs=0.006),
        "P95DurationSeconds": pytest.approx(percentile(seconds, 0.95), abs=0.006),
    }


def view_figures(views: Sequence[PropertyObjectView]) -> dict[str, Any]:
    seconds = [whole_seconds(view) for view in views]
    return {
        "Views": len(views),
        "UniqueViewers": len({view.session.user_id or view.session.anonymous_id for view in views}),
        "TotalDurationSeconds": sum(seconds),
        "AvgDurationSeconds": pytest.approx(sum(seconds) / len(seconds), abs=0.0501),
    }


def whole_seconds(row: Session | PropertyObjectView) -> int:
    return int((row.last_activity_at - row.created_at).total_seconds())


def grouped(rows: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


@pytest.mark.django_db
def test_twenty_random_developers_read_what_postgresqls_rows_say(writer: FactWriter) -> None:
    chance = random.Random(20_26)
    developers = [new_id() for _ in range(20)]
    owners = {new_id(): chance.choice(developers) for _ in range(60)}
    users = [new_id() for _ in range(8)]
    for _ in range(60):
        silent = timedelta(minutes=chance.uniform(13, 60 * 24 * 6))
        session = make_session(
            silent=silent,
            lasted=timedelta(seconds=chance.uniform(0, 9_000)),
            user_id=chance.choice([None, None, *users]),
        )
        for property_object_id in chance.sample(list(owners), chance.randrange(7)):
            make_view(
                session=session,
                property_object_id=property_object_id,
                lasted=timedelta(seconds=chance.uniform(0, 3_000)),
            )
    close_everything()
    store_events(writer, owners)
    last = Session.objects.latest("created_at").created_at
    since, until = last - timedelta(days=5), last - timedelta(hours=9)
    query = {"From": iso_utc(since), "To": iso_utc(until)}

    met = 0
    for developer in developers:
        views = [
            view
            for view in PropertyObjectView.objects.select_related("session")
            if owners[view.property_object_id] == developer and since <= view.created_at < until
        ]
        firsts = {
            view.session: min(each.created_at for each in views if each.session == view.session)
            for view in views
        }
        sessions = read(SESSIONS, developer, **query)
        objects = read(OBJECTS, developer, **query)
        assert bool(views) == bool(sessions["FreshAsOf"]) == bool(objects["FreshAsOf"])
        if not views:
            assert (sessions["ByDay"], objects["Items"]) == ([], [])
            continue
        met += 1
        seconds = {session: whole_seconds(session) for session in firsts}
        assert sessions["Total"] == session_figures(list(seconds.values()))
        assert sessions["ByViewerKind"] == [
            {"ViewerKind": kind, **session_figures([seconds[session] for session in group])}
            for kind, group in sorted(
                grouped(list(firsts), lambda each: "User" if each.user_id else "Guest").items()
            )
        ]
        assert sessions["ByDay"] == [
            {"Day": day.isoformat(), **session_figures([seconds[session] for session in group])}
            for day, group in sorted(grouped(list(firsts), partial(_day_of_first, firsts)).items())
        ]
        counts = Counter(view.property_object_id for view in views)
        assert [item["Views"] for item in objects["Items"]] == sorted(counts.values(), reverse=True)
        of_object = grouped(views, lambda view: view.property_object_id)
        for item in objects["Items"]:
            own = of_object.pop(UUID(item["PropertyObjectId"]))
            kinds = grouped(own, lambda view: "Investor" if view.session.user_id else "Guest")
            assert item == {
                "PropertyObjectId": item["PropertyObjectId"],
                **view_figures(own),
                "ByViewerKind": [
                    {"ViewerKind": kind, **view_figures(group)}
                    for kind, group in sorted(kinds.items())
                ],
            }
        assert not of_object
    assert met > 10  # else nothing was shown


def _day_of_first(firsts: Mapping[Session, datetime], session: Session) -> date:
    return firsts[session].astimezone(UTC).date()


# -- faults --------------------------------------------------------------------------------


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
