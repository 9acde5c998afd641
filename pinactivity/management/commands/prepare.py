"""manage.py prepare"""

import os
from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Migrate both databases, create the topics and, if asked, an admin user; idempotent."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--admin",
            metavar="NAME",
            help="Superuser to create if there is none, by DJANGO_SUPERUSER_PASSWORD.",
        )

    def handle(self, *args: Any, admin: str | None, **options: Any) -> None:
        call_command("migrate", verbosity=options["verbosity"], stdout=self.stdout)
        call_command("migrate_clickhouse", stdout=self.stdout)
        call_command("create_topics", stdout=self.stdout)
        if admin is None or User.objects.filter(username=admin).exists():
            return
        password = os.environ.get("DJANGO_SUPERUSER_PASSWORD")
        if not password:
            raise CommandError("Set DJANGO_SUPERUSER_PASSWORD.")
        User.objects.create_superuser(username=admin, password=password)
        self.stdout.write(f"created the admin user {admin}")
