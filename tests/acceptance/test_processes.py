"""Real Celery workers and a real Celery beat: ordinary work, and kills."""

import json
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.db.models import QuerySet

from outbox.models import OutboxMessage
from outbox.relay import MAX_BATCHES
from outbox.tasks import relay
from pinactivity.celery import app
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import KafkaPublisher, Message
from pinactivity.kafka.topics import SESSION_LINKED, USER_SIGNED_IN
from pinactivity.postgres.clock import statement_time
from sessions.models import ActivityCloserRun, Session
from sessions.tasks import close_inactive
from tests.closer import SESSION_ENDED, VIEW_ENDED
from tests.closings import assert_one_event_for_each_closed_row_and_none_else
from tests.factories import make_due_sessions, make_session, silent_session
from tests.processes import CELERY, MANAGE, running, wait_for_backends_to_end, wait_until, worker

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.kafka,
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def _empty_queues() -> Iterator[None]:
    """Purge ticks of killed workers, so that no other test gets them."""
    app.control.purge()
    yield
    app.control.purge()


def is_at_least(rows: QuerySet[Any], count: int) -> bool:
    return rows.count() >= count


def is_at_most(rows: QuerySet[Any], count: int) -> bool:
    return rows.count() <= count


def test_ticks_of_two_beats_close_sessions_and_carry_their_events_to_kafka_once_c15(
    tmp_path: Path, read_topic: Callable[[str], list[Any]]
) -> None:
    session = silent_session(minutes=13, views=1)
    log = tmp_path / "log"
    interval = {"ACTIVITY_CLOSER_POLLING_INTERVAL": "00:00:01"}
    beats = [
        [*CELERY, "beat", "--pidfile=", "--schedule", str(tmp_path / name)] for name in ("1", "2")
    ]

    with (
        running(worker("closer"), log, **interval) as closer,
        running(worker("relay"), log) as relaying,
        running(beats[0], log, **interval) as beating,
        running(beats[1], log, **interval) as beating_too,
    ):
        published = OutboxMessage.objects.filter(published_at__isnull=False)
        wait_until(lambda: published.count() == 2, what="the delivery of both events")
        wait_until(
            partial(is_at_least, ActivityCloserRun.objects.all(), 4), what="ticks of both beats"
        )
        processes = (beating, beating_too, closer, relaying)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in processes] == [0, 0, 0, 0]

    assert Session.objects.get().status == "Inactive"
    (record,) = read_topic(SESSION_ENDED)
    assert record.key.decode() == str(session.id)
    assert len(read_topic(VIEW_ENDED)) == 1
    assert "Traceback" not in log.read_text()


def test_sign_in_of_identity_reaches_the_session_and_its_event_kafka_a4(
    tmp_path: Path, read_topic: Callable[[str], list[Any]]
) -> None:
    session, user_id = make_session(), new_id()
    message = Message(
        topic=USER_SIGNED_IN,
        key=str(user_id).encode(),
        value=json.dumps(
            {
                "UserId": str(user_id),
                "AnonymousId": str(session.anonymous_id),
                "SignedInAt": iso_utc(statement_time()),
            }
        ).encode(),
        headers=(("MessageId", str(new_id()).encode()), ("ContractVersion", b"1")),
    )
    identity = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=15)
    )
    assert identity.publish([message]) == [None]
    identity.close()
    log = tmp_path / "log"

    with (
        running([*MANAGE, "consume", "signed-in"], log) as consumer,
        running(worker("relay"), log) as relaying,
    ):
        linked = Session.objects.filter(user_id=user_id)
        wait_until(linked.exists, what="the link")
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(30) == 0
        # Celery beat does not run: the commit has woken the relay.
        published = OutboxMessage.objects.filter(published_at__isnull=False)
        wait_until(published.exists, what="the delivery")
        relaying.send_signal(signal.SIGTERM)
        assert relaying.wait(30) == 0

    (record,) = read_topic(SESSION_LINKED)
    assert json.loads(record.value)["UserId"] == str(user_id)


