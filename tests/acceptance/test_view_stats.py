"""The statistics of views in the life of their consumer: kills and replays change nothing."""

import signal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings
from django.db import connection

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topic_admin import count_messages, create_topics
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, dead_letter_topics
from sessions.closer import ActivityCloser
from sessions.options import ActivityCloserOptions
from tests.consuming import RealBroker
from tests.kafka import publish_outbox, skip_to_end
from tests.kill_consumer import ANY_MOMENT, BETWEEN_COMMITS
from tests.processes import MANAGE, running, wait_for_backends_to_end, wait_until
from views.models import PropertyObjectViewStats, PropertyObjectViewStatsSeen

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

GROUP = "user-activity-property-object-view-stats"
CONSUME = [*MANAGE, "consume", "view-stats"]
VARIABLES = {"PYTHONUNBUFFERED": "1"}
KILLS = 100


def close_views(count: int) -> None:
    """Close so many views of 40 objects, of up to an hour each; their events are in the outbox."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH objects AS (
                SELECT n, gen_random_uuid() AS id FROM generate_series(0, 39) AS n
            ), opened AS (
                INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at, user_agent,
                                      browser, os, device_type)
                SELECT gen_random_uuid(), gen_random_uuid(), moment - random() * interval '1 h',
                       moment, 'test', '', '', 'Unknown'
                FROM generate_series(1, %s), LATERAL
                    (SELECT statement_timestamp() - interval '13 min') AS silent (moment)
                RETURNING id, created_at, last_activity_at
            )
            INSERT INTO property_object_views (id, session_id, property_object_id, view_source,
                                               created_at, last_activity_at)
            SELECT gen_random_uuid(), opened.id, objects.id, 'Map', opened.created_at,
                   opened.last_activity_at
            FROM (SELECT *, row_number() OVER () AS n FROM opened) AS opened
            JOIN objects ON objects.n = opened.n %% 40
            """,
            [count],
        )
    assert ActivityCloser(ActivityCloserOptions()).run().closed_views == count


def figures() -> dict[UUID, tuple[Any, ...]]:
    rows = PropertyObjectViewStats.objects.values_list(
        "property_object_id", "views_count", "total_duration_seconds", "last_viewed_at"
    )
    return {object_id: tuple(row) for object_id, *row in rows}


def figures_of_closed_views() -> dict[UUID, tuple[Any, ...]]:
    """What SQL says about closed views."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT property_object_id, count(*),"
            "   sum(floor(extract(epoch FROM last_activity_at - created_at)))::bigint,"
            "   max(created_at)"
            " FROM property_object_views WHERE status = 'Inactive' GROUP BY property_object_id"
        )
        return {object_id: tuple(row) for object_id, *row in cursor.fetchall()}


def seen() -> int:
    return PropertyObjectViewStatsSeen.objects.count()


def has_seen(count: int) -> bool:
    return seen() >= count


@pytest.fixture
def own_topic() -> str:
    """A topic for one test's messages."""
    topic = f"pin.test.view-ended-{new_id().hex}"
    broker = RealBroker()
    broker.create(topic)
    broker.close()
    return topic


@pytest.fixture
def group(kafka_topics: None) -> str:
    """The consumer's own group, at the end of what other tests have left in its topic."""
    create_topics(
        dead_letter_topics(registered_consumers().values()),
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=1,
        replication=1,
        retention=settings.KAFKA_TOPIC_RETENTION,
    )
    skip_to_end((PROPERTY_OBJECT_VIEW_ENDED,), GROUP)
    return GROUP


@pytest.mark.parametrize(
    "moment", [pytest.param(BETWEEN_COMMITS, marks=pytest.mark.kafka), ANY_MOMENT]
)
def test_consumer_killed_100_times_counts_every_view_once_c55(
    moment: str, own_topic: str, tmp_path: Path
) -> None:
    """Between the commit of the statistics and that of the offsets, and wherever else."""
    views = 3000
    close_views(views)
    OutboxMessage.objects.filter(topic=PROPERTY_OBJECT_VIEW_ENDED).update(topic=own_topic)
    OutboxMessage.objects.exclude(topic=own_topic).delete()
    publish_outbox()
    log = tmp_path / "log"
    driver = [*MANAGE[:1], "-m", "tests.kill_consumer", own_topic, own_topic, moment]

    with running([*driver, "--kills", str(KILLS)], log) as process:
        assert process.wait(240) == 0, log.read_text()[-3000:]

    assert f"{KILLS} kills in" in log.read_text()
    assert figures() == figures_of_closed_views()
    assert seen() == views == sum(row[0] for row in figures().values())


@pytest.mark.kafka
def test_consumer_process_killed_in_the_middle_counts_every_view_once(
    group: str, tmp_path: Path
) -> None:
    views = 6000
    close_views(views)
    publish_outbox()
    log = tmp_path / "log"
    with running(CONSUME, log, **VARIABLES) as process:
        wait_until(partial(has_seen, 1), what="the first views")
        process.kill()
        process.wait()
    wait_for_backends_to_end()
    assert 0 < seen() < views

    with running(CONSUME, log, **VARIABLES) as process:
        wait_until(partial(has_seen, views), what="the rest")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    assert figures() == figures_of_closed_views()
    assert "Traceback" not in log.read_text()


@pytest.mark.kafka
def test_whole_topic_replayed_twice_leaves_the_statistics_unchanged(
    group: str, tmp_path: Path
) -> None:
    """Read from its beginning, with what other tests have left there."""
    close_views(1000)
    publish_outbox()
    consume_whole_topic(group, tmp_path / "first")
    mine = figures_of_closed_views()
    before = figures()
    assert {object_id: before[object_id] for object_id in mine} == mine

    for number in (1, 2):
        consume_whole_topic(group, tmp_path / f"replay-{number}")
        assert figures() == before
    assert seen() == sum(row[0] for row in before.values())


def consume_whole_topic(group: str, log: Path) -> None:
    topic = PROPERTY_OBJECT_VIEW_ENDED
    messages = count_messages([topic], bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)[topic]
    broker = RealBroker()

    def is_consumed() -> bool:
        return (
            "6 partitions are read again" in log.read_text()
            and sum(broker.committed(topic, group).values()) >= messages
        )

    try:
        with running([*CONSUME, "--from-beginning"], log, **VARIABLES) as process:
            wait_until(is_consumed, what="the end of the topic")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    finally:
        broker.close()
