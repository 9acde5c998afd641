"""Topics of the real broker: filled from the outbox, read back, and left to be.

Reading needs no group: from where a topic ended to where it ends now.
"""

import time
from datetime import UTC, datetime, timedelta

from django.conf import settings
from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord

from outbox.models import OutboxMessage
from outbox.options import OutboxOptions
from outbox.relay import OutboxRelay
from pinactivity.kafka.offsets import GroupBusy, move_offsets
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.topic_admin import find_ends


class TopicReader:
    """Reads everything that arrives in some topics after this was made.

    Args:
        whole: Read what is in the topics already too.
    """

    def __init__(self, *topics: str, whole: bool = False) -> None:
        self._consumer = KafkaConsumer(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            group_id=None,
            enable_auto_commit=False,
        )
        self._parts = [
            TopicPartition(topic, number)
            for topic in topics
            for number in self._consumer.partitions_for_topic(topic) or ()
        ]
        find_ends(self._consumer, self._parts)
        if whole:
            self._consumer.seek_to_beginning(*self._parts)

    def read(self) -> list[ConsumerRecord]:
        """Return the records since the last read, by topic, partition and offset."""
        records: list[ConsumerRecord] = []
        # Silence alone may be a connection that is made again; the end alone is short of what the
        # embedded broker has.
        ends = self._consumer.end_offsets(self._parts)
        deadline = time.monotonic() + 60
        while (batches := self._consumer.poll(timeout_ms=1000, max_records=5000)) or any(
            self._consumer.position(part) < end for part, end in ends.items()
        ):
            for batch in batches.values():
                records.extend(batch)
            assert time.monotonic() < deadline, "the broker keeps records back"
        return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))

    def close(self) -> None:
        self._consumer.close()


def publish_outbox() -> None:
    """Publish everything that the outbox holds."""
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=30)
    )
    try:
        OutboxRelay(publisher=publisher, options=OutboxOptions()).run()
    finally:
        publisher.close()
    assert not OutboxMessage.objects.filter(published_at__isnull=True).exists()


def skip_to_end(topics: tuple[str, ...], group: str) -> None:
    """Let a group go on at the end of its topics."""
    go_on_from(topics, group, datetime.now(UTC) + timedelta(days=1))


def go_on_from(topics: tuple[str, ...], group: str, since: datetime) -> None:
    """Let a group go on at a time; waits until killed members are forgotten."""
    deadline = time.monotonic() + 60
    while True:
        try:
            move_offsets(
                bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
                topics=topics,
                group=group,
                since=since,
            )
        except GroupBusy:
            assert time.monotonic() < deadline, f"{group} has members"
            time.sleep(0.5)
        else:
            return
