"""manage.py show_topic NAME"""

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from pinactivity.kafka.dead_letter_topics import describe_record
from pinactivity.kafka.source import to_record


class Command(BaseCommand):
    help = "Print a topic's messages, one JSON object a line; joins no group and moves no offset."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument("--key", help="Only messages with this key (an AggregateId).")
        parser.add_argument("--limit", type=int, default=100, help="At most so many (100).")

    def handle(self, *args: Any, topic: str, key: str | None, limit: int, **options: Any) -> None:
        try:
            self._print(topic, key, limit)
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka does not answer: {type(exc).__name__}") from exc

    def _print(self, topic: str, key: str | None, limit: int) -> None:
        consumer = KafkaConsumer(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            group_id=None,
            bootstrap_timeout_ms=10_000,
        )
        try:
            numbers = consumer.partitions_for_topic(topic)
            if not numbers:
                raise CommandError(f"There is no topic {topic}.")
            consumer.assign([TopicPartition(topic, number) for number in numbers])
            consumer.seek_to_beginning()
            printed = 0
            while batches := consumer.poll(timeout_ms=1000):
                for record in (record for batch in batches.values() for record in batch):
                    if key is not None and record.key != key.encode():
                        continue
                    if printed == limit:
                        return
                    self.stdout.write(describe_record(to_record(record)))
                    printed += 1
        finally:
            consumer.close()
