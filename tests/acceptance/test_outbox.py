"""The way from the outbox to Kafka while relays, broker and PostgreSQL fail.

This module has a broker of its own, which it stops and freezes. Tansu forgets everything when it
stops, so it is only frozen. `--outbox-scale=full` takes the numbers of the design's cases.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.conf import settings
from django.db import Error, connection, transaction
from kafka.admin import KafkaAdminClient

from embedded.errors import EmbeddedServerError
from embedded.server import Server
from embedded.stack import attach, private_server
from outbox.models import OutboxMessage
from outbox.services import enqueue
from outbox.tasks import relay
from pinactivity.celery import app
from pinactivity.core.ids import new_id
from pinactivity.kafka.topic_admin import create_topics
from pinactivity.kafka.topics import SESSION_ENDED
from sessions.events import SessionEnded
from tests.kafka import TopicReader
from tests.outbox import insert_messages, session_ended, versions_by_key
from tests.processes import environment, running, wait_for_backends_to_end, wait_until, worker

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(3600),
]

RELAYING = [sys.executable, "-m", "tests.relaying"]
PAYLOAD = "x" * 300
KEEPS_MESSAGES = os.environ.get("KAFKA") == "apache"


@dataclass(frozen=True)
class Scale:
    kills: int
    chain_events: int
    stopped_seconds: float
    frozen_seconds: float
    pending: int


SCALES = {
    "small": Scale(5, 3_000, 3.0, 3.0, 3_000),
    "full": Scale(100, 200_000, 60.0, 20.0, 1_000_000),
}


@pytest.fixture
def scale(pytestconfig: pytest.Config) -> Scale:
    return SCALES[pytestconfig.getoption("outbox_scale")]


@pytest.fixture(scope="module")
def private_broker() -> Iterator[Server]:
    with private_server("kafka", kafka=os.environ.get("KAFKA")) as server:
        yield server


@pytest.fixture
def broker(private_broker: Server, settings: Any) -> Iterator[Server]:
    """The module's broker, in place of the session's; after the test it runs again."""
    settings.KAFKA_BOOTSTRAP_SERVERS = [private_broker.address]
    make_topic()
    yield private_broker
    private_broker.thaw()
    private_broker.start()


def make_topic() -> None:
    create_topics(
        [SESSION_ENDED],
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=6,
        replication=1,
        retention=timedelta(days=30),
    )


@contextmanager
def relays(count: int, log: Path, *, lifetime: float = 1e9) -> Iterator["subprocess.Popen[bytes]"]:
    """Run relays until the end of the block; each is killed after about a lifetime, in seconds."""
    argv = [*RELAYING, "run", str(count), "--lifetime", str(lifetime)]
    with running(argv, log, **variables()) as process:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-2000:]


def variables() -> dict[str, str]:
    return {
        "KAFKA_BOOTSTRAP_SERVERS": ",".join(settings.KAFKA_BOOTSTRAP_SERVERS),
        "OUTBOX_DELIVERY_TIMEOUT": "00:00:02",
        "LOG_LEVEL": "ERROR",
    }


def pending() -> int:
    return OutboxMessage.objects.filter(published_at=None).count()


def wait_for_delivery(seconds: float = 60) -> None:
    wait_until(lambda: not pending(), seconds=seconds, what="the delivery of everything")


def message_ids(records: Sequence[Any]) -> list[str]:
    return [dict(record.headers)["MessageId"].decode() for record in records]


def written_message_ids() -> set[str]:
    return {str(each) for each in OutboxMessage.objects.values_list("message_id", flat=True)}


def enqueue_one_version(keys: Sequence[Any], version: int, moment: str) -> None:
    with transaction.atomic():
        enqueue([ended(key, version, moment) for key in keys])


def ended(key: Any, version: int, moment: str) -> SessionEnded:
    return SessionEnded(
        session_id=key,
        anonymous_id=key,
        user_id=None,
        created_at=moment,
        last_activity_at=moment,
        duration_seconds=0,
        version=version,
    )


def test_relay_killed_between_acknowledgement_and_commit_repeats_and_loses_nothing_c40(
    broker: Server, scale: Scale, tmp_path: Path
) -> None:
    with closing(TopicReader(SESSION_ENDED)) as reader:
        keys = [new_id() for _ in range(10)]
        moment = session_ended().created_at
        for version in (2, 3):
            enqueue_one_version(keys, version, moment)

        subprocess.run(
            [*RELAYING, "die", str(scale.kills)],
            cwd=settings.BASE_DIR,
            env=environment(**variables()),
            check=True,
        )
        assert pending() == 20
        with relays(1, tmp_path / "log"):
            wait_for_delivery()
        arrived = reader.read()

    # The first wave has each key once. A relay that dies after it has sent nothing else.
    assert len(arrived) == 10 * scale.kills + 20
    assert set(message_ids(arrived)) == written_message_ids()
    assert set(map(tuple, versions_by_key(arrived).values())) == {(2, 3)}


@pytest.mark.kafka
def test_everything_that_came_while_the_broker_was_away_flows_on_its_return_c43_c45(
    broker: Server, scale: Scale, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """No attempt is spent, and the whole backlog is sent, not only its first message."""
    broker.stop()
    insert_messages(scale.pending // 2, payload=PAYLOAD)
    with relays(2, tmp_path / "log") as supervisor:
        wait_until(OutboxMessage.objects.to_retry().exists, what="the first failure")
        insert_messages(scale.pending // 2, payload=PAYLOAD)
        assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {0}
        before = memory(supervisor)

        broker.start()
        make_topic()
        back = time.monotonic()
        published = OutboxMessage.objects.filter(published_at__isnull=False)
        wait_until(published.exists, what="the first delivery")
        first = time.monotonic() - back
        peak = before
        while pending():
            peak = max(peak, memory(supervisor))
            time.sleep(0.2)
        drained = time.monotonic() - back

    figures = {
        "messages": scale.pending,
        "first_delivery_seconds": round(first, 2),
        "drained_seconds": round(drained, 1),
        "memory_mb": before >> 20,
        "peak_memory_mb": peak >> 20,
    }
    record_property("backlog", figures)
    report(figures)
    assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {0}
    assert peak - before < 64 << 20, "a relay holds a batch, not the backlog"


def memory(supervisor: "subprocess.Popen[bytes]") -> int:
    """Return the memory of the largest relay, in bytes."""
    children = psutil.Process(supervisor.pid).children()
    return max(child.memory_info().rss for child in children)


def report(figures: object) -> None:
    """Print figures for whoever runs the full scale with -s."""
    sys.stdout.write(f"\n{figures}\n")


def delete_topic() -> None:
    """Delete the topic; return when the broker no longer lists it."""
    with closing(KafkaAdminClient(bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)) as admin:
        admin.delete_topics([SESSION_ENDED])
        wait_until(lambda: SESSION_ENDED not in admin.list_topics(), what="the deletion")


@pytest.mark.kafka
@pytest.mark.skipif(not KEEPS_MESSAGES, reason="Tansu acknowledges messages to a deleted topic")
@pytest.mark.parametrize("absent", [False, True], ids=["made again at once", "missed meanwhile"])
def test_topic_made_again_under_a_running_relay_gets_all_that_was_not_sent(
    broker: Server, tmp_path: Path, *, absent: bool
) -> None:
    """The producer knows the old topic only, so the relay makes a new producer."""
    keys = [new_id() for _ in range(50)]
    moment = session_ended().created_at
    with relays(1, tmp_path / "log"):
        for version in (2, 3):  # in two batches, so that the sequence numbers of the producer go on
            enqueue_one_version(keys, version, moment)
            wait_for_delivery()
        delete_topic()
        if absent:
            enqueue_one_version(keys, 4, moment)
            wait_until(OutboxMessage.objects.to_retry().exists, what="the failure")
            enqueue_one_version(keys, 5, moment)
        make_topic()
        enqueue_one_version(keys, 6, moment)
        wait_for_delivery()
    with closing(TopicReader(SESSION_ENDED, whole=True)) as reader:
        arrived = reader.read()

    versions = (4, 5, 6) if absent else (6,)
    assert set(map(tuple, versions_by_key(arrived).values())) == {versions}
    assert len(versions_by_key(arrived)) == len(keys)
    assert set(OutboxMessage.objects.values_list("attempts", "parked_at")) == {(0, None)}


@pytest.mark.kafka
def test_worker_that_gets_sigterm_while_the_broker_is_frozen_ends_in_time_c44(
    broker: Server, tmp_path: Path
) -> None:
    app.control.purge()
    insert_messages(50, payload=PAYLOAD)
    log = tmp_path / "log"
    with running(worker("relay"), log, **variables()) as process:
        relay.delay()
        wait_for_delivery()  # so that the producer is connected
        broker.freeze()
        insert_messages(50, payload=PAYLOAD)
        relay.delay()
        wait_until(is_relay_in_its_transaction, what="a batch in flight")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-2000:]
    assert pending() == 50
    assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {0}

    broker.thaw()
    with relays(1, log):
        wait_for_delivery()


def is_relay_in_its_transaction() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM pg_stat_activity WHERE state = 'idle in transaction'"
            " AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone() is not None


WRITERS, KEYS = 4, 25


class Writer:
    """Writes all versions of its keys, one a transaction, also while PostgreSQL restarts."""

    def __init__(self, versions: int) -> None:
        self.keys = [new_id() for _ in range(KEYS)]
        self.versions = versions
        self.written = 0
        self._moment = session_ended().created_at

    def run(self) -> None:
        try:
            while self.written < self.versions:
                try:
                    enqueue_one_version(self.keys, self.written + 1, self._moment)
                    self.written += 1
                except Error:  # it may have been committed or not
                    connection.close()
                    time.sleep(0.2)
                    self._count_written()
        finally:
            connection.close()

    def _count_written(self) -> None:
        try:
            self.written = OutboxMessage.objects.filter(key=str(self.keys[0])).count()
        except Error:
            connection.close()


@pytest.mark.kafka
def test_chain_from_writers_to_topic_survives_whatever_fails(
    broker: Server, scale: Scale, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    try:
        postgres = attach("postgres")
    except EmbeddedServerError:
        pytest.skip("PostgreSQL is not the embedded one: it cannot be restarted")
    versions = scale.chain_events // (WRITERS * KEYS)
    writers = [Writer(versions) for _ in range(WRITERS)]

    runs: list[Future[None]] = []

    def is_written(part: float) -> bool:
        for run in runs:
            if run.done():
                run.result()  # raises what ended it
        return sum(each.written for each in writers) >= part * WRITERS * versions

    log = tmp_path / "log"
    with (
        closing(TopicReader(SESSION_ENDED)) as reader,
        ThreadPoolExecutor(WRITERS) as pool,
        relays(2, log, lifetime=2.0),
    ):
        runs += [pool.submit(each.run) for each in writers]
        wait_until(partial(is_written, 0.1), seconds=600)
        broker.freeze()
        time.sleep(scale.frozen_seconds)
        broker.thaw()
        if KEEPS_MESSAGES:
            wait_until(partial(is_written, 0.3), seconds=600)
            broker.stop()
            time.sleep(scale.stopped_seconds)
            broker.start()
        wait_until(partial(is_written, 0.5), seconds=600)
        postgres.restart()
        connection.close()
        for run in runs:
            run.result()
        wait_for_delivery(seconds=1800)
        arrived = reader.read()

    ids = message_ids(arrived)
    kills = log.read_text().split()[-2]
    figures = {
        "written": OutboxMessage.objects.count(),
        "arrived": len(ids),
        "repeated": len(ids) - len(set(ids)),
        "kills": int(kills),
    }
    record_property("chain", figures)
    report(figures)
    assert set(ids) == written_message_ids()
    assert len(set(ids)) == scale.chain_events
    expected = list(range(1, versions + 1))
    assert versions_by_key(arrived) == {
        str(key).encode(): expected for each in writers for key in each.keys
    }
    assert message_of_each_version(arrived) == message_of_each_version_written()
    wait_for_backends_to_end()


def message_of_each_version(records: Sequence[Any]) -> set[tuple[str, str, str]]:
    """Return (key, Version, MessageId) of all records, without repeated ones."""
    found = set()
    for record in records:
        headers = dict(record.headers)
        found.add((record.key.decode(), headers["Version"].decode(), headers["MessageId"].decode()))
    return found


def message_of_each_version_written() -> set[tuple[str, str, str]]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT key, headers::json->>'Version', message_id::text FROM outbox_messages"
        )
        return set(cursor.fetchall())
