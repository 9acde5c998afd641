"""manage.py show_activity"""

import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db.models import Count
from kafka.errors import KafkaError

from outbox.models import OutboxMessage
from outbox.selectors import outbox_snapshot
from pinactivity.kafka.topic_admin import count_messages
from pinactivity.kafka.topics import TOPICS
from sessions.models import Session
from views.models import PropertyObjectView


class Command(BaseCommand):
    help = "Count sessions, views, outbox messages and topics; reads all of PostgreSQL and Kafka."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--wait", type=int, default=0, help="Seconds to wait until the outbox is drained."
        )

    def handle(self, *args: Any, wait: int, **options: Any) -> None:
        deadline = time.monotonic() + wait
        while outbox_snapshot().pending and time.monotonic() < deadline:
            time.sleep(0.2)
        for name, model in (("sessions", Session), ("views", PropertyObjectView)):
            rows = model.objects.values_list("status").order_by("status")
            counts = [f"{count} {status}" for status, count in rows.annotate(Count("id"))]
            self._line(name, ", ".join(counts) or "none")
        outbox = outbox_snapshot()
        published = OutboxMessage.objects.filter(published_at__isnull=False).count()
        self._line(
            "outbox", f"{published} published, {outbox.pending} pending, {outbox.parked} parked"
        )
        try:
            counts_by_topic = count_messages(
                TOPICS, bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS
            )
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka does not answer: {type(exc).__name__}") from exc
        for topic, messages in counts_by_topic.items():
            self._line(topic, f"{messages} messages")

    def _line(self, name: str, text: str) -> None:
        self.stdout.write(f"{name:<50} {text}")
