"""Reconciliation: what ended against outbox, Kafka and ClickHouse; each loss is reported."""

import json
import os
import sqlite3
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test.utils import override_settings
from kafka.admin import KafkaAdminClient

from devstats import tasks
from devstats.ownership import PropertyObject
from devstats.reconciliation.report import Count, Lost, hour_of
from devstats.selectors import summarise_objects, summarise_sessions
from devstats.tables import PROPERTY_OBJECTS
from devstats.writer import FactWriter
from outbox.models import OutboxMessage
from outbox.retention import purge_published
from outbox.services import redrive
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.http.periods import Period
from pinactivity.kafka.history import opened_reader, partitions_of
from pinactivity.telemetry.metrics import DEV_STATS_RECONCILE_LAST_SUCCESS, DEV_STATS_RECONCILE_LOST
from sessions.lifecycle import CloseReason
from sessions.models import Session
from sessions.transitions import close_sessions
from tests.dev_stats import clear_tables, count_rows, rows_of, stop_merges
from tests.factories import make_session, make_view
from tests.kafka import publish_outbox
from tests.reconciliation import HOUR, Stores, lose, run_command, stored
from views.closing import close_views
from views.models import PropertyObjectView

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.kafka]

MICROSECOND = timedelta(microseconds=1)
NOWHERE = "127.0.0.1:1"


# -- nothing is lost -----------------------------------------------------------------------


def test_everything_that_ended_has_arrived(stores: Stores) -> None:
    stores.close(*(stores.hour + timedelta(minutes=20 * number) for number in range(3)))
    publish_outbox()
    stores.run_consumer(0, messages=3)
    stores.run_consumer(1, messages=3)

    code, printed = run_command(stores)

    assert code == 0
    assert printed.endswith("lost 0, duplicated 0, late 0, not comparable 0\n")
    assert stores.reconcile().counts == {
        (stores.sessions, stores.hour): stored(3),
        (stores.views, stores.hour): stored(3),
    }


def test_hour_is_that_of_the_end_to_the_microsecond(stores: Stores) -> None:
    following = stores.hour + HOUR
    stores.store(stores.hour - MICROSECOND, stores.hour, following - MICROSECOND, following)

    assert {hour: count for (topic, hour), count in stores.reconcile().counts.items()} == {
        stores.hour: stored(2)
    }
    wider = stores.reconcile(since=stores.hour - HOUR, until=following + HOUR)
    for topic in (stores.sessions, stores.views):
        assert [count for (name, _), count in sorted(wider.counts.items()) if name == topic] == [
            stored(1),
            stored(2),
            stored(1),
        ]


def test_view_that_ended_before_its_session_is_of_its_own_hour(stores: Stores) -> None:
    since, until = stores.hour, stores.hour + HOUR
    long_ago, later, still_active = (
        make_session(last_activity_at=since - HOUR / 2, created_at=since - HOUR) for _ in range(3)
    )
    for session, end in (
        (long_ago, since - MICROSECOND),
        (later, since),
        (later, until - MICROSECOND),
        (later, until),
        (still_active, since),
    ):
        view = make_view(session=session, last_activity_at=since - HOUR / 2)
        with transaction.atomic():
            close_views([view.id], reason=CloseReason.INACTIVITY, now=end)
    with transaction.atomic():
        close_sessions([long_ago.id], reason=CloseReason.INACTIVITY, now=since - MICROSECOND)
        close_sessions([later.id], reason=CloseReason.INACTIVITY, now=until + HOUR)
    stores.close()  # nothing more

    assert stores.reconcile().counts == {
        (stores.views, stores.hour): Count(closed=3, outbox=3, late=3),
    }


def test_hour_in_which_nothing_ended_is_empty(stores: Stores) -> None:
    code, printed = run_command(stores)
    assert code == 0
    assert printed == "lost 0, duplicated 0, late 0, not comparable 0\n"


def test_replayed_topic_and_backfilled_facts_change_nothing(
    stores: Stores, clickhouse: Client
) -> None:
    stop_merges(clickhouse)
    stores.store(stores.hour, stores.hour)
    before = stores.reconcile().counts
    stores.consume()
    period = [iso_utc(stores.hour), iso_utc(stores.hour + HOUR)]
    call_command("backfill_session_facts", "--from", period[0], "--to", period[1])
    assert count_rows(clickhouse) == 6
    assert stores.reconcile().counts == before
    assert before[stores.sessions, stores.hour] == stored(2)


