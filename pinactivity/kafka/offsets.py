"""Where a group reads on: set by an operator before a replay (design, section 10)."""

import time
from datetime import datetime

from kafka import OffsetAndMetadata, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import (
    IllegalGenerationError,
    KafkaError,
    NoError,
    NonEmptyGroupError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)

from pinactivity.kafka.history import find_since, opened_reader, partitions_of
from pinactivity.kafka.record import Partition

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
    starts = _find(bootstrap_servers, topics, since)
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers, bootstrap_timeout_ms=10_000)
    try:
        deadline = time.monotonic() + _RETRY_SECONDS
        while error := _alter(admin, group, starts):
            if error in _BUSY:
                raise GroupBusy(group)
            # The first group of a new cluster has to wait for its coordinator.
            if not error.retriable or time.monotonic() > deadline:
                raise error
            time.sleep(0.5)
    finally:
        admin.close()
    return {(part.topic, part.partition): offset for part, offset in starts.items()}


def _alter(
    admin: KafkaAdminClient, group: str, starts: dict[TopicPartition, int]
) -> type[KafkaError] | None:
    """Set a group's offsets; return the class of the first error."""
    try:
        answer = admin.alter_group_offsets(
            group,
            {part: OffsetAndMetadata(offset, "", -1) for part, offset in starts.items()},
        )
    except KafkaError as exc:
        return type(exc)
    return next((error for error in answer.values() if error is not NoError), None)


def _find(
    bootstrap_servers: list[str], topics: tuple[str, ...], since: datetime | None
) -> dict[TopicPartition, int]:
    with opened_reader(bootstrap_servers) as reader:
        parts = [part for topic in topics for part in partitions_of(reader, topic)]
        return find_since(reader, parts, since)
