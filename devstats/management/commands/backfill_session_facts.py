"""manage.py backfill_session_facts --from .. --to .."""

from argparse import ArgumentParser
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error
from tqdm import tqdm

from devstats.backfill import backfill_sessions
from devstats.management.storage import opened_writer
from pinactivity.core.error_info import describe_error
from pinactivity.http.periods import parse_moment
from sessions.selectors import ended_session_chunks, ended_sessions


class Command(BaseCommand):
    help = (
        "Add the facts of the sessions that PostgreSQL has, by when they ended: for events that"
        " were lost, or that are older than their topic. Readers count a session that was consumed"
        " too once. Idempotent."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        bound = "A date (midnight UTC) or an ISO 8601 time with an offset; half-open."
        parser.add_argument("--from", dest="since", type=parse_moment, required=True, help=bound)
        parser.add_argument("--to", dest="until", type=parse_moment, required=True, help=bound)

    def handle(self, *args: Any, since: datetime, until: datetime, **options: Any) -> None:
        if since >= until:
            raise CommandError("--from must be before --to.")
        added = 0
        try:
            total = ended_sessions(since=since, until=until).count()
            with (
                opened_writer() as writer,
                tqdm(total=total, desc="backfill", unit=" sessions", disable=None) as bar,
            ):
                for chunk in ended_session_chunks(since=since, until=until):
                    backfill_sessions(writer, chunk)
                    added += len(chunk)
                    bar.update(len(chunk))
        except Error as exc:
            raise CommandError(
                f"PostgreSQL is away or busy ({describe_error(exc)['errorClass']}). What was"
                " written stays: run the command again."
            ) from exc
        self.stdout.write(f"{added} sessions added")
