"""The process around consumers: each in a thread, all until one ends; and replays of groups."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import structlog
from django.conf import settings
from kafka import TopicPartition
from kafka.errors import KafkaError
from tqdm import tqdm

from pinactivity.core.error_info import describe_error
from pinactivity.kafka.dead_lettering import PoisonLimitReached
from pinactivity.kafka.history import committed_offsets, opened_reader
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.offsets import move_offsets
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.record import Partition
from pinactivity.kafka.source import KafkaSource
from pinactivity.kafka.spec import ConsumerSpec
from pinactivity.kafka.topic_admin import MAX_DEAD_LETTER_BYTES, find_ends

log = structlog.get_logger(__name__)

_STOP_SECONDS = 8.5
"""For flush, commit and leaving, of the 10 s that a stop may take."""
_PROGRESS_SECONDS = 1.0
"""Between two readings of how far a replay is."""


def make_consumer(spec: ConsumerSpec) -> Consumer:
    """Make a member of a consumer's group, as the settings have it."""
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


def run_consumers(consumers: Iterable[Consumer], stop: threading.Event) -> list[str]:
    """Run consumers until `stop` or until one ends; return why some ended."""
    reasons: list[str] = []

    def run(consumer: Consumer) -> None:
        name = consumer.spec.name
        try:
            consumer.run(stop.is_set)
        except PoisonLimitReached as exc:
            log.error("stopped", consumer=name, reason="poison limit")
            reasons.append(str(exc))
        except Exception as exc:  # the others must stop too, whatever it was
            log.error("stopped", consumer=name, exc_info=exc)
            reasons.append(f"{name} failed: {describe_error(exc)['errorClass']}")
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
        if thread.is_alive():  # its storage does not answer; what it had comes again
            log.warning("stopped without flushing", consumer=thread.name)
    return reasons


@dataclass(frozen=True, slots=True)
class GroupReplay:
    """What a group reads again: up to where its partitions ended when it began."""

    group: str
    starts: Mapping[Partition, int]
    ends: Mapping[Partition, int]

    @property
    def total(self) -> int:
        """Messages, by the difference of their offsets."""
        return sum(self.ends[part] - start for part, start in self.starts.items())

    def count_done(self, committed: Mapping[Partition, int]) -> int:
        """Count the messages that lie before the group's offsets."""
        return sum(
            min(max(committed.get(part, start), start), self.ends[part]) - start
            for part, start in self.starts.items()
        )


def start_replay(spec: ConsumerSpec, *, since: datetime | None) -> GroupReplay:
    """Let a group without members read again, from a time on or from the beginning.

    Raises:
        GroupBusy: the group has live members.
        KafkaError, OSError: the broker is away, or refused.
    """
    moved = move_offsets(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        topics=spec.topics,
        group=spec.group,
        since=since,
    )
    return GroupReplay(spec.group, moved, _find_ends(moved))


def follow_replay(replay: GroupReplay, stop: threading.Event, *, shown: bool | None = None) -> int:
    """Show how far a replay is, until its end or `stop`.

    Args:
        shown: None is only on a terminal.

    Returns:
        How many messages are done.
    """
    parts = [TopicPartition(*part) for part in replay.starts]
    hidden = None if shown is None else not shown
    with tqdm(total=replay.total, desc=replay.group, unit=" messages", disable=hidden) as bar:
        done = 0
        while not bar.disable and done < replay.total and not stop.wait(_PROGRESS_SECONDS):
            try:
                found = committed_offsets(settings.KAFKA_BOOTSTRAP_SERVERS, replay.group, parts)
            except (KafkaError, OSError):  # the consumer reports it, and goes on
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
