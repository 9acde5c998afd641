"""Doubles of the broker for tests: they pass the same conformance tests as the real one."""
# ruff: noqa: SLF001 - broker, groups and members are one thing here, under one lock

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import DeliveryError, Message
from pinactivity.kafka.record import Partition, Record
from pinactivity.kafka.source import CommitRefused


def record(
    topic: str,
    value: Mapping[str, Any] | bytes,
    *,
    message_id: UUID | None = None,
    created_at: datetime | None = None,
    headers: Mapping[str, str] | None = None,
    partition: int = 0,
    offset: int = 0,
) -> Record:
    """Make a record as the loop gives it to a handler.

    Args:
        value: A payload, or the bytes as they are.
        message_id: A new one when None; also the correlation id.
        created_at: Now when None.
    """
    message_id = message_id or new_id()
    created_at = created_at or datetime.now(UTC)
    return Record(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp=int(created_at.timestamp() * 1000),
        key=None,
        value=value if isinstance(value, bytes) else json.dumps(value).encode(),
        message_id=message_id,
        created_at=created_at,
        headers=tuple(
            (name, text.encode())
            for name, text in {
                "MessageId": str(message_id),
                "CreatedAt": iso_utc(created_at),
                "ContractVersion": "1",
                **(headers or {}),
            }.items()
        ),
    )


def message(
    topic: str,
    value: Mapping[str, Any] | bytes,
    *,
    key: bytes | None = None,
    headers: Mapping[str, str | bytes | None] | None = None,
) -> Message:
    """Make a message with the headers that every message has; None leaves a header out."""
    given: dict[str, str | bytes | None] = {
        "MessageId": str(new_id()),
        "CreatedAt": iso_utc(datetime.now(UTC)),
        "ContractVersion": "1",
        **(headers or {}),
    }
    return Message(
        topic=topic,
        key=key,
        value=value if isinstance(value, bytes) else json.dumps(value).encode(),
        headers=tuple(
            (name, content if isinstance(content, bytes) else content.encode())
            for name, content in given.items()
            if content is not None
        ),
    )


@dataclass(slots=True)
class _Group:
    """A consumer group with eager rebalances: all give up, then all get their share."""

    generation: int = 0
    settled: int = 0
    """The last generation that every member had joined: its shares hold."""
    members: "list[InMemorySource]" = field(default_factory=list)
    offsets: dict[Partition, int] = field(default_factory=dict)


class InMemoryBroker:
    """Topics and groups in this process, for threads of it.

    Args:
        clock: Seconds of a clock that never goes back: for evictions.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._topics: dict[str, list[list[Record]]] = {}
        self._groups: dict[str, _Group] = {}
        self._refused: set[str] = set()

    def create_topic(self, name: str, *, partitions: int = 6) -> None:
        """Make a topic; idempotent."""
        with self._changed:
            self._topics.setdefault(name, [[] for _ in range(partitions)])

    def refuse(self, topic: str) -> None:
        """Acknowledge nothing more of this topic, until `accept`."""
        self._refused.add(topic)

    def accept(self, topic: str) -> None:
        """End `refuse`."""
        self._refused.discard(topic)

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        """See `Publisher`."""
        return [self.append(each.topic, each.key, each.value, each.headers) for each in messages]

    def append(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> DeliveryError | None:
        """Append one message, a tombstone too; the key decides its partition."""
        with self._changed:
            if topic not in self._topics or topic in self._refused:
                return DeliveryError("UnknownTopicOrPartitionError", is_permanent=False)
            partitions = self._topics[topic]
            number = zlib.crc32(key) if key else sum(map(len, partitions))
            number %= len(partitions)
            partitions[number].append(
                Record(
                    topic=topic,
                    partition=number,
                    offset=len(partitions[number]),
                    timestamp=int(time.time() * 1000),
                    key=key,
                    value=value or b"",
                    headers=tuple(headers),
                    is_tombstone=value is None,
                )
            )
            self._changed.notify_all()
        return None

    def close(self) -> None:
        """Do nothing: so the broker itself serves as a publisher."""

    def read(self, topic: str) -> list[Record]:
        """Return everything in a topic, by partition and offset."""
        with self._changed:
            return [record for partition in self._topics[topic] for record in partition]

    def committed(self, group: str) -> dict[Partition, int]:
        """Return a group's offsets."""
        with self._changed:
            return dict(self._group(group).offsets)

    def join(
        self, topics: tuple[str, ...], group: str, *, max_poll_interval: timedelta
    ) -> "InMemorySource":
        """Return a new member; it joins with its first poll, as the real one does."""
        return InMemorySource(self, topics, group, max_poll_interval.total_seconds())

    def _group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group())


