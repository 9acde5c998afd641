"""manage.py consume NAME [NAME ..]"""

import threading
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from kafka.errors import KafkaError

from pinactivity.conf.checks import enforce
from pinactivity.kafka.offsets import GroupBusy
from pinactivity.kafka.runner import (
    GroupReplay,
    follow_replay,
    make_consumer,
    run_consumers,
    start_replay,
)
from pinactivity.kafka.spec import ConsumerSpec, registered_consumers
from pinactivity.monitoring.consumers import report
from pinactivity.process.interpreter import settle
from pinactivity.process.stopping import stop_on_signals
from pinactivity.telemetry.server import serving


class Command(BaseCommand):
    help = "Run consumers until SIGTERM, each in a thread; when one ends, all end."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="+", metavar="NAME")
        replay = parser.add_mutually_exclusive_group()
        replay.add_argument(
            "--from-beginning",
            action="store_true",
            help="Read everything that the topics hold again, first; refused while others consume.",
        )
        replay.add_argument(
            "--from-timestamp",
            type=_aware_time,
            metavar="ISO",
            help="The same from a time on, such as 2026-11-28T00:00:00Z.",
        )

    def handle(
        self,
        *args: Any,
        names: list[str],
        from_beginning: bool,
        from_timestamp: datetime | None,
        **options: Any,
    ) -> None:
        specs = _find(names)
        enforce()
        replays = [
            self._replay(spec, since=from_timestamp)
            for spec in specs
            if from_beginning or from_timestamp
        ]
        consumers = {spec.name: make_consumer(spec) for spec in specs}
        settle()
        try:
            with (
                stop_on_signals() as stop,
                serving(
                    partial(report, consumers),
                    host=settings.METRICS_HOST,
                    port=settings.METRICS_PORT,
                ),
            ):
                for replay in replays:
                    threading.Thread(target=follow_replay, args=[replay, stop], daemon=True).start()
                reasons = run_consumers(consumers.values(), stop)
        except OSError as exc:
            raise CommandError(f"Port {settings.METRICS_PORT} is not free.") from exc
        if reasons:
            raise CommandError("\n".join(reasons))

    def _replay(self, spec: ConsumerSpec, *, since: datetime | None) -> GroupReplay:
        try:
            replay = start_replay(spec, since=since)
        except GroupBusy as exc:
            raise CommandError(str(exc)) from exc
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka refused: {type(exc).__name__}") from exc
        self.stdout.write(f"{spec.name}: {len(replay.starts)} partitions are read again")
        return replay


def _find(names: Iterable[str]) -> list[ConsumerSpec]:
    known = registered_consumers()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CommandError(
            f"There is no consumer {', '.join(unknown)}. There are: {', '.join(sorted(known))}."
        )
    return [known[name] for name in dict.fromkeys(names)]


def _aware_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError("must be ISO 8601, such as 2026-11-28T00:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
