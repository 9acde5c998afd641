"""manage.py dead_letters list | show | redrive"""

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from kafka.errors import KafkaError

from pinactivity.kafka.dead_letter_topics import DeadLetterTopics, RedriveFailed, describe_record
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topic_admin import MAX_DEAD_LETTER_BYTES
from pinactivity.kafka.topics import dead_letter_topics
from pinactivity.process.stopping import stop_on_signals


class Command(BaseCommand):
    help = "Show the messages that consumers could not handle, and redrive them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="Topics with how many records they hold, by reason.")
        show = actions.add_parser("show", help="One record with its headers and value.")
        show.add_argument("topic")
        show.add_argument("partition", type=int)
        show.add_argument("offset", type=int)
        redrive = actions.add_parser(
            "redrive",
            help="Publish records again to the topic that they came from, each once.",
            description="Publish records again to the topic that they came from, each once, also"
            " after an interruption. Every group that reads that topic gets them again;"
            " consumers recognise a repeated message by its MessageId. Correct the cause first: a"
            " message that still cannot be handled becomes a new dead-letter record.",
        )
        redrive.add_argument("topic", help="The dead-letter topic.")
        redrive.add_argument("--reason", help="Only records with this dlq-reason.")
        redrive.add_argument("--limit", type=int, help="At most so many.")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        dead_letters = DeadLetterTopics(bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)
        try:
            match action:
                case "list":
                    self._list(dead_letters)
                case "show":
                    self._show(
                        dead_letters, options["topic"], options["partition"], options["offset"]
                    )
                case "redrive":
                    self._redrive(
                        dead_letters, options["topic"], options["reason"], options["limit"]
                    )
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka does not answer: {type(exc).__name__}") from exc

    def _list(self, dead_letters: DeadLetterTopics) -> None:
        topics = dead_letter_topics(registered_consumers().values())
        for topic, reasons in dead_letters.count(topics).items():
            shares = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
            self.stdout.write(f"{sum(reasons.values()):>8}  {topic}  {shares}".rstrip())

    def _show(
        self, dead_letters: DeadLetterTopics, topic: str, partition: int, offset: int
    ) -> None:
        record = dead_letters.find(topic, partition=partition, offset=offset)
        if record is None:
            raise CommandError(f"There is no record at {topic}/{partition}/{offset}.")
        self.stdout.write(describe_record(record))

    def _redrive(
        self, dead_letters: DeadLetterTopics, topic: str, reason: str | None, limit: int | None
    ) -> None:
        if limit is not None and limit < 1:
            raise CommandError("--limit must be at least 1.")
        publisher = KafkaPublisher(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            delivery_timeout=timedelta(seconds=10),
            client_id="pinactivity-redrive",
            most_bytes=MAX_DEAD_LETTER_BYTES,
        )
        try:
            with stop_on_signals() as stop:
                done = dead_letters.redrive(
                    topic, publisher=publisher, reason=reason, limit=limit, stop=stop.is_set
                )
        except RedriveFailed as exc:
            raise CommandError(str(exc)) from exc
        finally:
            publisher.close()
        self.stdout.write(f"{done.published} published again, {done.remaining} remain")
