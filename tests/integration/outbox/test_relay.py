"""The transactions of the relay, and several relays at once."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from pinactivity.core.ids import new_id
from pinactivity.kafka.producer import KafkaPublisher, Message, Publisher
from pinactivity.kafka.topics import SESSION_ENDED
from tests.concurrency import run_together
from tests.outbox import (
    PublisherWithHook,
    RefusingPublisher,
    end_backoffs,
    enqueue_committed,
    enqueue_versions,
    insert_messages,
    make_relay,
    session_ended,
    versions_by_key,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_transaction_takes_four_batches_and_then_commits_their_marks(publisher: Any) -> None:
    insert_messages(100)
    committed: list[Any] = []

    def note(other: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("SELECT count(published_at) FROM outbox_messages")
            committed.append(cursor.fetchone())

    result = make_relay(PublisherWithHook(publisher, 4, note), batch_size=10).run_once()

    assert (result.claimed, result.published) == (40, 40)
    assert committed == [(0,)]
    assert OutboxMessage.objects.pending().count() == 60


def test_slow_broker_gets_one_batch_a_transaction(
    publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay._BEGIN_SECONDS", 0.2)
    insert_messages(30)
    worker = make_relay(PublisherWithHook(publisher, 1, lambda _: time.sleep(0.3)), batch_size=10)

    assert worker.run_once().published == 10
    assert worker.run().published == 20


@pytest.mark.kafka
def test_two_relays_at_once_publish_each_message_once(
    kafka_topics: None, read_topic: Callable[[str], list[Any]]
) -> None:
    for _ in range(10):
        enqueue_committed(*[session_ended() for _ in range(50)])

    def work() -> int:
        publisher = KafkaPublisher(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            delivery_timeout=timedelta(seconds=8),
        )
        try:
            return make_relay(publisher, batch_size=25).run().published
        finally:
            publisher.close()

    assert sum(run_together([work, work])) <= 500
    relay_again = work()
    assert OutboxMessage.objects.filter(published_at__isnull=True).count() == 0, relay_again
    ids = [dict(record.headers)["MessageId"] for record in read_topic(SESSION_ENDED)]
    assert len(ids) == len(set(ids)) == 500


class EverySeventhFails:
    """The real broker's publisher, but every seventh message is not sent.

    Shared by relays in threads, so that it counts what all of them send.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._lock = threading.Lock()

    def around(self, publisher: Publisher) -> Publisher:
        return RefusingPublisher(publisher, self._is_next_to_fail)

    def _is_next_to_fail(self, _: Message) -> bool:
        with self._lock:
            self._sent += 1
            return self._sent % 7 == 0


def relay_until_drained(wrap: Callable[[Publisher], Publisher], **options: Any) -> Counter[str]:
    """Run a relay with a publisher of its own until nothing is pending; end its backoffs."""
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=8)
    )
    worker = make_relay(wrap(publisher), **options)
    counts: Counter[str] = Counter()
    try:
        while OutboxMessage.objects.pending().exists():
            result = worker.run()
            counts += Counter(published=result.published, errors=result.error is not None)
            end_backoffs()
    finally:
        publisher.close()
    return counts


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.kafka)])
def test_order_of_a_key_holds_with_two_relays_when_every_seventh_send_fails_c41(
    kafka_topics: None,
    read_topic: Callable[[str], list[Any]],
    settings: Any,
    shards: int,
) -> None:
    settings.OUTBOX = OutboxOptions(shards=shards)
    keys = [new_id() for _ in range(12)]
    enqueue_versions(keys, range(2, 12))
    failing = EverySeventhFails()
    work = partial(relay_until_drained, failing.around, batch_size=25, shards=shards)

    counts = run_together([work, work])

    assert sum(count["published"] for count in counts) == 120
    assert sum(count["errors"] for count in counts) > 0
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): list(range(2, 12)) for key in keys
    }


@contextmanager
def held_shard(shard: int) -> Iterator[None]:
    """Lock a shard as another relay does."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(
                "SELECT pg_advisory_lock(hashtextextended(%s, 0))",
                [f"Pin:lock:outbox-relay:{shard}"],
            )
        yield
    finally:
        other.close()


def test_shard_that_another_relay_holds_blocks_no_other(publisher: Any, settings: Any) -> None:
    settings.OUTBOX = OutboxOptions(shards=4)
    enqueue_committed(*[session_ended() for _ in range(40)])
    pending = OutboxMessage.objects.pending()
    assert set(pending.values_list("shard", flat=True)) == {3, 4, 5, 6}

    with held_shard(5):
        make_relay(publisher, shards=4).run()
        assert set(pending.values_list("shard", flat=True)) == {5}
    make_relay(publisher, shards=4).run()
    assert not pending.exists()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4)])
def test_order_of_a_key_holds_when_the_number_of_shards_changes(
    publisher: Any,
    read_topic: Callable[[str], list[Any]],
    settings: Any,
    before: int,
    after: int,
) -> None:
    """Writers of both layouts write one version each in turn, as during a deployment."""
    keys = [new_id() for _ in range(10)]
    layouts = [before, after] * 5
    for version, shards in enumerate(layouts, start=2):
        settings.OUTBOX = OutboxOptions(shards=shards)
        enqueue_versions(keys, range(version, version + 1))

    result = make_relay(publisher, batch_size=7, shards=after).run()

    assert result.published == 100
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): list(range(2, 12)) for key in keys
    }


def test_order_of_a_key_holds_when_the_number_of_shards_changes_within_a_transaction(
    publisher: Any, read_topic: Callable[[str], list[Any]], settings: Any
) -> None:
    keys = [new_id() for _ in range(10)]
    settings.OUTBOX = OutboxOptions(shards=1)
    enqueue_versions(keys, range(2, 3))
    is_written = False

    def write_beside_the_mark(
        execute: Any, sql: str, parameters: Any, many: bool, context: Any
    ) -> Any:
        nonlocal is_written
        if sql.startswith("UPDATE") and not is_written:
            is_written = True
            for version, shards in enumerate((4, 1), start=3):
                settings.OUTBOX = OutboxOptions(shards=shards)
                run_together([partial(enqueue_versions, keys, range(version, version + 1))])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(write_beside_the_mark):
        result = make_relay(publisher, batch_size=10, shards=1).run()

    assert result.published == 30
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): [2, 3, 4] for key in keys
    }
