"""The watermark: it keeps scans short, and passes no message."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import Error, connection

from outbox.models import OutboxMessage
from outbox.relay import OutboxRelay
from pinactivity.core.ids import new_id
from pinactivity.kafka.topics import SESSION_ENDED
from tests.outbox import (
    PublisherWithHook,
    end_other_connections,
    enqueue_committed,
    insert_messages,
    make_relay,
    scan_starts,
    session_ended,
    versions_by_key,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_lower_id_that_commits_late_is_still_sent(publisher: Any) -> None:
    late = connection.copy()
    try:
        late.set_autocommit(False)
        with late.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_messages (message_id, topic, key, headers, payload)"
                " VALUES (%s, %s, 'k', '{}', '{}')",
                [new_id(), SESSION_ENDED],
            )
        enqueue_committed(session_ended())
        assert make_relay(publisher).run().published == 1
        late.commit()
    finally:
        late.close()
    assert make_relay(publisher).run().published == 1


def test_earlier_message_that_commits_late_goes_out_before_its_keys_later_one(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    """The watermark stays below an id whose transaction is still open."""
    worker, late = make_relay(publisher), connection.copy()
    enqueue_committed(session_ended())
    worker.run()
    key = new_id()
    try:
        late.set_autocommit(False)
        with late.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_messages (message_id, topic, key, headers, payload)"
                " VALUES (%s, %s, %s, '{\"Version\": \"2\"}', '{}')",
                [new_id(), SESSION_ENDED, str(key)],
            )
        for _ in range(4):
            enqueue_committed(session_ended())
            assert worker.run().published == 1
        late.commit()
    finally:
        late.close()
    enqueue_committed(session_ended(session_id=key, version=3))

    assert worker.run().published == 2
    assert versions_by_key(read_topic(SESSION_ENDED))[str(key).encode()] == [2, 3]


def test_scan_starts_at_the_watermark(publisher: Any) -> None:
    """While a snapshot is held the index keeps entries of what was sent; the scan skips these."""
    worker = make_relay(publisher, batch_size=50)
    insert_messages(400)

    starts = scan_starts(worker.run)

    assert not OutboxMessage.objects.pending().exists()
    ids = list(OutboxMessage.objects.order_by("id").values_list("id", flat=True))
    assert len(starts) == 9
    assert starts == [0, 0, 0, *ids[49:300:50]]


def test_relay_that_loses_a_transaction_keeps_its_watermark(publisher: Any) -> None:
    insert_messages(50)
    worker = make_relay(PublisherWithHook(publisher, 4, end_other_connections), batch_size=10)

    with pytest.raises(Error):
        worker.run_once()
    connection.close()

    assert OutboxMessage.objects.pending().count() == 50
    results: list[Any] = []
    starts = scan_starts(lambda: results.append(worker.run()))
    assert starts[:3] == [0, 0, 0]
    assert results[0].published == 50


def pages_read(worker: OutboxRelay) -> int:
    """Run a relay; return how many pages the statements of its first transaction read."""
    pages: list[int] = []

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if 'FROM "outbox_messages"' in sql:
            execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", parameters, many, context)
            plan = context["cursor"].fetchone()[0][0]["Plan"]
            pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        worker.run_once()
    worker.run()
    return sum(pages)


def test_scan_reads_no_more_pages_while_a_snapshot_is_held_c47(publisher: Any) -> None:
    """The index keeps an entry of every message sent since; the bench `relay` measures the rate."""
    worker, other = make_relay(publisher), connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM outbox_messages")
            pages = []
            for _ in range(12):
                insert_messages(500)
                pages.append(pages_read(worker))
            insert_messages(500)
            from_the_first = pages_read(make_relay(publisher))
    finally:
        other.close()

    assert max(pages[-4:]) < 2 * max(pages[:4])
    assert from_the_first > 2 * max(pages), "the snapshot kept no entries"
    assert not OutboxMessage.objects.pending().exists()
