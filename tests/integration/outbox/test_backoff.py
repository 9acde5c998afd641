"""What a failure blocks and for how long; parked messages."""

import io
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox.models import OutboxMessage
from outbox.services import enqueue, redrive
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import DeliveryError, Message
from pinactivity.kafka.topics import SESSION_ENDED
from pinactivity.postgres.clock import statement_time
from sessions.events import SessionLinked
from tests.outbox import (
    RefusingPublisher,
    end_backoffs,
    enqueue_committed,
    make_relay,
    session_ended,
    versions_by_key,
)

pytestmark = pytest.mark.django_db(transaction=True)


class OneTopicIsGone:
    """A broker that has lost one topic. The embedded one creates topics, so it cannot."""

    def __init__(self, publisher: Any, topic: str) -> None:
        self._publisher, self._topic = publisher, topic

    def publish(self, messages: Any) -> Any:
        there = [message for message in messages if message.topic != self._topic]
        answers = iter(self._publisher.publish(there))
        gone = DeliveryError("KafkaTimeoutError", is_permanent=False)
        return [gone if m.topic == self._topic else next(answers) for m in messages]

    def is_reachable(self) -> bool:
        return True


def test_topic_that_cannot_be_sent_to_blocks_no_other(publisher: Any) -> None:
    linked = SessionLinked(
        session_id=new_id(),
        anonymous_id=new_id(),
        user_id=new_id(),
        linked_at=iso_utc(statement_time()),
        version=2,
    )
    ended_later = session_ended(session_id=linked.session_id, version=3)
    with transaction.atomic():
        enqueue([linked, session_ended(), ended_later, session_ended()])

    result = make_relay(OneTopicIsGone(publisher, SessionLinked.TOPIC)).run()

    assert (result.published, result.error) == (2, "KafkaTimeoutError")
    pending = OutboxMessage.objects.filter(published_at__isnull=True)
    assert set(pending.values_list("key", flat=True)) == {str(linked.session_id)}
    assert pending.count() == 2, "a later message overtook its key's earlier one"
    assert set(pending.values_list("attempts", flat=True)) == {0}
    end_backoffs()
    assert make_relay(publisher).run().published == 2