def test_message_that_was_published_twice_is_duplicated(stores: Stores) -> None:
    stores.store(stores.hour, stores.hour)
    stores.publish_again(stores.sessions, 1)

    counts = stores.reconcile().counts

    assert counts[stores.sessions, stores.hour] == stored(2, kafka=3, duplicated=1)
    assert counts[stores.views, stores.hour] == stored(2)
    assert run_command(stores)[0] == 0


# -- late ----------------------------------------------------------------------------------


def test_pending_message_is_late_and_so_is_one_that_nobody_has_read(stores: Stores) -> None:
    stores.store(stores.hour)
    stores.close(stores.hour)
    assert stores.reconcile().counts[stores.sessions, stores.hour] == Count(
        closed=2, outbox=2, kafka=1, facts=1, late=1
    )

    publish_outbox()

    late = Count(closed=2, outbox=2, kafka=2, facts=1, late=1)
    assert stores.reconcile().counts == {
        (stores.sessions, stores.hour): late,
        (stores.views, stores.hour): late,
    }
    code, printed = run_command(stores, "--repair")
    assert (code, "late 2," in printed, "0 facts added" in printed) == (0, True, True)


# -- lost ----------------------------------------------------------------------------------


def test_lost_fact_is_reported_in_its_topic_and_hour_and_repaired(
    stores: Stores, clickhouse: Client
) -> None:
    developer, user = new_id(), new_id()
    made = stores.close(stores.hour, stores.hour + timedelta(minutes=1), user_id=user)
    views = list(PropertyObjectView.objects.filter(session__in=[each.id for each in made]))
    writer = FactWriter()
    owned = [
        PropertyObject(view.property_object_id, developer, None, stores.hour - HOUR)
        for view in views
    ]
    writer.append(PROPERTY_OBJECTS, {str(each.property_object_id): each for each in owned})
    writer.close()
    publish_outbox()
    stores.consume()
    period = Period(stores.hour - HOUR, stores.hour + HOUR)

    def answers() -> Any:
        sessions, objects = (
            summarise_sessions(developer, period),
            summarise_objects(developer, period),
        )
        return replace(sessions, fresh_as_of=None), objects.objects

    before = answers()
    assert before[0].total.sessions == 2
    facts = {
        row["PropertyObjectViewId"]: row for row in rows_of(clickhouse, stores.topics[1].table.name)
    }
    lose(clickhouse, "session_facts", "SessionId", made[1].id)

    assert stores.reconcile().counts == {
        (stores.sessions, stores.hour): stored(2, facts=1, lost={Lost.NOT_STORED: 1}),
        (stores.views, stores.hour): stored(2),
    }
    code, printed = run_command(stores)
    assert code == 1
    assert "lost 1, duplicated 0" in printed

    lose(clickhouse, "property_object_view_facts", "PropertyObjectViewId", views[0].id)
    assert json.loads(run_command(stores, "--json")[1].splitlines()[0])["Total"] == {
        "Closed": 4,
        "Outbox": 4,
        "Offsets": 4,
        "Facts": 2,
        "Lost": 2,
        "Duplicated": 0,
        "Late": 0,
        "NotComparable": 0,
        "LostBecause": {"not stored": 2},
    }
    assert answers() != before

    code, printed = run_command(stores, "--repair")
    assert (code, "2 facts added" in printed) == (0, True)
    assert "lost 0, duplicated 0, late 0, not comparable 0" in printed
    assert answers() == before
    (again,) = (
        row
        for row in rows_of(clickhouse, "property_object_view_facts")
        if row["FactId"] == f"backfill:{views[0].id}"
    )
    unlike = {"FactId", "IngestionTime"}
    assert {name: again[name] for name in again.keys() - unlike} == {
        name: value for name, value in facts[views[0].id].items() if name not in unlike
    }
    assert run_command(stores, "--repair")[1].endswith("0 facts added from PostgreSQL\n")


