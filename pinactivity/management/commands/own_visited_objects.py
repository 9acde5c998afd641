"""manage.py own_visited_objects FILE"""

from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError

from devstats.management.storage import opened_writer
from devstats.models import DeveloperAccess
from devstats.ownership import PropertyObject
from devstats.property_objects import store_objects
from pinactivity.demo.replay import (
    UnreadableVisits,
    developer_id,
    owner_of_page,
    property_object_id,
    read_visits,
)
from pinactivity.management.demonstration import add_database_argument, require_demonstration

_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)


class Command(BaseCommand):
    help = (
        "For a demonstration: give the objects of recorded visits owners, before replay_visits"
        " plays them, and one user access to the first developer. Idempotent."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        add_database_argument(parser)
        parser.add_argument("--reader", metavar="NAME", help="Who may see developer 1.")

    def handle(self, *args: Any, file: Path, reader: str | None, **options: Any) -> None:
        require_demonstration(options["database_name"])
        try:
            visits = read_visits(file)
        except UnreadableVisits as exc:
            raise CommandError(str(exc)) from exc
        objects = [
            PropertyObject(property_object_id(page), developer_id(owner), None, _ALWAYS)
            for page in sorted({visit.page for visit in visits if visit.page is not None})
            if (owner := owner_of_page(page))
        ]
        with opened_writer() as writer:
            added = store_objects(writer, objects)
        self.stdout.write(f"{added} objects given owners, {len(objects) - added} had theirs")
        if reader is None:
            return
        try:
            user = User.objects.get(username=reader)
        except User.DoesNotExist:
            raise CommandError("There is no user of this name.") from None
        DeveloperAccess.objects.get_or_create(user=user, developer_id=developer_id(1))