def test_backoff_of_a_poisoned_message_is_in_its_row_and_all_relays_keep_to_it_c46(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    poisoned = new_id()
    enqueue_committed(
        *[session_ended() for _ in range(5)],
        session_ended(session_id=poisoned, version=2),
        session_ended(session_id=poisoned, version=3),
        *[session_ended() for _ in range(5)],
    )
    tried: list[bytes | None] = []

    def fails(message: Message) -> bool:
        if message.key == str(poisoned).encode():
            tried.append(dict(message.headers)["Version"])
            return True
        return False

    relays = [make_relay(RefusingPublisher(publisher, fails)) for _ in range(5)]
    first = OutboxMessage.objects.filter(key=str(poisoned)).earliest("id")
    delays: list[timedelta] = []
    for attempt in range(1, 9):
        enqueue_committed(session_ended())
        for each in relays:
            each.run()
        first.refresh_from_db()
        assert len(tried) == attempt == first.attempts, "one attempt, whichever relay made it"
        assert first.next_attempt_at is not None
        delays.append(first.next_attempt_at - statement_time())
        end_backoffs()

    assert set(tried) == {b"2"}, "the key's later message never overtook it"
    assert first.last_error == "CorruptRecordError"
    assert first.delivery == "Retrying (CorruptRecordError)"
    longest = [timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]
    assert all(delay <= most for delay, most in zip(delays, longest, strict=True))
    assert delays[-1] > timedelta(seconds=30)
    assert OutboxMessage.objects.filter(published_at=None).count() == 2, "all others went out"

    make_relay(publisher).run()
    assert versions_by_key(read_topic(SESSION_ENDED))[str(poisoned).encode()] == [2, 3]


def test_message_refused_once_is_sent_singly(publisher: Any) -> None:
    """The broker refuses a whole request, so one bad message must not fail its neighbours again."""
    enqueue_committed(*[session_ended() for _ in range(10)])
    batches: list[int] = []

    class Refusing(RefusingPublisher):
        def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
            batches.append(len(messages))
            return super().publish(messages)

    keys = OutboxMessage.objects.order_by("id").values_list("key", flat=True)
    neighbours = {key.encode() for key in keys[3:6]}
    make_relay(Refusing(publisher, lambda message: message.key in neighbours)).run()
    end_backoffs()
    make_relay(Refusing(publisher, lambda _: False)).run()

    assert batches == [10, 1, 1, 1]
    assert not OutboxMessage.objects.pending().exists()


def test_backoff_for_the_broker_is_shared_and_ends_when_it_is_back(publisher: Any) -> None:
    class Away:
        asked = 0
        is_back = False

        def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
            if self.is_back:
                return publisher.publish(messages)  # type: ignore[no-any-return]  # a fixture's
            self.asked += 1
            return [DeliveryError("NoBrokersAvailable", is_permanent=False)] * len(messages)

        def is_reachable(self) -> bool:
            return self.is_back

        def close(self) -> None: ...

    away = Away()
    relays = [make_relay(away) for _ in range(3)]
    enqueue_committed(*[session_ended() for _ in range(3)])
    for each in relays:
        enqueue_committed(session_ended())
        each.run()
    assert away.asked == 1, "one relay sent, and all back off with it"
    messages = OutboxMessage.objects.pending()
    assert list(messages.values_list("attempts", flat=True)) == [0] * 6

    away.is_back = True
    assert relays[1].run().published == 6


@pytest.mark.kafka
def test_message_that_cannot_be_sent_is_parked_and_redriven_by_command(
    publisher: Any, read_topic: Callable[[str], list[Any]]
) -> None:
    enqueue_committed(session_ended(), session_ended())
    unsendable = OutboxMessage.objects.earliest("id")
    OutboxMessage.objects.filter(id=unsendable.id).update(topic="not a topic's name")

    worker = make_relay(publisher)
    result = worker.run()

    assert (result.published, result.parked, result.error) == (1, 1, None)
    unsendable.refresh_from_db()
    assert (unsendable.attempts, unsendable.delivery) == (1, f"Parked ({unsendable.last_error})")
    with pytest.raises(CommandError, match="which"):
        run_command("redrive")
    assert f"{unsendable.id}" in run_command("list")
    assert run_command("redrive", "--reason", "Another") == "0 on their way, 1 parked\n"
    assert run_command("redrive", str(unsendable.id)) == "1 on their way, 0 parked\n"

    assert worker.run().parked == 1, "Kafka still refuses it"
    OutboxMessage.objects.filter(id=unsendable.id).update(topic=SESSION_ENDED)
    assert run_command("redrive", "--all") == "1 on their way, 0 parked\n"
    assert worker.run().published == 1, "although its id is below the watermark"
    assert len(read_topic(SESSION_ENDED)) == 2


def run_command(*arguments: str) -> str:
    output = io.StringIO()
    call_command("parked_messages", *arguments, stdout=output)
    return output.getvalue()


def test_redrive_changes_parked_messages_only() -> None:
    enqueue_committed(*[session_ended() for _ in range(4)])
    moment = statement_time()
    first, _, third, fourth = OutboxMessage.objects.order_by("id")
    OutboxMessage.objects.filter(id=first.id).update(published_at=moment)
    OutboxMessage.objects.filter(id__in=[third.id, fourth.id]).update(parked_at=moment)
    assert redrive(OutboxMessage.objects.all(), limit=1) == 1
    assert [message.delivery.split()[0] for message in OutboxMessage.objects.order_by("id")] == [
        "Published",
        "Pending",
        "Retrying",
        "Parked",
    ]
