"""manage.py rebuild_view_stats"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error, connection
from tqdm import tqdm

from pinactivity.core.error_info import describe_error
from views.stats import Comparison, RebuildResult, rebuild_stats

_DRIFT = 3
_SHOWN = 20
_ESTIMATED_VIEWS = """
    SELECT nullif(reltuples, -1)::bigint FROM pg_class
    WHERE oid = 'property_object_views'::regclass
"""

_DESCRIPTION = """\
Recompute the view statistics from the views, report the drift, and repair it.

An object's totals are those of its closed views, plus those of the views that
retention has deleted (purged_*). A view counts when its event has been handled.

  drift       stored totals differ from those of the counted views
  under way   closed views whose event has not been handled yet. This is no drift;
              but if their number does not fall, events were lost or dead-lettered

The repair also counts the views under way, and marks every view that it counts as
seen: a later or repeated event adds nothing. So it is safe beside running consumers
and after lost events. It locks only what it rewrites, 100 objects at a time. After
an interruption, run it again.

Exit codes: 0 no drift, or all of it repaired; 1 the database was unavailable or busy;
3 there is drift, and --dry-run did not repair it.
"""


class Command(BaseCommand):
    help = _DESCRIPTION

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter  # a table, not prose
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="Report, write nothing.")

    def handle(self, *args: Any, dry_run: bool, **options: Any) -> None:
        try:
            result = _rebuild(repair=not dry_run)
        except Error as exc:
            raise CommandError(
                f"PostgreSQL is away or busy ({describe_error(exc)['errorClass']}). What was"
                " rewritten stays: run the command again."
            ) from exc
        self._report(result)
        if not dry_run:
            self.stdout.write(f"{result.rewritten} objects rewritten")
        elif result.drifting:
            raise CommandError("Nothing was written (--dry-run).", returncode=_DRIFT)

    def _report(self, result: RebuildResult) -> None:
        self.stdout.write(
            f"{result.objects} objects, {result.views} closed views:"
            f" {len(result.drifting)} objects drift, {result.under_way} views are under way"
        )
        for each in result.drifting[:_SHOWN]:
            self.stdout.write(_describe(each))
        if len(result.drifting) > _SHOWN:
            self.stdout.write(f"  .. and {len(result.drifting) - _SHOWN} more")


def _rebuild(*, repair: bool) -> RebuildResult:
    with connection.cursor() as cursor:
        # An object with a million views takes longer than the service's statement timeout.
        cursor.execute("SET statement_timeout = '1h'")
        cursor.execute(_ESTIMATED_VIEWS)
        (views,) = cursor.fetchone()
    with tqdm(total=views, desc="rebuild", unit=" views", disable=None) as bar:
        return rebuild_stats(repair=repair, advance=bar.update)


def _describe(each: Comparison) -> str:
    stored, expected = each.stored, each.expected
    return (
        f"  {each.property_object_id}"
        f"  views {stored.views_count} -> {expected.views_count}"
        f"  seconds {stored.total_duration_seconds} -> {expected.total_duration_seconds}"
        f"  last {stored.last_viewed_at} -> {expected.last_viewed_at}"
    )
