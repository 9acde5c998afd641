"""What a topic still holds: read without a group, from a time on, to where it ends now."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from kafka import KafkaConsumer, TopicPartition
from kafka.admin import KafkaAdminClient

from pinactivity.kafka.record import Partition, Record
from pinactivity.kafka.source import to_record
from pinactivity.kafka.topic_admin import find_ends


@contextmanager
def opened_reader(bootstrap_servers: list[str]) -> Iterator[KafkaConsumer]:
    """Lend a consumer that joins no group and commits nothing.

    Raises:
        KafkaError: the broker is away.
    """
    reader = KafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        allow_auto_create_topics=False,
        bootstrap_timeout_ms=10_000,
        fetch_max_wait_ms=100,
    )
    try:
        yield reader
    finally:
        reader.close()


def partitions_of(reader: KafkaConsumer, topic: str) -> list[TopicPartition]:
    """Return a topic's partitions; none where there is no such topic."""
    return [TopicPartition(topic, number) for number in reader.partitions_for_topic(topic) or ()]


def find_since(
    reader: KafkaConsumer,
    parts: list[TopicPartition],
    since: datetime | None,
    *,
    ends: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, int]:
    """Return each partition's first offset with this time (the broker's timestamp) or later.

    Args:
        since: None is the beginning; where there is nothing so late, the end is returned.
        ends: Where the partitions end, if the caller has found them.
    """
    if since is None or not parts:
        return dict(reader.beginning_offsets(parts)) if parts else {}
    found = reader.offsets_for_times(dict.fromkeys(parts, int(since.timestamp() * 1000)))
    # Past the end Kafka answers nothing, the embedded broker offset 0 with timestamp -1.
    beyond = [part for part in parts if found.get(part) is None or found[part].timestamp < 0]
    if beyond and ends is None:
        ends = find_ends(reader, beyond)
    return {part: ends[part] if ends and part in beyond else found[part].offset for part in parts}


def read(
    reader: KafkaConsumer, *topics: str, since: datetime | None = None
) -> Iterator[Record] | None:
    """Read topics to where they end at the time of the call; None when there is none of them.

    Args:
        since: See `find_since`.
    """
    parts = [part for topic in topics for part in partitions_of(reader, topic)]
    if not parts:
        return None
    ends = find_ends(reader, parts)
    starts = find_since(reader, parts, since, ends=ends)
    for part, offset in starts.items():
        reader.seek(part, offset)

    def records() -> Iterator[Record]:
        waiting = {part for part in parts if reader.position(part) < ends[part]}
        while waiting:
            for part, batch in reader.poll(timeout_ms=1000, max_records=1000).items():
                for record in batch:
                    if record.offset < ends[part]:
                        yield to_record(record)
            waiting = {part for part in waiting if reader.position(part) < ends[part]}

    return records()


def kept_since(reader: KafkaConsumer, topic: str) -> datetime | None:
    """Return from when on a topic holds every message, by the broker's timestamps.

    A partition whose beginning has been deleted holds all from its first message on; a topic of
    which nothing was deleted may have been made anew, and holds all from its own first on.

    Returns:
        None when it holds nothing.
    """
    parts = partitions_of(reader, topic)
    if not parts:
        return None
    found = reader.offsets_for_times(dict.fromkeys(parts, 0))
    firsts = {
        part: datetime.fromtimestamp(first.timestamp / 1000, UTC)
        for part, first in found.items()
        if first is not None and first.timestamp >= 0
    }
    if not firsts:
        return None
    beginnings = reader.beginning_offsets(parts)
    shortened = [firsts[part] for part in firsts if beginnings[part] > 0]
    return max([min(firsts.values()), *shortened])


def committed_offsets(
    bootstrap_servers: list[str], group: str, parts: list[TopicPartition]
) -> dict[Partition, int]:
    """Return where a group reads on; partitions that it has not committed are left out.

    Raises:
        KafkaError: the broker is away.
    """
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers, bootstrap_timeout_ms=10_000)
    try:
        found = admin.list_group_offsets({group: parts})[group]
    finally:
        admin.close()
    return {
        (part.topic, part.partition): committed.offset
        for part, committed in found.items()
        if committed.offset >= 0
    }
