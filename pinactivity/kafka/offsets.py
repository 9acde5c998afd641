"""Where a group reads on: set by an operator before a replay (design, section 10)."""

import time
from datetime import datetime

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import (
    IllegalGenerationError,
    KafkaError,
    NoError,
    NonEmptyGroupError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)

from pinactivity.kafka.source import Partition
from pinactivity.kafka.topics import find_ends

_BUSY = (
    UnknownMemberIdError,
    IllegalGenerationError,
    RebalanceInProgressError,
    NonEmptyGroupError,
)


_RETRY_SECONDS = 30.0


class GroupBusy(Exception):
    """The group has live members, whose offsets cannot be moved: stop them first."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"The group {group} has live members: stop them, wait until the broker has noticed"
            " (after a crash: CONSUMER_SESSION_TIMEOUT), then try again. Nothing was changed."
        )


def move_offsets(
    *, bootstrap_servers: list[str], topics: tuple[str, ...], group: str, since: datetime | None
) -> dict[Partition, int]:
    """Set where a group without members reads on.

    Args:
        since: Each partition's first message with this time (the broker's timestamp) or later;
            where there is none, the end. None is the beginning.

    Returns:
        The new offset of each partition.

    Raises:
        GroupBusy: the broker refused, because somebody consumes.
        KafkaError: the broker is away, or refused for another reason.
    """
    places = _find(bootstrap_servers, topics, since)
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers, bootstrap_timeout_ms=10_000)
    try:
        deadline = time.monotonic() + _RETRY_SECONDS
        while fault := _alter(admin, group, places):
            if fault in _BUSY:
                raise GroupBusy(group)
            # The first group of a new cluster has to wait for its coordinator.
            if not fault.retriable or time.monotonic() > deadline:
                raise fault
            time.sleep(0.5)
    finally:
        admin.close()
    return {(part.topic, part.partition): offset for part, offset in places.items()}


def _alter(
    admin: KafkaAdminClient, group: str, places: dict[TopicPartition, int]
) -> type[KafkaError] | None:
    """Set a group's offsets; returns the class of the first fault."""
    try:
        answer = admin.alter_group_offsets(
            group,
            {part: OffsetAndMetadata(offset, "", -1) for part, offset in places.items()},
        )
    except KafkaError as fault:
        return type(fault)
    return next((fault for fault in answer.values() if fault is not NoError), None)


def _find(
    bootstrap_servers: list[str], topics: tuple[str, ...], since: datetime | None
) -> dict[TopicPartition, int]:
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        group_id=None,
        bootstrap_timeout_ms=10_000,
        fetch_max_wait_ms=100,
    )
    try:
        parts = [
            TopicPartition(topic, number)
            for topic in topics
            for number in consumer.partitions_for_topic(topic) or ()
        ]
        if since is None or not parts:
            return dict(consumer.beginning_offsets(parts)) if parts else {}
        milliseconds = int(since.timestamp() * 1000)
        found = consumer.offsets_for_times(dict.fromkeys(parts, milliseconds))
        # Past the end Kafka answers nothing, the embedded broker offset 0 with timestamp -1.
        beyond = [part for part in parts if found.get(part) is None or found[part].timestamp < 0]
        ends = find_ends(consumer, beyond) if beyond else {}
        return {part: ends[part] if part in ends else found[part].offset for part in parts}
    finally:
        consumer.close()
