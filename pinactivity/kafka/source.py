"""Where a consumer's messages come from: one member of a consumer group."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from kafka import ConsumerRebalanceListener, KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.errors import KafkaError

from pinactivity.kafka.record import Partition, Record


class CommitRefused(Exception):
    """The broker did not take the offsets."""


class Source(Protocol):
    """A member of a group, used by one thread. It never commits by itself."""

    def poll(self, *, seconds: float, most: int) -> list[Record]:
        """Return new messages, in order within a partition; wait up to `seconds` for the first.

        Also what keeps the membership: call it more often than the longest poll interval.
        """

    def take_revoked(self) -> set[Partition]:
        """Return the partitions that went to others since the last call.

        Ask after every poll: what that poll returned is not of them, or was read after they
        came back, from the group's offset. A partition that a rebalance leaves with this member
        is not among them: it is read on from where it was, so what was read of it must stay.
        """

    def is_rebalance_due(self) -> bool:
        """Return whether the next poll gives partitions up: the last chance to flush in time."""

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Move the group's offsets: each the next message to read.

        Raises:
            CommitRefused: not a member any more, a rebalance is under way, the broker is away.
        """

    def pause(self) -> None:
        """Let `poll` bring nothing of the partitions of now."""

    def resume(self) -> None:
        """End the pause."""

    def lag(self) -> int:
        """Count the messages that wait behind what was read, as far as known."""

    def close(self) -> None:
        """Leave the group, within a bounded time; idempotent."""


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # kafka-python has no types
    """Notes what goes. It runs on the thread that also heartbeats: it must not work there.

    A rebalance revokes everything, and then assigns. But kafka-python keeps the position of a
    partition that this member had and gets again (Java's consumer does not): its messages are
    not read again, so they are gone for good if the loop drops them. Only what is revoked and
    not assigned again has gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revoked: set[Partition] = set()
        self._gone: set[Partition] = set()

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        with self._lock:
            self._revoked |= _partitions(revoked)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        with self._lock:
            self._gone |= self._revoked - _partitions(assigned)
            self._revoked = set()

    def on_partitions_lost(self, lost: set[TopicPartition]) -> None:
        """Note that all went: of a lost membership no position is kept."""
        with self._lock:
            self._gone |= _partitions(lost)
            self._revoked = set()

    @property
    def is_under_way(self) -> bool:
        with self._lock:
            return bool(self._revoked)

    def take_gone(self) -> set[Partition]:
        with self._lock:
            gone, self._gone = self._gone, set()
        return gone


def _partitions(parts: set[TopicPartition]) -> set[Partition]:
    return {(part.topic, part.partition) for part in parts}


class KafkaSource:
    """kafka-python's consumer, without its deserializers and without automatic commits.

    Args:
        topics: At least one; those that do not exist yet are found within a minute.
        group: The consumer group.
        max_poll_interval: See `ConsumerOptions`, as for `session_timeout`.
        commit_timeout: Bound of a commit, and of leaving the group.

    Raises:
        KafkaError: the broker is away.
    """

    def __init__(
        self,
        *,
        bootstrap_servers: list[str],
        topics: tuple[str, ...],
        group: str,
        max_poll_interval: timedelta,
        session_timeout: timedelta,
        commit_timeout: timedelta = timedelta(seconds=3),
    ) -> None:
        self._commit_timeout_ms = commit_timeout // timedelta(milliseconds=1)
        self._next: dict[Partition, int] = {}
        self._consumer = KafkaConsumer(
            bootstrap_servers=bootstrap_servers,
            client_id=f"pinactivity-{group}",
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            max_poll_interval_ms=max_poll_interval // timedelta(milliseconds=1),
            session_timeout_ms=session_timeout // timedelta(milliseconds=1),
            heartbeat_interval_ms=min(session_timeout // timedelta(milliseconds=3), 3000),
            metadata_max_age_ms=60_000,
            reconnect_backoff_max_ms=5_000,
            bootstrap_timeout_ms=5_000,
        )
        self._listener = _Listener()
        self._consumer.subscribe(topics=list(topics), listener=self._listener)

    def poll(self, *, seconds: float, most: int) -> list[Record]:
        """See `Source`."""
        polled = self._consumer.poll(timeout_ms=int(seconds * 1000), max_records=most)
        for part, batch in polled.items():
            if batch:
                self._next[part.topic, part.partition] = batch[-1].offset + 1
        return [to_record(record) for batch in polled.values() for record in batch]

    def take_revoked(self) -> set[Partition]:
        """See `Source`."""
        return self._listener.take_gone()

    def is_rebalance_due(self) -> bool:
        """See `Source`."""
        # No public method reports it. Without a flush before a rebalance a partition's messages
        # are dropped and read again. That is correct but slow, and where members come and go all
        # the time the group would get nowhere.
        return (
            not self._listener.is_under_way and self._consumer._coordinator.need_rejoin()  # noqa: SLF001 - see above
        )

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """See `Source`."""
        try:
            self._consumer.commit(
                {
                    TopicPartition(*partition): OffsetAndMetadata(offset, "", -1)
                    for partition, offset in offsets.items()
                },
                timeout_ms=self._commit_timeout_ms,
            )
        except (KafkaError, OSError) as exc:
            raise CommitRefused from exc

    def pause(self) -> None:
        """See `Source`. A rebalance ends a pause, so the loop pauses before every poll."""
        assigned = self._consumer.assignment()
        if assigned:
            self._consumer.pause(*assigned)

    def resume(self) -> None:
        """See `Source`."""
        paused = self._consumer.paused()
        if paused:
            self._consumer.resume(*paused)

    def lag(self) -> int:
        """See `Source`. From the ends that fetches brought along: costs no request."""
        waiting = 0
        for partition in self._consumer.assignment():
            end = self._consumer.highwater(partition)
            read = self._next.get((partition.topic, partition.partition))
            if end is not None and read is not None:
                waiting += max(end - read, 0)
        return waiting

    def close(self) -> None:
        """See `Source`."""
        with suppress(KafkaError, OSError):
            self._consumer.close(autocommit=False, timeout_ms=self._commit_timeout_ms)


def to_record(polled: Any) -> Record:
    """Make a record of kafka-python's."""
    value = polled.value
    # By position: names would take three times as long.
    return Record(
        polled.topic,
        polled.partition,
        polled.offset,
        polled.timestamp,
        polled.key,
        b"" if value is None else value,
        tuple(polled.headers),
        value is None,
    )