def test_parked_message_is_lost_until_it_is_sent_again(stores: Stores) -> None:
    stores.close(stores.hour)
    OutboxMessage.objects.filter(topic=stores.sessions).update(
        parked_at=datetime.now(UTC), last_error="MessageSizeTooLargeError"
    )

    code, printed = run_command(stores)

    assert code == 1
    assert "lost: 1 parked" in printed
    assert "lost 1, duplicated 0, late 1" in printed  # the view is pending
    with transaction.atomic():
        redrive(OutboxMessage.objects.filter(topic=stores.sessions))
    publish_outbox()
    stores.consume()
    assert run_command(stores)[0] == 0


def test_dead_letter_is_lost_and_its_row_repairs_it(stores: Stores) -> None:
    broken, _ = stores.close(stores.hour, stores.hour)
    messages = OutboxMessage.objects.filter(topic=stores.sessions)
    messages.filter(key=str(broken.id)).update(payload='{"SessionId": "broken"}')
    publish_outbox()
    stores.run_consumer(0, messages=2)

    code, printed = run_command(stores)

    assert code == 1
    assert "lost: 1 dead-lettered" in printed
    assert stores.reconcile().counts[stores.sessions, stores.hour] == stored(
        2, facts=1, lost={Lost.DEAD_LETTERED: 1}
    )
    assert run_command(stores, "--repair")[0] == 0


def test_row_without_message_and_message_without_offset_are_distinguished(stores: Stores) -> None:
    stores.close(stores.hour, stores.hour)
    first, second = OutboxMessage.objects.filter(topic=stores.sessions).order_by("id")
    first.delete()
    OutboxMessage.objects.exclude(id=second.id).delete()
    OutboxMessage.objects.update(published_at=datetime.now(UTC) - timedelta(minutes=1))

    lost = stores.reconcile().counts[stores.sessions, stores.hour].lost

    assert lost == {Lost.NEVER_ENQUEUED: 1, Lost.NOT_IN_KAFKA: 1}


def test_loss_without_a_row_is_beyond_repair(stores: Stores, clickhouse: Client) -> None:
    now = hour_of(datetime.now(UTC))
    stores.store(stores.hour)
    clear_tables(clickhouse)
    PropertyObjectView.objects.all().delete()
    Session.objects.all().delete()

    # By the event's CreatedAt, which the database has set now.
    (messages,) = {key.created_at for key in OutboxMessage.objects.filter(topic=stores.sessions)}
    counts = stores.reconcile(since=now - HOUR, until=now + 2 * HOUR).counts
    assert counts[stores.sessions, hour_of(messages)] == Count(
        outbox=1,
        kafka=1,
        lost=Counter({Lost.NOT_STORED: 1}),
        unrepairable=1,
    )
    stores.hour = hour_of(messages)
    code, printed = run_command(stores, "--repair")
    assert (code, "2 of them have no row" in printed) == (1, True)


# -- horizons ------------------------------------------------------------------------------


def test_purged_outbox_is_not_comparable(stores: Stores) -> None:
    stores.hour -= timedelta(days=10)
    stores.store(stores.hour)
    OutboxMessage.objects.update(
        created_at=stores.hour, published_at=stores.hour + timedelta(seconds=1)
    )
    assert purge_published(settings.OUTBOX) == 2

    assert stores.reconcile().counts[stores.sessions, stores.hour] == stored(
        1, outbox=0, not_comparable=1
    )
    assert run_command(stores)[0] == 0


def test_topic_that_was_made_anew_is_not_comparable(stores: Stores) -> None:
    stores.store(stores.hour)
    stores.make_topics_anew()
    assert stores.reconcile().counts[stores.sessions, stores.hour] == stored(
        1, kafka=0, not_comparable=1
    )
    stores.store(stores.hour)
    assert stores.reconcile().counts[stores.sessions, stores.hour] == stored(
        2, kafka=1, not_comparable=1
    )
    assert run_command(stores)[0] == 0


@pytest.mark.skipif(
    os.environ.get("KAFKA") != "apache", reason="the embedded broker deletes no records"
)
def test_shortened_topic_is_not_comparable(stores: Stores) -> None:
    stores.store(*[stores.hour] * 20)
    with opened_reader(settings.KAFKA_BOOTSTRAP_SERVERS) as reader:
        ends = reader.end_offsets(partitions_of(reader, stores.sessions))
    admin = KafkaAdminClient(bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)
    admin.delete_records({part: end for part, end in ends.items() if end})
    admin.close()
    counts = stores.reconcile().counts
    assert counts[stores.sessions, stores.hour] == stored(20, kafka=0, not_comparable=20)
    assert counts[stores.views, stores.hour] == stored(20)

    stores.store(stores.hour)
    assert stores.reconcile().counts[stores.sessions, stores.hour] == stored(
        21, kafka=1, not_comparable=20
    )
    assert run_command(stores)[0] == 0


