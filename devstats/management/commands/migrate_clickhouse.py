"""manage.py migrate_clickhouse"""

from contextlib import closing
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from devstats.clickhouse import connect_writer
from devstats.clickhouse_migrations import MigrationsDiffer, migrate
from devstats.management.storage import explained_errors

_TIMEOUT = timedelta(hours=1)
"""A change of a big table, or of a cluster, takes longer than any insert should."""


class Command(BaseCommand):
    help = "Bring ClickHouse's tables up to date; idempotent, also from two processes."

    def handle(self, *args: Any, **options: Any) -> None:
        applied = 0
        with (
            explained_errors(),
            closing(connect_writer(database=None, timeout=_TIMEOUT)) as client,
        ):
            try:
                for migration in migrate(client, cluster=settings.DEV_STATS.cluster):
                    applied += 1
                    self.stdout.write(f"applied {migration.name}")
            except MigrationsDiffer as exc:
                raise CommandError(str(exc)) from exc
        self.stdout.write(f"{applied} migrations applied")
