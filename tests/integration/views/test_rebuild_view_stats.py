"""manage.py rebuild_view_stats: recomputes the totals from the views, beside consumers."""

import io
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.options import ActivityCloserOptions
from tests.concurrency import Background, run_together
from tests.factories import MINUTE, id_of_age, make_session, make_stats, make_view
from views.models import (
    PropertyObjectView,
    PropertyObjectViewStats,
    PropertyObjectViewStatsSeen,
)
from views.stats import EndedView, RebuildResult, count_views, rebuild_stats, stats_of
from views.stats_models import PropertyObjectViewStatsQuerySet

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _leave_the_connection_as_it_was() -> Any:
    yield
    connection.close()  # the command has changed its settings


def rebuild(*options: str) -> str:
    output = io.StringIO()
    call_command("rebuild_view_stats", *options, stdout=output)
    return output.getvalue()


def closed_view(**fields: Any) -> PropertyObjectView:
    """Make a view of a minute that ended 13 minutes ago, without its event."""
    view = make_view(silent=fields.pop("silent", 13 * MINUTE), **fields)
    PropertyObjectView.objects.filter(id=view.id).update(
        status="Inactive",
        ended_at=view.last_activity_at + 12 * MINUTE,
        duration=view.last_activity_at - view.created_at,
        close_reason="Inactivity",
    )
    view.refresh_from_db()
    return view


def event_of(view: PropertyObjectView) -> EndedView:
    assert view.ended_at is not None
    assert view.duration is not None
    return EndedView(
        view.id,
        view.property_object_id,
        view.created_at,
        view.duration // timedelta(seconds=1),
        recorded_at=view.ended_at,
    )


def counted_view(**fields: Any) -> PropertyObjectView:
    view = closed_view(**fields)
    count_views([event_of(view)])
    return view


def totals() -> dict[UUID, tuple[int, int]]:
    rows = PropertyObjectViewStats.objects.values_list(
        "property_object_id", "views_count", "total_duration_seconds"
    )
    return {object_id: (views, seconds) for object_id, views, seconds in rows}


