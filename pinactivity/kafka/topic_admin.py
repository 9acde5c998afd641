"""What the broker knows of topics: creating them, counting them, and where they end."""

import time
from collections.abc import Iterable
from datetime import timedelta

from kafka import KafkaConsumer, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import TopicAlreadyExistsError, for_code

from pinactivity.kafka.topics import DEAD_LETTER_SUFFIX

MAX_DEAD_LETTER_BYTES = 8 * 1024 * 1024
"""More than a broker's limit of a message: a dead-letter record is the message and five headers."""


def create_topics(
    names: Iterable[str],
    *,
    bootstrap_servers: list[str],
    partitions: int,
    replication: int,
    retention: timedelta,
) -> list[str]:
    """Create the topics that do not exist; idempotent, also from two processes at once.

    Returns:
        The names that this call created.

    Raises:
        KafkaError: the broker is away, or refuses a topic.
    """
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers, bootstrap_timeout_ms=10_000)
    try:
        existing = set(admin.list_topics())
        wanted = {
            name: {
                "num_partitions": partitions,
                "replication_factor": replication,
                "configs": _configure(name, retention),
            }
            for name in names
            if name not in existing
        }
        if not wanted:
            return []
        answer = admin.create_topics(wanted, raise_errors=False)
        created = []
        for topic in answer["topics"]:
            error = for_code(topic["error_code"])
            if topic["error_code"] == 0:
                created.append(topic["name"])
            elif error is not TopicAlreadyExistsError:
                raise error(topic["name"])
        return created
    finally:
        admin.close()


def _configure(name: str, retention: timedelta) -> dict[str, str]:
    configs = {"retention.ms": str(retention // timedelta(milliseconds=1))}
    if name.endswith(DEAD_LETTER_SUFFIX):
        configs["max.message.bytes"] = str(MAX_DEAD_LETTER_BYTES)
    return configs


def count_messages(names: Iterable[str], *, bootstrap_servers: list[str]) -> dict[str, int]:
    """Count the offsets between the beginning and the end of topics; absent ones are left out.

    Raises:
        KafkaError: the broker is away.
    """
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        group_id=None,
        bootstrap_timeout_ms=10_000,
        fetch_max_wait_ms=100,
    )
    try:
        partitions = [
            TopicPartition(name, number)
            for name in names
            for number in consumer.partitions_for_topic(name) or ()
        ]
        if not partitions:
            return {}
        counts = dict.fromkeys((part.topic for part in partitions), 0)
        first = consumer.beginning_offsets(partitions)
        for partition, end in find_ends(consumer, partitions).items():
            counts[partition.topic] += end - first[partition]
        return counts
    finally:
        consumer.close()


def find_ends(
    consumer: KafkaConsumer, partitions: list[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return where partitions end, by reading on from the end that the broker reports.

    The embedded broker reports an end that lies before the records of its last batch.
    """
    consumer.assign(partitions)
    for partition, offset in consumer.end_offsets(partitions).items():
        consumer.seek(partition, offset)
    deadline = time.monotonic() + 5  # a topic that is written to all the time has no silence
    while consumer.poll(timeout_ms=500) and time.monotonic() < deadline:
        pass
    return {partition: consumer.position(partition) for partition in partitions}