class InMemorySource:
    """A member of a group of an `InMemoryBroker`. See `Source`."""

    def __init__(
        self, broker: InMemoryBroker, topics: tuple[str, ...], group: str, max_poll_seconds: float
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._group = broker._group(group)
        self._changed = broker._changed
        self._max_poll_seconds = max_poll_seconds
        self._polled_at = 0.0
        self._generation = 0
        self._positions: dict[Partition, int] = {}
        self._kept: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._revoked: set[Partition] = set()
        self.evictions = 0

    def poll(self, *, seconds: float, most: int) -> list[Record]:
        """See `Source`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                self._polled_at = self._broker._clock()
                self._evict_silent()
                self._take_part()
                records = self._fetch(most)
                left = deadline - time.monotonic()
                if records or left <= 0:
                    return records
                self._changed.wait(left)

    def take_revoked(self) -> set[Partition]:
        """See `Source`."""
        with self._changed:
            revoked, self._revoked = self._revoked, set()
            return revoked

    def is_rebalance_due(self) -> bool:
        """See `Source`."""
        with self._changed:
            called = self not in self._group.members or self._generation != self._group.generation
            return called and not self._kept

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """See `Source`. As in Kafka, a member may still commit while a rebalance is called for."""
        with self._changed:
            self._evict_silent()
            if self not in self._group.members or self._generation != self._group.settled:
                raise CommitRefused
            self._group.offsets.update(offsets)

    def pause(self) -> None:
        """See `Source`."""
        self._paused = set(self._positions)

    def resume(self) -> None:
        """See `Source`."""
        self._paused = set()

    def lag(self) -> int:
        """See `Source`."""
        with self._changed:
            return sum(
                len(self._log(partition)) - position
                for partition, position in self._positions.items()
            )

    def close(self) -> None:
        """See `Source`."""
        with self._changed:
            self._leave()

    def vanish(self) -> None:
        """End as a killed process does: the group notices, this member sends nothing."""
        with self._changed:
            self._leave()

    def _leave(self) -> None:
        if self in self._group.members:
            self._group.members.remove(self)
            self._call_for_rebalance()

    def _call_for_rebalance(self) -> None:
        self._group.generation += 1
        self._changed.notify_all()

    def _evict_silent(self) -> None:
        now = self._broker._clock()
        for member in list(self._group.members):
            if now - member._polled_at > member._max_poll_seconds:
                member.evictions += 1
                member._leave()

    def _take_part(self) -> None:
        """Join, or follow a call for a rebalance; take the share once everybody is there."""
        group = self._group
        if self not in group.members:
            self._revoked |= self._positions.keys() | self._kept.keys()
            self._positions, self._kept = {}, {}
            group.members.append(self)
            self._call_for_rebalance()
        if self._generation != group.generation:
            self._kept |= self._positions
            self._positions = {}
            self._generation = group.generation
        if group.settled != group.generation and all(
            member._generation == group.generation for member in group.members
        ):
            group.settled = group.generation
            for member in group.members:
                member._take_share()
            self._changed.notify_all()

    def _take_share(self) -> None:
        index, count = self._group.members.index(self), len(self._group.members)
        share = [
            (topic, number)
            for topic in self._topics
            for number in range(len(self._broker._topics.get(topic, ())))
            if number % count == index
        ]
        # As kafka-python does: what stays with this member is read on from where it was.
        self._positions = {
            partition: self._kept.get(partition, self._group.offsets.get(partition, 0))
            for partition in share
        }
        self._revoked |= self._kept.keys() - self._positions.keys()
        self._kept = {}

    def _fetch(self, most: int) -> list[Record]:
        records: list[Record] = []
        for partition in self._positions.keys() - self._paused:
            start = self._positions[partition]
            found = self._log(partition)[start : start + most - len(records)]
            self._positions[partition] = start + len(found)
            records += map(copy, found)  # the loop sets fields of what it polled
        return records

    def _log(self, partition: Partition) -> list[Record]:
        topic, number = partition
        return self._broker._topics[topic][number]
