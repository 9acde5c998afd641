"""manage.py parked_messages list | redrive"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from outbox.models import OutboxMessage
from outbox.services import redrive


class Command(BaseCommand):
    help = "List the messages of the outbox that Kafka refused for good, and redrive them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        listing = actions.add_parser("list", help="List the oldest, with their reasons.")
        again = actions.add_parser(
            "redrive",
            help="Send messages again. One that Kafka still refuses is parked again.",
            description="Send messages again. One that Kafka still refuses is parked again."
            " A message arrives after later messages of its key that were sent meanwhile;"
            " consumers compare the header Version.",
        )
        again.add_argument("ids", type=int, nargs="*", metavar="ID", help="As `list` prints them.")
        again.add_argument("--all", action="store_true", help="All parked messages.")
        for action in (listing, again):
            action.add_argument("--topic", help="Only those of this topic.")
            action.add_argument("--reason", help="Only those with this reason.")
            action.add_argument("--limit", type=int, help="At most so many.")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        given = {
            "topic": options["topic"],
            "last_error": options["reason"],
            "id__in": options.get("ids"),
        }
        chosen = {field: value for field, value in given.items() if value}
        parked = OutboxMessage.objects.parked().filter(**chosen).order_by("id")
        if action == "list":
            for message in parked[: options["limit"] or 100]:
                self.stdout.write(
                    f"{message.id:>10}  {message.parked_at:%Y-%m-%d %H:%M:%S}  {message.topic}"
                    f"  {message.key}  {message.last_error}"
                )
            return
        if not (chosen or options["all"]):
            raise CommandError("State which: ids, --topic, --reason or --all.")
        count = redrive(OutboxMessage.objects.filter(**chosen), limit=options["limit"])
        remaining = OutboxMessage.objects.parked().count()
        self.stdout.write(f"{count} on their way, {remaining} parked")