def test_rows_that_retention_has_deleted_are_not_comparable(stores: Stores) -> None:
    stores.store(stores.hour)
    PropertyObjectView.objects.all().delete()
    Session.objects.all().delete()
    (created_at,) = {each.created_at for each in OutboxMessage.objects.filter(topic=stores.views)}

    def counts() -> dict[Any, Count]:
        now = hour_of(datetime.now(UTC))
        return stores.reconcile(since=stores.hour - HOUR, until=now + HOUR).counts

    by_event = Count(outbox=1, kafka=1, facts=1, not_comparable=1)
    assert counts() == {
        (stores.sessions, hour_of(created_at)): by_event,
        (stores.views, hour_of(created_at)): by_event,
    }

    # Nothing but the facts is left: by their last activity, 12 minutes before the end.
    OutboxMessage.objects.all().delete()
    stores.make_topics_anew()
    alone = Count(facts=1, not_comparable=1)
    assert counts() == {
        (stores.sessions, stores.hour - HOUR): alone,
        (stores.views, stores.hour - HOUR): alone,
    }
    assert run_command(stores)[0] == 0


# -- the command ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"CLICKHOUSE_URL": f"http://default:hunter2@{NOWHERE}/"}, "ClickHouse is away"),
        ({"KAFKA_BOOTSTRAP_SERVERS": [NOWHERE]}, "Kafka does not answer"),
    ],
)
def test_store_that_is_away_is_reported_and_is_no_loss(
    stores: Stores, setting: dict[str, Any], message: str
) -> None:
    stores.close(stores.hour)
    with override_settings(**setting):
        code, printed = run_command(stores)
    assert code == 2
    assert message in printed
    assert "hunter2" not in printed


def test_absence_of_postgresql_is_reported(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")
    try:
        code, printed = run_command(stores)
    finally:
        connection.close()
    assert (code, "PostgreSQL is away" in printed) == (2, True)


def test_full_disk_is_reported_as_no_loss(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.close(stores.hour)
    publish_outbox()
    connect = sqlite3.connect

    def connect_to_full_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        file: sqlite3.Connection = connect(*arguments, **options)
        file.execute("PRAGMA max_page_count = 1")
        return file

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    code, printed = run_command(stores)
    assert (code, "cannot be written" in printed) == (2, True)
    DEV_STATS_RECONCILE_LAST_SUCCESS.set(0)
    tasks.reconcile()
    assert DEV_STATS_RECONCILE_LAST_SUCCESS._value.get() == 0


@pytest.mark.parametrize(
    "bounds", [["2026-03-02", "2026-03-01"], ["2026-03-01", "2026-03-01"], ["yesterday", "x"]]
)
def test_period_that_is_none_is_refused(bounds: list[str]) -> None:
    with pytest.raises(CommandError):
        call_command("reconcile", "--from", bounds[0], "--to", bounds[1])


# -- the hourly task -----------------------------------------------------------------------


def test_hourly_task_sets_the_metrics_of_what_is_lost(
    stores: Stores, clickhouse: Client, settings: Any
) -> None:
    (session,) = stores.store(stores.hour)
    lose(clickhouse, "session_facts", "SessionId", session.id)

    def lost() -> list[float]:
        return [
            DEV_STATS_RECONCILE_LOST.labels(topic.topic)._value.get() for topic in stores.topics
        ]

    before = datetime.now(UTC).timestamp()
    tasks.reconcile()
    assert lost() == [1, 0]
    assert DEV_STATS_RECONCILE_LAST_SUCCESS._value.get() >= before

    DEV_STATS_RECONCILE_LAST_SUCCESS.set(0)
    settings.CLICKHOUSE_URL = f"http://{NOWHERE}/"
    tasks.reconcile()
    assert DEV_STATS_RECONCILE_LAST_SUCCESS._value.get() == 0
    assert lost() == [1, 0]
