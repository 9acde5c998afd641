"""manage.py ensure_admin NAME"""

import os
from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Create a superuser of the admin, unless the name exists; harmless twice."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="The password is in DJANGO_SUPERUSER_PASSWORD.")

    def handle(self, *args: Any, name: str, **options: Any) -> None:
        users = User.objects
        if users.filter(username=name).exists():
            self.stdout.write(f"{name} existed")
            return
        password = os.environ.get("DJANGO_SUPERUSER_PASSWORD")
        if not password:
            raise CommandError("Set DJANGO_SUPERUSER_PASSWORD.")
        users.create_superuser(username=name, password=password)
        self.stdout.write(f"{name} created")
