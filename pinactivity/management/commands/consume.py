"""manage.py consume NAME [NAME ..]"""

import threading
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from kafka import TopicPartition
from kafka.errors import KafkaError
from tqdm import tqdm

from pinactivity.conf.checks import enforce
from pinactivity.core.error_info import describe_error
from pinactivity.kafka.history import committed_offsets, opened_reader
from pinactivity.kafka.loop import (
    Consumer,
    ConsumerSpec,
    PoisonLimitReached,
    registered_consumers,
)
from pinactivity.kafka.offsets import GroupBusy, move_offsets
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.source import KafkaSource, Partition
from pinactivity.kafka.topics import MAX_DEAD_LETTER_BYTES, find_ends
from pinactivity.monitoring.consumers import report
from pinactivity.process.interpreter import settle
from pinactivity.process.stopping import stop_on_signals
from pinactivity.telemetry.server import serving

log = structlog.get_logger(__name__)

_STOP_SECONDS = 8.5
"""For flush, commit and leaving, of the 10 s that a stop may take."""
_LOOK_SECONDS = 1.0
"""Between two looks at how far a replay is."""


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
        consumers = {spec.name: _make_consumer(spec) for spec in specs}
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
                    threading.Thread(target=follow, args=[replay, stop], daemon=True).start()
                faults = _run(consumers.values(), stop)
        except OSError as exc:
            raise CommandError(f"Port {settings.METRICS_PORT} is not free.") from exc
        if faults:
            raise CommandError("\n".join(faults))

    def _replay(self, spec: ConsumerSpec, *, since: datetime | None) -> "Replay":
        try:
            moved = move_offsets(
                bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
                topics=spec.topics,
                group=spec.group,
                since=since,
            )
            replay = Replay(spec.group, moved, _find_ends(moved))
        except GroupBusy as exc:
            raise CommandError(str(exc)) from exc
        except (KafkaError, OSError) as exc:
            raise CommandError(f"Kafka refused: {type(exc).__name__}") from exc
        self.stdout.write(f"{spec.name}: {len(moved)} partitions are read again")
        return replay


@dataclass(frozen=True, slots=True)
class Replay:
    """What a group reads again: up to where its partitions ended when it began."""

    group: str
    places: Mapping[Partition, int]
    ends: Mapping[Partition, int]

    @property
    def total(self) -> int:
        """Messages, as far as their offsets tell."""
        return sum(self.ends[part] - place for part, place in self.places.items())

    def count_done(self, committed: Mapping[Partition, int]) -> int:
        """Count the messages that lie before the group's offsets."""
        return sum(
            min(max(committed.get(part, place), place), self.ends[part]) - place
            for part, place in self.places.items()
        )


def follow(replay: Replay, stop: threading.Event, *, shown: bool | None = None) -> int:
    """Show how far a replay is, until it is through or `stop`; only to a terminal by itself.

    Returns:
        How many messages are done.
    """
    parts = [TopicPartition(*part) for part in replay.places]
    hidden = None if shown is None else not shown
    with tqdm(total=replay.total, desc=replay.group, unit=" messages", disable=hidden) as bar:
        done = 0
        while not bar.disable and done < replay.total and not stop.wait(_LOOK_SECONDS):
            try:
                found = committed_offsets(settings.KAFKA_BOOTSTRAP_SERVERS, replay.group, parts)
            except (KafkaError, OSError):  # the consumer tells of it, and goes on
                continue
            done = replay.count_done(found)
            bar.update(done - bar.n)
        return done


def _find_ends(parts: Iterable[Partition]) -> dict[Partition, int]:
    if not parts:
        return {}
    with opened_reader(settings.KAFKA_BOOTSTRAP_SERVERS) as reader:
        ends = find_ends(reader, [TopicPartition(*part) for part in parts])
    return {(part.topic, part.partition): end for part, end in ends.items()}


def _find(names: Iterable[str]) -> list[ConsumerSpec]:
    known = registered_consumers()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CommandError(
            f"There is no consumer {', '.join(unknown)}. There are: {', '.join(sorted(known))}."
        )
    return [known[name] for name in dict.fromkeys(names)]


def _make_consumer(spec: ConsumerSpec) -> Consumer:
    return Consumer(
        spec,
        open_source=lambda: KafkaSource(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            topics=spec.topics,
            group=spec.group,
            max_poll_interval=settings.CONSUMER.max_poll_interval,
            session_timeout=settings.CONSUMER.session_timeout,
        ),
        publisher=KafkaPublisher(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            delivery_timeout=settings.CONSUMER.delivery_timeout,
            client_id=f"pinactivity-{spec.name}",
            most_bytes=MAX_DEAD_LETTER_BYTES,
        ),
        options=settings.CONSUMER,
    )


def _run(consumers: Iterable[Consumer], stop: threading.Event) -> list[str]:
    """Run consumers until `stop` or until one ends; return why some ended."""
    faults: list[str] = []

    def run(consumer: Consumer) -> None:
        name = consumer.spec.name
        try:
            consumer.run(stop.is_set)
        except PoisonLimitReached as exc:
            log.error("stopped", consumer=name, reason="poison limit")
            faults.append(str(exc))
        except Exception as exc:  # the others must be told to stop, whatever it was
            log.error("stopped", consumer=name, exc_info=exc)
            faults.append(f"{name} failed: {describe_error(exc)['errorClass']}")
        finally:
            stop.set()

    threads = [
        threading.Thread(target=run, args=[consumer], name=consumer.spec.name, daemon=True)
        for consumer in consumers
    ]
    for thread in threads:
        thread.start()
    stop.wait()
    deadline = time.monotonic() + _STOP_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():  # a call into a dead storage; what it had comes again
            log.warning("stopped without flushing", consumer=thread.name)
    return faults


def _aware_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError("must be ISO 8601, such as 2026-11-28T00:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
