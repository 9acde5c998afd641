"""The view statistics: counting, reading and the seen table (design, section 6)."""

import random
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import DataError
from django.test import Client
from prometheus_client import REGISTRY

from outbox.models import OutboxMessage
from pinactivity.core.ids import NIL, new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.testing import InMemoryBroker, message, record
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, dead_letter_topic
from pinactivity.postgres.clock import statement_time
from tests.closer import close_inactive
from tests.concurrency import run_together
from tests.consuming import FIVE_MINUTES, drive
from tests.factories import MINUTE, make_session, make_view, silent_session
from views.consumers import ViewStatsHandler
from views.models import (
    PropertyObjectView,
    PropertyObjectViewStats,
    PropertyObjectViewStatsSeen,
)
from views.options import ViewStatsOptions
from views.services import extend_view
from views.stats import EndedView, count_views, purge_seen, stats_of
from views.tasks import purge_seen_views

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
GROUP = "user-activity-property-object-view-stats"


def ended(**changes: Any) -> dict[str, Any]:
    return {
        "PropertyObjectViewId": str(new_id()),
        "PropertyObjectId": str(new_id()),
        "ViewedAt": "2026-03-01T12:00:00.123456Z",
        "DurationSeconds": 30,
        **changes,
    }


def view_of(object_id: UUID, **changes: Any) -> EndedView:
    now = statement_time()
    return EndedView(
        **{
            "view_id": new_id(),
            "property_object_id": object_id,
            "viewed_at": now,
            "duration_seconds": 10,
            "recorded_at": now,
            **changes,
        }
    )


def handle(*records: Record) -> None:
    """Pass messages to the handler as one batch."""
    handler = ViewStatsHandler()
    handler.flush([Entry(each, handler.decode(each)) for each in records], lambda: None)


def published() -> list[Record]:
    """Return the outbox's events of ended views as the consumer would receive them."""
    rows = OutboxMessage.objects.filter(topic=PROPERTY_OBJECT_VIEW_ENDED).order_by("id")
    return [
        record(
            row.topic, row.payload.encode(), message_id=row.message_id, created_at=row.created_at
        )
        for row in rows
    ]


def totals(object_id: UUID) -> tuple[int, int, datetime | None]:
    stats = stats_of(object_id)
    return stats.views_count, stats.total_duration_seconds, stats.last_viewed_at


def outcomes() -> dict[str, float]:
    return {
        outcome: REGISTRY.get_sample_value("activity_view_stats_events_total", {"outcome": outcome})
        or 0.0
        for outcome in ("Counted", "Repeated", "TooOld")
    }


# -- counting ------------------------------------------------------------------------------


def test_consumer_is_registered_under_its_group() -> None:
    spec = registered_consumers()["view-stats"]
    assert (spec.topics, spec.group) == ((PROPERTY_OBJECT_VIEW_ENDED,), GROUP)
    assert (spec.limits().rows, spec.limits().age, spec.one_by_one) == (
        1000,
        timedelta(seconds=5),
        False,
    )


def test_closed_views_add_up_by_object() -> None:
    object_id = new_id()
    views = [
        make_view(
            session=silent_session(minutes=20 + number),
            property_object_id=object_id,
            lasted=timedelta(seconds=90, microseconds=999_999),
        )
        for number in range(3)
    ]
    other = make_view(session=silent_session(minutes=20))
    close_inactive()

    handle(*published())

    # Each DurationSeconds is rounded down, then added.
    assert totals(object_id) == (3, 270, views[0].created_at)
    assert totals(other.property_object_id) == (1, 60, other.created_at)
    assert PropertyObjectViewStatsSeen.objects.count() == 4


def test_event_counts_once_however_often_it_comes_inv_lvs_003() -> None:
    make_view(session=silent_session(minutes=20))
    close_inactive()
    (event,) = published()
    before = outcomes()

    handle(event, event)
    handle(event)

    (stats,) = PropertyObjectViewStats.objects.all()
    assert (stats.views_count, stats.total_duration_seconds) == (1, 60)
    assert outcomes() == {
        "Counted": before["Counted"] + 1,
        "Repeated": before["Repeated"] + 2,
        "TooOld": before["TooOld"],
    }


