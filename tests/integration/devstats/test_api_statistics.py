"""What the API counts: every fact once, and as PostgreSQL's own rows have it."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from clickhouse_connect.driver.client import Client as ClickHouse
from django.conf import settings
from django.db import connection

from devstats.enrichment import Enrichment
from devstats.facts import (
    UNKNOWN_DEVELOPER,
    SessionFact,
    ViewFact,
    decode_session,
    decode_view,
)
from devstats.ownership import PropertyObject
from devstats.selectors import reader
from devstats.tables import PROPERTY_OBJECTS
from devstats.writer import FactWriter
from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.testing import record
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, SESSION_ENDED
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from tests.dev_stats import merge, stop_merges
from tests.dev_stats_api import BOTH, OBJECTS, SESSIONS, read
from tests.factories import make_session, make_view
from tests.facts import NOON, OTHER, OWNER, session_fact, store, view_fact
from views.models import PropertyObjectView

pytestmark = pytest.mark.usefixtures("development_secret")

MINUTE = timedelta(minutes=1)


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


# -- statistics -------------------------------------------------------------------------------


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
    """Store what the outbox has, as the consumers do."""
    facts: list[SessionFact | ViewFact] = []
    for message in OutboxMessage.objects.filter(
        topic__in=(SESSION_ENDED, PROPERTY_OBJECT_VIEW_ENDED)
    ):
        event = record(
            message.topic,
            message.payload.encode(),
            offset=message.id,
            message_id=message.message_id,
            created_at=message.created_at,
        )
        if message.topic == SESSION_ENDED:
            facts.append(decode_session(event))
        else:
            view = decode_view(event)
            facts.append(view._replace(developer_id=owners[view.property_object_id]))
    store(writer, *facts)


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def session_statistics(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "Sessions": len(seconds),
        "AvgDurationSeconds": pytest.approx(sum(seconds) / len(seconds), abs=0.0501),
        "MedianDurationSeconds": pytest.approx(percentile(seconds, 0.5), abs=0.006),
        "P95DurationSeconds": pytest.approx(percentile(seconds, 0.95), abs=0.006),
    }


def view_statistics(views: Sequence[PropertyObjectView]) -> dict[str, Any]:
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
def test_twenty_random_developers_read_what_postgresqls_rows_hold(writer: FactWriter) -> None:
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
        assert sessions["Total"] == session_statistics(list(seconds.values()))
        assert sessions["ByViewerKind"] == [
            {"ViewerKind": kind, **session_statistics([seconds[session] for session in group])}
            for kind, group in sorted(
                grouped(list(firsts), lambda each: "User" if each.user_id else "Guest").items()
            )
        ]
        assert sessions["ByDay"] == [
            {"Day": day.isoformat(), **session_statistics([seconds[session] for session in group])}
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
                **view_statistics(own),
                "ByViewerKind": [
                    {"ViewerKind": kind, **view_statistics(group)}
                    for kind, group in sorted(kinds.items())
                ],
            }
        assert not of_object
    assert met > 10  # else nothing was shown


def _day_of_first(firsts: Mapping[Session, datetime], session: Session) -> date:
    return firsts[session].astimezone(UTC).date()