def from_sql() -> dict[UUID, tuple[int, int]]:
    """The totals of closed views, by plain SQL."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT property_object_id, count(*),"
            "   sum(floor(extract(epoch FROM last_activity_at - created_at)))::bigint"
            " FROM property_object_views WHERE status = 'Inactive' GROUP BY property_object_id"
        )
        return {object_id: (views, seconds) for object_id, views, seconds in cursor.fetchall()}


def drifting(result: RebuildResult) -> set[UUID]:
    return {each.property_object_id for each in result.drifting}


def test_sound_totals_do_not_drift_and_are_left_alone() -> None:
    view = counted_view(lasted=timedelta(seconds=90, microseconds=999_999))
    counted_view(property_object_id=view.property_object_id)
    make_view(property_object_id=view.property_object_id)  # Active: counts when it has ended
    before = list(PropertyObjectViewStats.objects.values())

    assert "1 objects, 2 closed views: 0 objects drift, 0 views are under way" in rebuild(
        "--dry-run"
    )
    assert "0 objects rewritten" in rebuild()

    assert list(PropertyObjectViewStats.objects.values()) == before


def test_dry_run_reports_the_drift_writes_nothing_and_exits_with_3() -> None:
    view = counted_view()
    PropertyObjectViewStats.objects.update(views_count=5, total_duration_seconds=7)
    output = io.StringIO()

    with pytest.raises(CommandError) as refused:
        call_command("rebuild_view_stats", "--dry-run", stdout=output)

    assert refused.value.returncode == 3
    assert f"{view.property_object_id}  views 5 -> 1  seconds 7 -> 60" in output.getvalue()
    assert totals() == {view.property_object_id: (5, 7)}


def test_every_kind_of_drift_is_repaired_and_only_that() -> None:
    sound = counted_view()
    lost = counted_view()
    PropertyObjectViewStats.objects.filter(pk=lost.property_object_id).delete()
    wrong = counted_view()
    PropertyObjectViewStats.objects.filter(pk=wrong.property_object_id).update(views_count=9)
    wrong_time = counted_view()
    PropertyObjectViewStats.objects.filter(pk=wrong_time.property_object_id).update(
        last_viewed_at=statement_time()
    )
    nobody = make_stats()  # of views that are in no table

    result = rebuild_stats(repair=True)

    assert drifting(result) == {
        lost.property_object_id,
        wrong.property_object_id,
        wrong_time.property_object_id,
        nobody.property_object_id,
    }
    assert (result.rewritten, result.objects, result.views) == (4, 5, 4)
    assert totals() == {**from_sql(), nobody.property_object_id: (0, 0)}
    for view in (sound, lost, wrong, wrong_time):
        assert stats_of(view.property_object_id).last_viewed_at == view.created_at
    assert stats_of(nobody.property_object_id).last_viewed_at is None
    assert rebuild_stats(repair=False).drifting == []


def test_views_under_way_are_no_drift() -> None:
    counted = counted_view()
    closed_view(property_object_id=counted.property_object_id)
    closed_view()

    assert "2 objects, 3 closed views: 0 objects drift, 2 views are under way" in rebuild(
        "--dry-run"
    )

    assert totals() == {counted.property_object_id: (1, 60)}


def test_repair_counts_views_under_way_and_their_events_add_nothing_afterwards() -> None:
    """The repair counts lost events, and late ones do not count twice."""
    views = [closed_view() for _ in range(3)]

    assert "3 objects rewritten" in rebuild()
    assert totals() == from_sql()
    count_views([event_of(view) for view in views])

    assert totals() == from_sql() != {}
    assert rebuild_stats(repair=False) == RebuildResult(objects=3, views=3)


def test_views_that_retention_has_deleted_still_count() -> None:
    view = counted_view()
    newest = statement_time()
    PropertyObjectViewStats.objects.update(
        views_count=8,
        total_duration_seconds=360,
        purged_views_count=7,
        purged_duration_seconds=300,
        last_viewed_at=newest,
    )
    gone = make_stats(
        views_count=2,
        total_duration_seconds=9,
        purged_views_count=2,
        purged_duration_seconds=9,
        last_viewed_at=newest,
    )
    assert rebuild_stats(repair=False).drifting == []

    PropertyObjectViewStats.objects.update(views_count=1)
    rebuild_stats(repair=True)

    assert totals() == {
        view.property_object_id: (8, 360),
        gone.property_object_id: (2, 9),
    }
    # The opening times of the deleted views are unknown.
    assert set(PropertyObjectViewStats.objects.values_list("last_viewed_at", flat=True)) == {newest}


def test_views_older_than_the_seen_table_remembers_are_as_good_as_counted() -> None:
    old = closed_view(id=id_of_age(100 * DAY), silent=100 * DAY)
    make_stats(property_object_id=old.property_object_id, last_viewed_at=old.created_at)
    assert rebuild_stats(repair=False) == RebuildResult(objects=1, views=1)

    PropertyObjectViewStats.objects.all().delete()
    result = rebuild_stats(repair=True)

    assert (len(result.drifting), result.under_way) == (1, 0)
    count_views([event_of(old)])  # it comes again, too late to count
    assert totals() == from_sql()
    assert not PropertyObjectViewStatsSeen.objects.exists()


@pytest.mark.parametrize(
    "make",
    [
        # A replay's view: it ended long ago by its own clock, but its event is written today.
        lambda: closed_view(silent=100 * DAY),
        # A view of a session of months: opened long ago, ended now.
        lambda: closed_view(id=id_of_age(100 * DAY), lasted=100 * DAY),
    ],
    ids=["replayed", "long"],
)
def test_view_is_under_way_for_as_long_as_its_event_would_count(
    make: Callable[[], PropertyObjectView],
) -> None:
    view = make()
    result = rebuild_stats(repair=False)
    assert (result.drifting, result.under_way) == ([], 1)

    rebuild_stats(repair=True)
    count_views([replace(event_of(view), recorded_at=statement_time())])

    assert totals() == from_sql()


def test_objects_are_taken_chunk_by_chunk_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("views.stats._OBJECTS_A_CHUNK", 2)
    for _ in range(7):
        counted_view()
        make_stats()
    PropertyObjectViewStats.objects.update(views_count=4)
    advanced: list[int] = []

    result = rebuild_stats(repair=True, advance=advanced.append)

    assert (result.objects, result.rewritten) == (14, 14)
    assert (sum(advanced), len(advanced)) == (7, 7)
    assert {pk: row for pk, row in totals().items() if row != (0, 0)} == from_sql()


def test_repair_waits_for_a_consumer_and_counts_its_batch_once() -> None:
    views = [closed_view(), closed_view()]

    # The repair can continue only after the transaction, so one `with` cannot enclose both.
    with transaction.atomic():
        count_views([event_of(view) for view in views])
        repairing = Background(lambda: rebuild_stats(repair=True).rewritten)
        with pytest.raises(TimeoutError):
            repairing.result(timeout=0.5)
    with repairing:
        assert repairing.result() == 0

    assert totals() == from_sql()


@pytest.mark.parametrize("first", ["consumer", "repair"])
def test_view_that_closes_during_a_repair_is_counted_by_its_consumer_alone(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view closes after the repair has marked its views, in both orders of locking the row."""
    view = counted_view()
    PropertyObjectViewStats.objects.update(total_duration_seconds=7)
    lock = PropertyObjectViewStatsQuerySet.lock
    consuming: list[Background] = []

    def lock_beside_a_consumer(rows: Any, object_ids: Any) -> None:
        late = event_of(closed_view(property_object_id=view.property_object_id))
        has_row = threading.Event()

        def consume() -> None:
            with transaction.atomic():
                count_views([late])
                has_row.set()
                time.sleep(0.5)

        if first == "repair":
            lock(rows, object_ids)
        consuming.append(Background(consume))
        assert has_row.wait(0.5 if first == "repair" else 30) is (first == "consumer")
        if first == "consumer":
            lock(rows, object_ids)

    monkeypatch.setattr(PropertyObjectViewStatsQuerySet, "lock", lock_beside_a_consumer)
    rebuild_stats(repair=True)
    (background,) = consuming
    with background:
        background.result()

    assert totals() == from_sql() == {view.property_object_id: (2, 120)}


