"""manage.py replay_visits FILE"""

import logging
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connection
from tqdm import tqdm

from pinactivity.demo.replay import (
    ReplayFailed,
    UnreadableVisits,
    Visit,
    VisitReplay,
    anonymous_id,
    read_visits,
)
from pinactivity.management.demonstration import add_database_argument, require_demonstration
from pinactivity.postgres.clock import statement_time
from pinactivity.postgres.locks import REPLAY, advisory_lock
from sessions.closer import ActivityCloser
from sessions.models import Session


class Command(BaseCommand):
    help = "Play recorded visits (seconds,device,page) through the services, in their own time."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument(
            "--start", type=_aware_time, help="ISO 8601; default: yesterday 00:00 UTC."
        )
        parser.add_argument(
            "--tick", type=_tick, default=timedelta(seconds=60), help="Seconds between closer runs."
        )
        add_database_argument(parser)
        repeated = parser.add_mutually_exclusive_group()
        repeated.add_argument(
            "--again", action="store_true", help="Play even if sessions of the first device exist."
        )
        repeated.add_argument(
            "--if-new",
            action="store_true",
            help="Do nothing if sessions of the first device exist.",
        )

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        """Have Django check the database too: its isolation level (conf/checks.py)."""
        kwargs: dict[Any, Any] = super().get_check_kwargs(options)
        return {**kwargs, "databases": ["default"]}

    def handle(self, *args: Any, **options: Any) -> None:
        require_demonstration(options["database_name"])
        try:
            visits = read_visits(options["file"])
        except UnreadableVisits as exc:
            raise CommandError(str(exc)) from exc
        if not visits:
            raise CommandError(f"{options['file']}: there are no visits.")
        try:
            with advisory_lock(REPLAY, wait=True):
                self._replay(visits, **options)
        except OperationalError as exc:
            raise CommandError(
                "PostgreSQL is away, or another replay or a run of the closer is under way:"
                " try again."
            ) from exc
        except ReplayFailed as exc:
            raise CommandError(f"{exc} The log has the reason.") from exc

    def _replay(
        self,
        visits: list[Visit],
        *,
        start: datetime | None,
        tick: timedelta,
        again: bool,
        if_new: bool,
        **_: Any,
    ) -> None:
        now = statement_time()
        if start is None:
            start = datetime(now.year, now.month, now.day, tzinfo=UTC) - timedelta(days=1)
        last = start + timedelta(seconds=visits[-1].seconds)
        if last + 2 * settings.ACTIVITY_CLOSER.inactivity_threshold + tick > now:
            raise CommandError("The replay would end in the future: give an earlier --start.")
        first = anonymous_id(visits[0].device)
        if not again and Session.objects.filter(anonymous_id=first).exists():
            if if_new:
                self.stdout.write("These visits were played already.")
                return
            raise CommandError("These visits were played already: --again plays them once more.")

        # PostgreSQL may lose the end of a replay when it crashes; the rest stays consistent.
        with connection.cursor() as cursor:
            cursor.execute("SET synchronous_commit = off")
        replay = VisitReplay(
            visits,
            start=start,
            tick=tick,
            user_agents=_shipped_user_agents(),
            closer=ActivityCloser(settings.ACTIVITY_CLOSER),
        )
        began = time.monotonic()
        with (
            _quiet(logging.getLogger("sessions.closer")),  # it logs a line for each tick
            tqdm(total=len(visits), desc="replay", unit=" visits", disable=None) as bar,
        ):
            totals = replay.run(advance=bar.update)
        seconds = time.monotonic() - began
        self.stdout.write(
            f"replayed {totals.rows} visits from {start.isoformat()} in {seconds:.0f} s"
            f" ({totals.rows / seconds:.0f} a second), {totals.ticks} runs of the closer:"
            f" {totals.sessions_closed} sessions and {totals.views_closed} views closed,"
            f" {totals.sessions_closed + totals.views_closed} events"
        )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shipped_user_agents() -> list[str]:
    path = settings.BASE_DIR / "data" / "user-agents.txt"
    return path.read_text(encoding="utf-8").splitlines()


def _aware_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError("must be ISO 8601, such as 2026-11-28T00:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _tick(text: str) -> timedelta:
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ArgumentTypeError("must be whole seconds from 1 to 86400")
    return timedelta(seconds=int(text))