def test_view_counts_once_under_two_message_ids() -> None:
    payload = ended()
    handle(record(PROPERTY_OBJECT_VIEW_ENDED, payload), record(PROPERTY_OBJECT_VIEW_ENDED, payload))
    assert totals(UUID(payload["PropertyObjectId"]))[:2] == (1, 30)


def test_names_count_in_any_case_and_ids_in_any_spelling() -> None:
    view_id, object_id = new_id(), new_id()
    payloads: list[dict[str, Any]] = [
        ended(PropertyObjectViewId=str(view_id), PropertyObjectId=str(object_id)),
        {
            "propertyobjectviewid": view_id.hex.upper(),
            "PROPERTYOBJECTID": f"{{{object_id}}}",
            "viewedAt": "2026-03-01T15:00:00.1234567+03:00",
            "durationSeconds": 30,
        },
    ]
    for payload in payloads:
        handle(record(PROPERTY_OBJECT_VIEW_ENDED, payload))
    assert totals(object_id)[:2] == (1, 30)


def test_last_viewed_at_never_moves_back() -> None:
    object_id, now = new_id(), statement_time()
    for days in (5, 2, 9):
        count_views([view_of(object_id, viewed_at=now - days * DAY)])
    assert totals(object_id) == (3, 30, now - 2 * DAY)


def test_batch_takes_three_statements_whatever_its_size(count_statements: Any) -> None:
    objects = [new_id() for _ in range(20)]
    views = [view_of(objects[number % 20]) for number in range(1000)]
    with count_statements() as statements:
        count_views(views)
    assert len([s for s in statements if s["sql"] not in {"BEGIN", "COMMIT"}]) == 3
    assert {totals(object_id)[0] for object_id in objects} == {50}


def test_failed_increment_leaves_no_view_seen() -> None:
    """Otherwise the retry would find the views seen, and never count them."""
    full = new_id()
    PropertyObjectViewStats.objects.create(
        property_object_id=full, views_count=1, total_duration_seconds=2**63 - 1
    )
    with pytest.raises(DataError):
        count_views([view_of(full), view_of(new_id())])
    assert not PropertyObjectViewStatsSeen.objects.exists()
    assert PropertyObjectViewStats.objects.get().views_count == 1


def test_event_older_than_80_days_is_skipped_and_counted_as_such() -> None:
    """The seen table may no longer contain its view, and a replay must not count it twice."""
    object_id, now = new_id(), statement_time()
    before = outcomes()
    count_views([view_of(object_id, recorded_at=now - 80 * DAY - MINUTE)])
    assert totals(object_id) == (0, 0, None)
    assert outcomes()["TooOld"] == before["TooOld"] + 1

    count_views([view_of(object_id, recorded_at=now - 80 * DAY + MINUTE)])
    assert totals(object_id)[0] == 1


def test_consumers_with_the_same_views_in_any_order_neither_deadlock_nor_count_twice() -> None:
    objects = [new_id() for _ in range(40)]
    views = [view_of(random.choice(objects)) for _ in range(600)]

    def consume() -> None:
        mine = random.sample(views, len(views))
        for start in range(0, len(mine), 150):
            count_views(mine[start : start + 150])

    run_together([consume] * 8)

    assert sum(totals(object_id)[0] for object_id in objects) == 600
    for object_id in objects:
        expected = sum(view.property_object_id == object_id for view in views)
        assert totals(object_id)[:2] == (expected, 10 * expected)


def test_rows_are_locked_in_the_order_of_their_keys() -> None:
    """The order prevents a deadlock of two consumers, whatever the order in their batches."""
    count_views(random.sample([view_of(new_id()) for _ in range(300)], 300))
    for model in (PropertyObjectViewStatsSeen, PropertyObjectViewStats):
        rows = model.objects.raw(f"SELECT * FROM {model._meta.db_table} ORDER BY ctid")
        assert [row.pk for row in rows] == sorted(row.pk for row in rows)


