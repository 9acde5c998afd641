"""The partition of a key is the one that every other client of Kafka gives it."""

import random

import pytest
from kafka.partitioner import DefaultPartitioner, murmur2

from pinactivity.kafka.partitions import BatchPartitioner, murmur2_of


@pytest.mark.parametrize(
    ("key", "hashed"),
    [  # of Java's client: UtilsTest.testMurmur2
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hash_is_that_of_javas_client(key: bytes, hashed: int) -> None:
    assert murmur2_of([key]) == {key: hashed % 2**32}


def test_keys_of_all_lengths_are_hashed_together_as_they_are_alone() -> None:
    chosen = random.Random(7)
    keys = {chosen.randbytes(chosen.randrange(50)) for _ in range(2000)} | {b""}
    keys |= {bytes([255]) * length for length in range(50)}
    assert murmur2_of(keys) == {key: murmur2(key) for key in keys}
    assert murmur2_of([]) == {}


class _Cluster:
    """Knows topics and partitions, as kafka-python's does."""

    def __init__(self, partitions: set[int]) -> None:
        self._partitions = partitions

    def topics(self) -> set[str]:
        return {"topic"}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._partitions if topic == "topic" else None

    available_partitions_for_topic = partitions_for_topic


@pytest.mark.parametrize("partitions", [{0}, {0, 1, 2, 3, 4, 5}, {7, 1, 3}])
def test_expected_and_other_keys_get_the_partition_of_kafka_pythons_partitioner(
    partitions: set[int],
) -> None:
    keys = [b"%d" % number for number in range(100)]
    partitioner, cluster = BatchPartitioner(), _Cluster(partitions)
    partitioner.expect([*keys[:50], None])
    for key in keys:
        place = ("topic", key, key, b"", b"", cluster)
        assert partitioner.partition(*place) == DefaultPartitioner().partition(*place)
    assert partitioner.partition("topic", None, None, b"", b"", cluster) in partitions
    with pytest.raises(ValueError, match="not found"):
        partitioner.partition("other", keys[0], keys[0], b"", b"", cluster)
