"""Which batch the relay reads next, and what it prefetches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from structlog.testing import capture_logs

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.retention import purge_published
from outbox.selectors import outbox_snapshot
from pinactivity.core.ids import new_id
from pinactivity.kafka.producer import Message
from pinactivity.kafka.topics import SESSION_ENDED
from tests.outbox import (
    RefusingPublisher,
    end_backoffs,
    enqueue_versions,
    insert_messages,
    make_relay,
    versions_by_key,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_failed_prefetch_keeps_what_was_sent(publisher: Any) -> None:
    insert_messages(25)
    odd = OutboxMessage.objects.order_by("id")[14]
    OutboxMessage.objects.filter(id=odd.id).update(headers='"no object"')
    worker = make_relay(publisher, batch_size=10)

    with capture_logs() as logs:
        assert worker.run_once().published == 10

    assert OutboxMessage.objects.pending().count() == 15
    assert [line["event"] for line in logs] == ["prefetch failed"]
    with pytest.raises(AttributeError):
        worker.run_once()


@pytest.mark.kafka
def test_failure_in_a_batch_drops_the_prefetched_one(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    keys = [new_id() for _ in range(10)]
    enqueue_versions(keys, range(2, 6))

    def is_third_version_of_one(message: Message) -> bool:
        version = dict(message.headers)["Version"]
        return (message.key, version) == (str(keys[3]).encode(), b"3")

    result = make_relay(
        RefusingPublisher(publisher, is_third_version_of_one), batch_size=10
    ).run_once()

    assert (result.claimed, result.published, result.is_blocked) == (20, 19, True)
    assert OutboxMessage.objects.pending().count() == 21
    end_backoffs()
    assert make_relay(publisher, batch_size=10).run().published == 21
    assert versions_by_key(read_topic(SESSION_ENDED)) == {
        str(key).encode(): [2, 3, 4, 5] for key in keys
    }


def plans_of(call: Callable[[], object]) -> dict[str, set[str]]:
    """Run a call; return its statements on the outbox, each with the node types of its plan."""
    plans: dict[str, set[str]] = {}

    def nodes(plan: dict[str, Any]) -> Iterator[str]:
        yield plan["Node Type"]
        for part in plan.get("Plans", ()):
            yield from nodes(part)

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if "outbox_messages" in sql and "pg_locks" not in sql:
            execute(f"EXPLAIN (FORMAT JSON) {sql}", parameters, many, context)
            plans[sql] = set(nodes(context["cursor"].fetchone()[0][0]["Plan"]))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        call()
    return plans


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE outbox_messages")


@pytest.mark.parametrize("analyzed", ["empty", "all published", "as it is", "never"])
def test_reading_stays_an_index_scan_whatever_the_statistics_say(
    publisher: Any, analyzed: str
) -> None:
    if analyzed == "empty":
        analyze()
    insert_messages(5_000, published=True)
    if analyzed == "all published":
        analyze()
    insert_messages(5_000)
    if analyzed == "as it is":
        analyze()

    plans = plans_of(make_relay(publisher, batch_size=50).run_once)
    plans |= plans_of(lambda: purge_published(OutboxOptions()))
    plans |= plans_of(outbox_snapshot)

    assert len(plans) >= 7
    scans = {node for nodes in plans.values() for node in nodes if "Scan" in node or node == "Sort"}
    assert scans <= {"Index Scan", "Index Only Scan", "CTE Scan"}, plans
