"""The partitions of keyed messages: Java's and kafka-python's, for many keys in one go."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from struct import pack, unpack
from typing import Any

from kafka.partitioner import DefaultPartitioner

_SEED, _FACTOR, _WORD = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


class BatchPartitioner(DefaultPartitioner):  # type: ignore[misc]  # kafka-python has no types
    """kafka-python's partitioner, which knows the hashes of the keys that it was told of before.

    Hashed one by one in Python a key takes a tenth of its message's time.
    """

    def __init__(self) -> None:
        self._hashes: dict[bytes, int] = {}

    def expect(self, keys: Iterable[bytes | None]) -> None:
        """Hash the keys of the messages that follow, and forget those before."""
        self._hashes = murmur2_of({key for key in keys if key is not None})

    def partition(
        self,
        topic: str,
        key: Any,
        serialized_key: bytes | None,
        value: Any,
        serialized_value: bytes | None,
        cluster: Any,
    ) -> Any:
        """See `kafka.partitioner.Partitioner`."""
        partitions = cluster.partitions_for_topic(topic)
        hashed = self._hashes.get(serialized_key) if serialized_key is not None else None
        if hashed is None or not partitions:
            return super().partition(topic, key, serialized_key, value, serialized_value, cluster)
        return sorted(partitions)[(hashed & 0x7FFFFFFF) % len(partitions)]


def murmur2_of(keys: Iterable[bytes]) -> dict[bytes, int]:
    """Hash keys as Kafka's clients do, those of one length together."""
    hashes: dict[bytes, int] = {}
    for length, each in groupby(sorted(keys, key=len), len):
        group = list(each)
        hashes.update(zip(group, _murmur2(group, length), strict=True))
    return hashes


def _murmur2(keys: Sequence[bytes], length: int) -> tuple[int, ...]:
    """Hash keys of one length.

    Each key has a lane of 64 bits in one large integer, so that Python's arithmetic works at all
    of them at once: a lane has room for the product of two words, and what a shift to the right
    brings in from the lane above is masked.

    1. Mix each word of four bytes, and then mix it into the hash.
    2. What is left at the end, fewer than four bytes, is mixed into it as it is.
    3. Spread the last words over all bits.
    """
    count, width = len(keys), -(-length // 4)
    words = unpack(f"<{count * width}I", b"".join(key.ljust(4 * width, b"\0") for key in keys))
    ones = int.from_bytes(pack("<Q", 1) * count, "little")
    mask = ones * _WORD
    hashes = ones * (_SEED ^ length)
    for number in range(width):
        word = int.from_bytes(pack(f"<{count}Q", *words[number::width]), "little")
        if number < length // 4:
            word = word * _FACTOR & mask
            word = (word ^ (word >> 24 & mask)) * _FACTOR & mask
            hashes = hashes * _FACTOR & mask ^ word
        else:
            hashes = (hashes ^ word) * _FACTOR & mask
    hashes = (hashes ^ (hashes >> 13 & mask)) * _FACTOR & mask
    hashes ^= hashes >> 15 & mask
    return unpack(f"<{count}Q", hashes.to_bytes(8 * count, "little"))