# -- poison --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PropertyObjectViewId": None}, "property-object-view-id-missing"),
        ({"PropertyObjectViewId": str(NIL)}, "property-object-view-id-invalid"),
        ({"PropertyObjectId": None}, "property-object-id-missing"),
        ({"PropertyObjectId": "42"}, "property-object-id-invalid"),
        ({"PropertyObjectId": str(NIL)}, "property-object-id-invalid"),
        ({"ViewedAt": None}, "viewed-at-missing"),
        ({"ViewedAt": "2026-03-01T12:00:00"}, "viewed-at-invalid"),
        ({"ViewedAt": "2999-01-01T00:00:00Z"}, "viewed-at-in-the-future"),
        ({"DurationSeconds": None}, "duration-seconds-missing"),
        ({"DurationSeconds": -1}, "duration-seconds-invalid"),
        ({"DurationSeconds": True}, "duration-seconds-invalid"),
        ({"DurationSeconds": "12"}, "duration-seconds-invalid"),
        ({"DurationSeconds": 12.0}, "duration-seconds-invalid"),
        ({"DurationSeconds": 2**31}, "duration-seconds-invalid"),
        ({"durationSeconds": 1}, "value-repeats-a-field"),
    ],
)
def test_broken_contract_is_poison_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Poison) as poison:
        handle(record(PROPERTY_OBJECT_VIEW_ENDED, ended(**changes)))
    assert poison.value.reason == reason
    assert not PropertyObjectViewStatsSeen.objects.exists()


@pytest.mark.parametrize("seconds", [0, 2**31 - 1])
def test_bounds_of_the_duration_count(seconds: int) -> None:
    payload = ended(DurationSeconds=seconds)
    handle(record(PROPERTY_OBJECT_VIEW_ENDED, payload))
    assert totals(UUID(payload["PropertyObjectId"]))[:2] == (1, seconds)


def test_poison_goes_to_the_dead_letters_and_its_neighbours_count() -> None:
    spec = registered_consumers()["view-stats"]
    broker = InMemoryBroker()
    letters = dead_letter_topic(PROPERTY_OBJECT_VIEW_ENDED, GROUP)
    for topic in (PROPERTY_OBJECT_VIEW_ENDED, letters):
        broker.create_topic(topic, partitions=1)
    good = [ended() for _ in range(20)]
    late = ended(ViewedAt="2999-01-01T00:00:00Z")  # found out only when the batch is written
    payloads: list[Any] = [*good[:10], b"\xff\xfe", late, ended(DurationSeconds=-1), *good[10:]]
    for payload in payloads:
        broker.publish([message(PROPERTY_OBJECT_VIEW_ENDED, payload)])
    consumer = Consumer(
        spec,
        open_source=lambda: broker.join(spec.topics, GROUP, max_poll_interval=FIVE_MINUTES),
        publisher=broker,
        options=ConsumerOptions(),
    )

    drive(consumer, lambda: broker.committed(GROUP).get((PROPERTY_OBJECT_VIEW_ENDED, 0)) == 23)

    consumer.close()
    assert [dict(letter.headers)["dlq-reason"] for letter in broker.read(letters)] == [
        b"value-not-json",
        b"viewed-at-in-the-future",
        b"duration-seconds-invalid",
    ]
    assert set(PropertyObjectViewStats.objects.values_list("property_object_id", flat=True)) == {
        UUID(payload["PropertyObjectId"]) for payload in good
    }


# -- with the life of a view ---------------------------------------------------------------


def test_heartbeat_of_the_next_day_changes_neither_the_closed_view_nor_the_totals_c6() -> None:
    session = silent_session(minutes=20)
    view = make_view(session=session)
    close_inactive()
    handle(*published())
    before = totals(view.property_object_id)

    tomorrow = statement_time() + DAY
    assert not extend_view(view_id=view.id, anonymous_id=session.anonymous_id, now=tomorrow)
    close_inactive(now=tomorrow + DAY)
    handle(*published())

    assert PropertyObjectView.objects.get().duration == MINUTE
    assert totals(view.property_object_id) == before == (1, 60, view.created_at)


def test_view_extended_for_20_minutes_counts_once_with_all_of_them_c7(now: datetime) -> None:
    session = make_session(last_activity_at=now)
    view = make_view(session=session, lasted=timedelta(0))
    for minute in range(1, 21):
        moment = now + minute * MINUTE
        close_inactive(now=moment)
        assert extend_view(view_id=view.id, anonymous_id=session.anonymous_id, now=moment)
    assert published() == []  # it is under way: nothing to count

    close_inactive(now=now + 33 * MINUTE)
    handle(*published())

    assert totals(view.property_object_id) == (1, 1200, now)