def test_worker_killed_in_the_middle_of_a_batch_loses_and_repeats_nothing(tmp_path: Path) -> None:
    sessions = 3000
    make_due_sessions(sessions, views=2)
    closed = Session.objects.filter(status="Inactive")
    kills = 0
    for target in (200, 1000, 1800):
        with running(
            worker("closer"), tmp_path / "log", ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION="10"
        ) as process:
            close_inactive.delay()
            wait_until(partial(is_at_least, closed, target), what=f"{target} closings")
            process.kill()
            process.wait()
        kills += closed.count() < sessions
        wait_for_backends_to_end()
        assert_one_event_for_each_closed_row_and_none_else()
    assert kills, "no kill came in the middle"
    assert ActivityCloserRun.objects.filter(outcome="Running").count() == kills

    with running(worker("closer"), tmp_path / "log"):
        close_inactive.delay()
        wait_until(lambda: closed.count() == sessions, what="the closing of the rest")
    assert OutboxMessage.objects.count() == 3 * sessions
    assert_one_event_for_each_closed_row_and_none_else()


def test_worker_asked_to_stop_ends_its_runs_between_transactions_c17(tmp_path: Path) -> None:
    """A tick exists twice: the broker has redelivered it while it runs."""
    make_due_sessions(4000, views=2)
    closed = Session.objects.filter(status="Inactive")
    with running(
        worker("closer"), tmp_path / "log", ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION="1"
    ) as process:
        tick = close_inactive.delay()
        wait_until(lambda: closed.count() >= 20, what="the first closings")
        close_inactive.apply_async(task_id=tick.id)
        runs = ActivityCloserRun.objects.filter(outcome="Running")
        wait_until(lambda: runs.count() == 2, what="the second run of the tick")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    ended = list(ActivityCloserRun.objects.all())
    assert [run.outcome for run in ended] == ["Cancelled", "Cancelled"]
    assert sum(run.closed_sessions for run in ended) == closed.count() < 4000
    assert_one_event_for_each_closed_row_and_none_else()


def test_relay_killed_while_it_publishes_loses_nothing_and_repeats_only_message_ids(
    tmp_path: Path, read_topic: Callable[[str], list[Any]]
) -> None:
    messages = 6000
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO outbox_messages (message_id, topic, key, headers, payload)
            SELECT gen_random_uuid(), %s, gen_random_uuid(), '{"Version": "2"}', n
            FROM generate_series(1, %s) AS n
            """,
            [SESSION_ENDED, messages],
        )
    pending = OutboxMessage.objects.filter(published_at__isnull=True)
    kills = 0
    for target in (200, 1500, 3000):
        with running(worker("relay"), tmp_path / "log", OUTBOX_BATCH_SIZE="100") as process:
            relay.delay()
            wait_until(partial(is_at_most, pending, messages - target), what=f"{target} deliveries")
            process.kill()
            process.wait()
        kills += pending.exists()
        wait_for_backends_to_end()
    assert kills, "no kill came in the middle"

    with running(worker("relay"), tmp_path / "log"):
        relay.delay()
        wait_until(lambda: not pending.exists(), what="the delivery of the rest")

    arrived = read_topic(SESSION_ENDED)
    message_ids = {dict(record.headers)["MessageId"].decode(): record.key for record in arrived}
    written = OutboxMessage.objects.values_list("message_id", "key")
    assert message_ids == {str(message_id): key.encode() for message_id, key in written}
    # A transaction in flight may be repeated: at most one for each kill.
    assert messages <= len(arrived) <= messages + MAX_BATCHES * 100 * kills


def test_worker_back_from_a_pause_finds_no_pile_of_ticks_c16(tmp_path: Path) -> None:
    for _ in range(30):
        close_inactive.delay()
    with running(worker("closer", "--purge"), tmp_path / "log"):
        wait_until(is_idle_queue, what="the end of the pile")
        make_due_sessions(1, views=2)
        close_inactive.delay()
        wait_until(
            partial(is_at_least, Session.objects.filter(status="Inactive"), 1),
            what="the closing by the next tick",
        )
    assert ActivityCloserRun.objects.count() == 1


def is_idle_queue() -> bool:
    with app.connection_for_read() as broker:
        channel: Any = broker.default_channel  # Redis's, which the types do not know
        return bool(channel.client.llen("closer") == 0)


def test_ticks_carry_no_hosts_time_c20() -> None:
    """With an expiry, the difference of the clocks of beat and worker would matter."""
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert "expires" not in entry.get("options", {})