def test_consumers_closers_and_repairs_end_in_what_sql_says() -> None:
    objects = [new_id() for _ in range(8)]
    sessions = [make_session(silent=20 * MINUTE) for _ in range(120)]
    for session in sessions:
        for object_id in objects[:3]:
            make_view(session=session, property_object_id=object_id)
    early = [closed_view(property_object_id=object_id) for object_id in objects for _ in range(20)]
    events = [event_of(view) for view in early]

    def consume() -> None:
        for start in range(0, len(events), 8):
            count_views(events[start : start + 8])

    def close() -> None:
        ActivityCloser(ActivityCloserOptions(sessions_per_transaction=5)).run()

    def repair() -> None:
        for _ in range(10):
            rebuild_stats(repair=True)

    calls: list[Callable[[], None]] = [consume, consume, close, repair, repair]
    run_together(calls)
    # Now the consumer gets the events of the other closings. A repair has counted some already.
    count_views([event_of(view) for view in PropertyObjectView.objects.filter(status="Inactive")])

    assert totals() == from_sql()
    assert sum(views for views, _ in totals().values()) == 120 * 3 + 160


def test_busy_database_is_reported_without_its_text_and_exits_with_1() -> None:
    closed_view()
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as holding, connection.cursor() as cursor:
            holding.execute("LOCK TABLE property_object_view_stats")
            cursor.execute("SET lock_timeout = '200ms'")
        with pytest.raises(CommandError, match="run the command again") as refused:
            rebuild()
    finally:
        holder.close()
    assert refused.value.returncode == 1
    assert "property_object_view_stats" not in str(refused.value)