# -- the seen table ------------------------------------------------------------------------


def see(*ages: timedelta) -> list[UUID]:
    """Insert views that were counted some time ago."""
    now = statement_time()
    rows = [
        PropertyObjectViewStatsSeen(property_object_view_id=new_id(), seen_at=now - age)
        for age in ages
    ]
    PropertyObjectViewStatsSeen.objects.bulk_create(rows)
    return [row.pk for row in rows]


def seen() -> set[UUID]:
    return set(PropertyObjectViewStatsSeen.objects.values_list("pk", flat=True))


def test_views_counted_more_than_90_days_ago_are_forgotten() -> None:
    see(91 * DAY, 90 * DAY + MINUTE)
    kept = see(90 * DAY - MINUTE, DAY)
    assert purge_seen(ViewStatsOptions()) == 2
    assert seen() == set(kept)
    assert purge_seen(ViewStatsOptions()) == 0


def test_tick_keeps_views_for_as_long_as_the_option_says(settings: Any) -> None:
    settings.VIEW_STATS = ViewStatsOptions(seen_kept=100 * DAY)
    see(101 * DAY)
    kept = see(99 * DAY)
    purge_seen_views()
    assert seen() == set(kept)


def test_purge_goes_batch_by_batch_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("views.stats._PURGE_BATCH", 3)
    see(*[91 * DAY] * 10)
    assert purge_seen(ViewStatsOptions()) == 10
    assert seen() == set()


def test_purge_that_is_out_of_time_leaves_the_rest_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see(*[91 * DAY] * 10)
    with monkeypatch.context() as patch:
        patch.setattr("views.stats._PURGE_SECONDS", 0.0)
        assert purge_seen(ViewStatsOptions()) == 0
    assert purge_seen(ViewStatsOptions()) == 10


def test_parallel_purges_and_consumers_do_each_thing_once() -> None:
    see(*[91 * DAY] * 2000)
    views = [view_of(new_id()) for _ in range(300)]

    def purge() -> int:
        return purge_seen(ViewStatsOptions())

    def count() -> int:
        count_views(views)
        return 0

    assert sum(run_together([purge, count] * 3)) == 2000
    assert seen() == {view.view_id for view in views}
    assert PropertyObjectViewStats.objects.filter(views_count=1).count() == 300


# -- the endpoint --------------------------------------------------------------------------


def url(object_id: object) -> str:
    return f"/api/user-activity/property-objects/{object_id}/view-stats"


def test_object_without_views_has_zeros(api: Client) -> None:
    object_id = new_id()
    response = api.get(url(object_id))
    assert (response.status_code, response.json()) == (
        200,
        {
            "PropertyObjectId": str(object_id),
            "ViewsCount": 0,
            "TotalDurationSeconds": 0,
            "LastViewedAt": None,
        },
    )


def test_totals_are_answered_in_one_statement_to_anybody(
    api: Client, count_statements: Any
) -> None:
    object_id, now = new_id(), statement_time()
    count_views([view_of(object_id, duration_seconds=2**31 - 1, viewed_at=now)] * 2)
    count_views([view_of(object_id, duration_seconds=2**31 - 1, viewed_at=now - DAY)])

    with count_statements() as statements:
        response = api.get(url(str(object_id).upper()))

    assert response.json() == {
        "PropertyObjectId": str(object_id),
        "ViewsCount": 2,
        "TotalDurationSeconds": 2**32 - 2,
        "LastViewedAt": iso_utc(now),
    }
    assert len(statements) == 1


@pytest.mark.parametrize("object_id", ["undefined", "42", "%00", str(NIL), "a" * 5000])
def test_what_is_no_id_is_not_found(api: Client, object_id: str) -> None:
    response = api.get(url(object_id))
    assert (response.status_code, response.headers["Content-Type"]) == (
        404,
        "application/problem+json",
    )
    assert response.json()["code"] == "NOT_FOUND"


def test_totals_are_read_only(api: Client) -> None:
    response = api.post(url(new_id()))
    assert (response.status_code, response.json()["code"]) == (405, "METHOD_NOT_ALLOWED")
