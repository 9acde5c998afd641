"""Reading topics back, without a group: from where they ended to where they end now."""

from django.conf import settings
from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord

from pinactivity.kafka.topics import find_ends


class TopicReader:
    """Reads everything that arrives in one topic after it was made."""

    def __init__(self, topic: str) -> None:
        self._consumer = KafkaConsumer(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            group_id=None,
            enable_auto_commit=False,
        )
        numbers = self._consumer.partitions_for_topic(topic) or set()
        find_ends(self._consumer, [TopicPartition(topic, number) for number in numbers])

    def read(self) -> list[ConsumerRecord]:
        """Return the records since the last read, by partition and offset."""
        records: list[ConsumerRecord] = []
        while batches := self._consumer.poll(timeout_ms=1000, max_records=5000):
            for batch in batches.values():
                records.extend(batch)
        return sorted(records, key=lambda record: (record.partition, record.offset))

    def close(self) -> None:
        self._consumer.close()
