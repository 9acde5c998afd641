"""Views belong to the owner of their object when they were opened, whenever that is reported."""

from contextlib import closing
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client

from devstats.clickhouse import DATABASE
from devstats.enrichment import Enrichment
from devstats.facts import UNKNOWN_DEVELOPER
from devstats.ownership import PropertyObject
from devstats.property_objects import find_versions, store_objects
from devstats.selectors import summarise_objects, summarise_sessions
from devstats.tables import PROPERTY_OBJECTS
from devstats.writer import FactWriter
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.http.periods import Period
from tests.dev_stats import (
    CREATED_AT,
    Ingest,
    changed_object,
    count_rows,
    ended_session,
    ended_view,
    lossy_clickhouse,
    merge,
    rows_of,
    stop_merges,
)


def owners(client: Client) -> dict[str, UUID]:
    """The owners of views, as far as reads would count them."""
    return {
        str(row["PropertyObjectViewId"]): row["DeveloperId"]
        for row in rows_of(client, "property_object_view_facts")
        if row["DeveloperId"] != UNKNOWN_DEVELOPER
    }


def test_ended_view_is_stored_with_its_objects_owner(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object(BrandId=str(new_id()))
    objects.send(flat, headers={"CreatedAt": iso_utc(CREATED_AT - timedelta(days=1))})
    objects.run()
    message_id = str(new_id())
    known = ended_view(PropertyObjectId=flat["PropertyObjectId"], FilterSnapshot={"Rooms": [1]})
    views.send(known, headers={"MessageId": message_id})
    unknown = ended_view()
    views.send(unknown)

    views.run()

    rows = {
        str(row["PropertyObjectViewId"]): row
        for row in rows_of(clickhouse, "property_object_view_facts")
    }
    assert rows[unknown["PropertyObjectViewId"]]["DeveloperId"] == UNKNOWN_DEVELOPER
    row = rows[known["PropertyObjectViewId"]]
    assert isinstance(row.pop("IngestionTime"), datetime)
    assert row == {
        "FactId": message_id,
        "PropertyObjectViewId": UUID(known["PropertyObjectViewId"]),
        "PropertyObjectId": UUID(known["PropertyObjectId"]),
        "SessionId": UUID(known["SessionId"]),
        "AnonymousId": UUID(known["AnonymousId"]),
        "UserId": None,
        "ViewSource": "Map",
        "EventTime": CREATED_AT,
        "LastActivityAt": CREATED_AT + timedelta(minutes=1),
        "DurationSeconds": 60,
        "FilterSnapshot": '{"Rooms":[1]}',
        "TenantId": "00000000-0000-0000-0000-000000000000",
        "BrandId": UUID(flat["BrandId"]),
        "DeveloperId": UUID(flat["DeveloperId"]),
        "ViewerKind": "Guest",
    }


def test_object_that_changes_hands_keeps_its_old_facts_also_when_the_topic_is_read_anew(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    buyer = str(new_id())
    for developer, moment in (
        (flat["DeveloperId"], CREATED_AT - timedelta(days=1)),
        (buyer, CREATED_AT + timedelta(hours=1)),
    ):
        objects.send(
            {**flat, "DeveloperId": developer}, headers={"CreatedAt": iso_utc(moment)}, key=b"k"
        )
    objects.run()
    moments = (CREATED_AT, CREATED_AT + timedelta(hours=2))
    seen = [
        ended_view(
            PropertyObjectId=flat["PropertyObjectId"],
            ViewedAt=iso_utc(moment),
            LastActivityAt=iso_utc(moment),
        )
        for moment in moments
    ]
    views.send(*seen)
    views.run()
    expected = {
        seen[0]["PropertyObjectViewId"]: UUID(flat["DeveloperId"]),
        seen[1]["PropertyObjectViewId"]: UUID(buyer),
    }
    assert owners(clickhouse) == expected

    views.run(group=f"{views.group}-again")

    assert owners(clickhouse) == expected
    clickhouse.command(f"OPTIMIZE TABLE {DATABASE}.property_object_view_facts FINAL")
    assert count_rows(clickhouse, "property_object_view_facts") == 2


def test_views_stored_before_their_objects_owner_was_known_get_them_once(
    views: Ingest, objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    early = [
        ended_view(
            PropertyObjectId=flat["PropertyObjectId"],
            ViewedAt=iso_utc(CREATED_AT + month * timedelta(days=31)),
            LastActivityAt=iso_utc(CREATED_AT + month * timedelta(days=31, minutes=1)),
        )
        for month in range(3)
    ]
    views.send(*early, ended_view())
    views.run()
    assert owners(clickhouse) == {}
    objects.send(flat)
    objects.run()
    writer = FactWriter()
    enrichment = Enrichment(writer)
    done: list[int] = []

    assert enrichment.count() == 3
    assert enrichment.run(advance=done.append) == 3

    assert sum(done) == 3
    assert owners(clickhouse) == {
        view["PropertyObjectViewId"]: UUID(flat["DeveloperId"]) for view in early
    }
    assert (enrichment.count(), enrichment.run()) == (0, 0)
    facts = rows_of(clickhouse, "property_object_view_facts")
    assert len(facts) == 7
    assert len({row["FactId"] for row in facts}) == 4
    writer.close()


def test_enrichment_reads_twice_as_much_for_twice_as_many_views(
    clickhouse: Client, writer: FactWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not four times as much, as when what there is to do is worked out for each thousand."""
    flat = new_id()
    writer.append(PROPERTY_OBJECTS, {"0": PropertyObject(flat, new_id(), None, CREATED_AT)})
    read = []
    query = writer.client.query

    def noting(*arguments: Any, **options: Any) -> Any:
        result = query(*arguments, **options)
        read.append(int(result.summary["read_rows"]))
        return result

    monkeypatch.setattr(writer.client, "query", noting)
    streamed = Mock(wraps=writer.client.query_row_block_stream)
    monkeypatch.setattr(writer.client, "query_row_block_stream", streamed)
    sums = []
    for count in (12_000, 24_000):
        clickhouse.command("TRUNCATE TABLE property_object_view_facts")
        clickhouse.command(
            "INSERT INTO property_object_view_facts (FactId, PropertyObjectViewId,"
            " PropertyObjectId, EventTime, LastActivityAt, ViewerKind)"
            " SELECT toString(number), generateUUIDv4(number), {flat:UUID},"
            " toDateTime64('2026-03-01', 6, 'UTC') AS At, At, 'Guest' FROM numbers({count:UInt64})",
            parameters={"flat": flat, "count": count},
        )
        read.clear()
        assert Enrichment(writer).run() == count
        sums.append(sum(read))
    assert sums[1] < 3 * sums[0]
    assert streamed.call_count == 2  # once a month of views; no summary counts what it reads


def test_interrupted_enrichment_goes_on_where_it_was(
    views: Ingest, objects: Ingest, clickhouse: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = changed_object()
    views.send(*(ended_view(PropertyObjectId=flat["PropertyObjectId"]) for _ in range(7)))
    views.run()
    views.run(group=f"{views.group}-again")
    objects.send(flat)
    objects.run()
    monkeypatch.setattr("devstats.enrichment.MOST_IDS", 2)
    writer = FactWriter()

    def interrupt(added: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Enrichment(writer).run(advance=interrupt)
    assert len(owners(clickhouse)) == 2

    assert Enrichment(writer).count() == 5
    assert Enrichment(writer).run() == 5
    assert len(owners(clickhouse)) == 7
    writer.close()


def counted(developer: str) -> tuple[int, int]:
    """Return how many sessions and views a developer reads."""
    period = Period(CREATED_AT - timedelta(days=1), CREATED_AT + timedelta(days=1))
    total = summarise_objects(UUID(developer), period).total
    return (
        summarise_sessions(UUID(developer), period).total.sessions,
        total.views if total else 0,
    )


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "merges stopped"])
def test_owner_reported_late_alone_gets_the_view_when_its_topic_is_read_anew(
    sessions: Ingest, views: Ingest, objects: Ingest, clickhouse: Client, merges: bool
) -> None:
    if not merges:
        stop_merges(clickhouse)
    flat, house = changed_object(), changed_object()
    seller, buyer = flat["DeveloperId"], str(new_id())
    house["DeveloperId"] = seller

    def report(payload: dict[str, Any], developer: str, moment: datetime) -> None:
        objects.send(
            {**payload, "DeveloperId": developer}, headers={"CreatedAt": iso_utc(moment)}, key=b"k"
        )
        objects.run()

    def read_anew(number: int) -> None:
        views.run(group=f"{views.group}-{number}")
        if merges:
            merge(clickhouse)

    report(flat, seller, CREATED_AT - timedelta(days=9))
    report(house, seller, CREATED_AT - timedelta(days=9))
    for seen in (flat, house):
        view = ended_view(PropertyObjectId=seen["PropertyObjectId"])
        views.send(view)
        sessions.send(ended_session(SessionId=view["SessionId"]))
    sessions.run()
    views.run()
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))

    report(flat, buyer, CREATED_AT - timedelta(days=5))
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))  # the view is filed already
    read_anew(1)
    assert (counted(seller), counted(buyer)) == ((1, 1), (1, 1))

    report(flat, seller, CREATED_AT - timedelta(days=1))  # theirs again when it was viewed
    read_anew(2)
    assert (counted(seller), counted(buyer)) == ((2, 2), (0, 0))


def test_of_two_owners_from_the_same_moment_on_the_later_message_counts(
    objects: Ingest, clickhouse: Client
) -> None:
    flat = changed_object()
    reported = [str(new_id()) for _ in range(3)]
    moment = {"CreatedAt": iso_utc(CREATED_AT)}
    for developer in reported:
        objects.send({**flat, "DeveloperId": developer}, headers=moment, key=b"k")

    for number in range(2):  # the second time it is read anew
        objects.run(group=f"{objects.group}-{number}")
        object_id = UUID(flat["PropertyObjectId"])
        (version,) = find_versions(clickhouse, [object_id])[object_id]
        assert str(version.developer_id) == reported[-1]


def test_largest_batch_goes_to_clickhouse_whole_and_no_address_is_long(
    views: Ingest, clickhouse: Client, writer: FactWriter
) -> None:
    """Addresses end at 8 KiB in many a proxy, a parameter at 128 KiB in ClickHouse."""
    many = [PropertyObject(new_id(), new_id(), None, CREATED_AT) for _ in range(5000)]
    seen = [ended_view(PropertyObjectId=str(each.property_object_id)) for each in many[:1000]]
    views.send(*seen)
    with lossy_clickhouse() as proxy:
        with closing(FactWriter()) as proxied:
            assert store_objects(proxied, many) == len(many)
            assert find_versions(proxied.client, [each[0] for each in many]).keys() == {
                each[0] for each in many
            }
        views.run()
        views.close()
    assert set(owners(clickhouse).values()) == {each.developer_id for each in many[:1000]}
    assert max(len(head.partition(b"\r\n")[0]) for head in proxy.requests) < 8 * 1024
