"""manage.py reconcile --from .. --to .. [--repair] [--json]"""

import json
import sqlite3
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error
from kafka.errors import KafkaError
from tqdm import tqdm

from devstats.management.storage import opened_writer
from devstats.reconciliation.compare import reconcile
from devstats.reconciliation.report import Count, Report
from devstats.writer import FactWriter
from pinactivity.core.error_info import describe_error
from pinactivity.core.times import iso_utc
from pinactivity.http.periods import parse_moment

_LOST = 1
_NO_ANSWER = 2

_COLUMNS = ("closed", "outbox", "offsets", "facts", "lost", "duplicated", "late", "not comparable")

_DESCRIPTION = """\
Compare what ended in PostgreSQL with the outbox, Kafka and ClickHouse, by topic and hour.

A message is found by its id in each store, and belongs to the hour (UTC) in which its session or
view ended: by the row; without one by the event's CreatedAt; a fact that nothing else is left of
by its LastActivityAt.

  closed          rows in PostgreSQL (kept for ACTIVITY_RETENTION_AGE)
  outbox          messages in the outbox (published ones are kept for OUTBOX_PUBLISHED_KEPT)
  offsets         messages in Kafka (kept for the topic's retention)
  facts           distinct sessions or views in ClickHouse
  lost            no fact, and none to come: parked messages and dead letters too: they are
                  not stored before somebody acts; the reasons are listed below the table
  duplicated      offsets beyond one for each message; no reader counts them
  late            no fact yet, but pending in the outbox, or unread by the consumers' group
  not comparable  stored, but so old that PostgreSQL, the outbox or Kafka no longer has it

Exit codes: 0 nothing is lost; 1 something is, after the repair if there was one;
2 a store does not answer, or the arguments make no sense.
"""


class Command(BaseCommand):
    help = _DESCRIPTION

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter  # a table, not prose
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        bound = "A date (midnight UTC) or an ISO 8601 time with an offset; half-open."
        parser.add_argument("--from", dest="since", type=parse_moment, required=True, help=bound)
        parser.add_argument("--to", dest="until", type=parse_moment, required=True, help=bound)
        parser.add_argument(
            "--repair",
            action="store_true",
            help="Add the facts of lost rows from PostgreSQL, then count again. Idempotent.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(
        self, *args: Any, since: datetime, until: datetime, repair: bool, **options: Any
    ) -> None:
        if since >= until:
            raise CommandError("--from must be before --to.", returncode=_NO_ANSWER)
        repaired = 0
        with _explained_errors(), opened_writer() as writer:
            report = _reconcile(writer, since, until, repair=repair)
            if repair and (found := report.total()).lost:
                repaired = found.lost.total() - found.unrepairable
                report = _reconcile(writer, since, until, repair=False)
        if options["json"]:
            self.stdout.write(json.dumps(_as_json(report, repaired)))
        else:
            self._print(report)
            if repair:
                self.stdout.write(f"{repaired} facts added from PostgreSQL")
        total = report.total()
        if total.lost:
            hint = f" {total.unrepairable} of them have no row to repair from." * bool(
                total.unrepairable
            )
            raise CommandError(f"{_reasons(total.lost)} lost.{hint}", returncode=_LOST)

    def _print(self, report: Report) -> None:
        titles = {topic for topic, _ in report.counts}
        for topic in sorted(titles):
            self.stdout.write(topic)
            self.stdout.write(f"  {'hour':<17}" + "".join(f"{name:>16}" for name in _COLUMNS))
            for hour, count in _hours(report, topic):
                self.stdout.write(f"  {hour:%Y-%m-%dT%H:%MZ}" + _cells(count))
            self.stdout.write(f"  {'total':<17}" + _cells(report.total(topic)))
        total = report.total()
        for reason, number in sorted(total.lost.items()):
            self.stdout.write(f"lost: {number} {reason}")
        self.stdout.write(
            f"lost {total.lost.total()}, duplicated {total.duplicated}, late {total.late},"
            f" not comparable {total.not_comparable}"
        )


def _reconcile(writer: FactWriter, since: datetime, until: datetime, *, repair: bool) -> Report:
    with tqdm(desc="repair" if repair else "reconcile", unit=" rows", disable=None) as bar:
        return reconcile(writer, since=since, until=until, repair=repair, advance=bar.update)


def _hours(report: Report, topic: str) -> list[tuple[datetime, Count]]:
    return sorted(
        ((hour, count) for (name, hour), count in report.counts.items() if name == topic),
        key=lambda pair: pair[0],
    )


def _totals(count: Count) -> tuple[int, ...]:
    return (
        count.closed,
        count.outbox,
        count.kafka,
        count.facts,
        count.lost.total(),
        count.duplicated,
        count.late,
        count.not_comparable,
    )


def _cells(count: Count) -> str:
    return "".join(f"{total:>16}" for total in _totals(count))


def _reasons(lost: Counter[Any]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(lost.items()))


def _as_json(report: Report, repaired: int) -> dict[str, Any]:
    def named(count: Count) -> dict[str, Any]:
        names = ("Closed", "Outbox", "Offsets", "Facts", "Lost", "Duplicated", "Late")
        totals = zip((*names, "NotComparable"), _totals(count), strict=True)
        return {**dict(totals), "LostBecause": {str(why): n for why, n in count.lost.items()}}

    return {
        "From": iso_utc(report.since),
        "To": iso_utc(report.until),
        "Repaired": repaired,
        "Total": named(report.total()),
        "Hours": [
            {"Topic": topic, "Hour": iso_utc(hour), **named(count)}
            for (topic, hour), count in sorted(report.counts.items())
        ],
    }


@contextmanager
def _explained_errors() -> Iterator[None]:
    """Report which store does not answer, by an exit code that is not that of a loss."""
    try:
        yield
    except CommandError as exc:  # ClickHouse's, from `opened_writer`
        raise CommandError(str(exc), returncode=_NO_ANSWER) from exc
    except Error as exc:
        raise CommandError(
            f"PostgreSQL is away or busy ({describe_error(exc)['errorClass']}).",
            returncode=_NO_ANSWER,
        ) from exc
    except sqlite3.Error as exc:
        raise CommandError(
            "The file of the offsets cannot be written: make room, or set TMPDIR.",
            returncode=_NO_ANSWER,
        ) from exc
    except (KafkaError, OSError) as exc:
        raise CommandError(
            f"Kafka does not answer: {type(exc).__name__}.", returncode=_NO_ANSWER
        ) from exc
