"""manage.py create_topics"""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from kafka.errors import KafkaError

from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topic_admin import create_topics
from pinactivity.kafka.topics import TOPICS, dead_letter_topics


class Command(BaseCommand):
    help = "Create missing Kafka topics: ours, our neighbours' and the dead-letter topics."

    def handle(self, *args: Any, **options: Any) -> None:
        wanted = (*TOPICS, *dead_letter_topics(registered_consumers().values()))
        try:
            created = create_topics(
                wanted,
                bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
                partitions=settings.KAFKA_TOPIC_PARTITIONS,
                replication=settings.KAFKA_TOPIC_REPLICATION,
                retention=settings.KAFKA_TOPIC_RETENTION,
            )
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka refused: {type(exc).__name__}") from exc
        for name in created:
            self.stdout.write(f"created {name}")
        self.stdout.write(f"{len(created)} created, {len(wanted) - len(created)} existed")
