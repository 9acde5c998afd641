"""Dead letters: messages that a consumer can never handle, kept for a person (design, section 10).

A dead letter is the original message, with headers that say why and from where.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kafka import OffsetAndMetadata, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import NoError

from pinactivity.core.times import iso_utc
from pinactivity.kafka.history import opened_reader, partitions_of, read
from pinactivity.kafka.producer import Message, Publisher
from pinactivity.kafka.source import Partition, RawRecord, to_raw
from pinactivity.kafka.topics import dead_letter_topic, find_ends

PREFIX = "dlq-"
REASON = f"{PREFIX}reason"
TOPIC = f"{PREFIX}topic"
PARTITION = f"{PREFIX}partition"
OFFSET = f"{PREFIX}offset"
AT = f"{PREFIX}at"
_CHUNK = 100
"""Messages between two commits of a redrive."""


class RedriveFailed(Exception):
    """Say why a redrive ended early; what it published is not published again."""


def dead_letter(raw: RawRecord, *, group: str, reason: str, at: datetime) -> Message:
    """Make the message for the dead-letter topic: everything as it was, and five headers more.

    A header without a value becomes an empty one: kafka-python sends no null.
    """
    return Message(
        topic=dead_letter_topic(raw.topic, group),
        key=raw.key,
        value=raw.value or b"",
        headers=(
            *_original_headers(raw),
            (REASON, reason.encode()),
            (TOPIC, raw.topic.encode()),
            (PARTITION, str(raw.partition).encode()),
            (OFFSET, str(raw.offset).encode()),
            (AT, iso_utc(at).encode()),
        ),
    )


def _original_headers(raw: RawRecord) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (name, content or b"") for name, content in raw.headers if not name.startswith(PREFIX)
    )


def _header(raw: RawRecord, name: str) -> str:
    """Read one of the headers that we wrote; in a topic of ours there is no other kind."""
    content = dict(raw.headers).get(name)
    return content.decode(errors="backslashreplace") if content else ""


def describe_record(raw: RawRecord) -> str:
    """Write a message as one line of JSON; what is not text gets escapes, and is never refused."""

    def text(content: bytes | None) -> str | None:
        return None if content is None else content.decode(errors="backslashreplace")

    value: Any = text(raw.value)
    with suppress(TypeError, ValueError):  # shown as the text it is
        value = json.loads(value)
    return json.dumps(
        {
            "partition": raw.partition,
            "offset": raw.offset,
            "key": text(raw.key),
            "headers": {name: text(content) for name, content in raw.headers},
            "value": value,
        },
        ensure_ascii=False,
    )


@dataclass(frozen=True, slots=True)
class Redrive:
    """What a redrive came to."""

    published: int = 0
    remaining: int = 0
    """Letters of this kind that are still there."""


@dataclass(frozen=True, slots=True)
class _Place:
    """How far the redrives of one kind were at the start."""

    group: str
    offsets: dict[Partition, int]


class DeadLetterOffice:
    """Reads dead-letter topics and sends letters on their way again.

    Args:
        bootstrap_servers: host:port each.

    Raises:
        KafkaError: from each of its methods: the broker is away.
    """

    def __init__(self, *, bootstrap_servers: list[str]) -> None:
        self._bootstrap_servers = bootstrap_servers

    def count(self, topics: Iterable[str]) -> dict[str, Mapping[str, int]]:
        """Count the letters of each topic that exists, by reason."""
        counts: dict[str, Mapping[str, int]] = {}
        with opened_reader(self._bootstrap_servers) as reader:
            for topic in topics:
                letters = read(reader, topic)
                if letters is not None:
                    counts[topic] = Counter(_header(letter, REASON) for letter in letters)
        return counts

    def find(self, topic: str, *, partition: int, offset: int) -> RawRecord | None:
        """Return the letter at one place, if it is still there."""
        part = TopicPartition(topic, partition)
        with opened_reader(self._bootstrap_servers) as reader:
            if partition not in (reader.partitions_for_topic(topic) or ()):
                return None
            if offset >= find_ends(reader, [part])[part]:
                return None
            reader.seek(part, offset)
            while not (polled := reader.poll(timeout_ms=1000, max_records=1)):
                pass
            record = to_raw(polled[part][0])
            return record if record.offset == offset else None

    def redrive(
        self,
        topic: str,
        *,
        publisher: Publisher,
        reason: str | None = None,
        limit: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Redrive:
        """Publish letters again to the topics that they came from, each once.

        The source topic has other groups, which get the message again too: consumers are
        idempotent by MessageId. A letter that is poison still comes back as a new letter; only
        what is there at the start is redriven.

        How far redrives are is kept as the offsets of groups that nobody joins: `<topic>.redrive`
        for redrives of all reasons, `<topic>.redrive.<reason>` for one reason. A letter is done
        when either has passed it. They are committed every 100 messages, after the
        acknowledgement: a kill in between repeats at most those.

        Args:
            reason: Only letters with this `dlq-reason`.
            limit: At most so many.
            stop: Ends between two messages.

        Raises:
            RedriveFailed: there is no such topic, or the broker refused a message.
        """
        with opened_reader(self._bootstrap_servers) as reader, self._admin() as admin:
            parts = partitions_of(reader, topic)
            if not parts:
                raise RedriveFailed(f"There is no topic {topic}.")
            places = _Places(admin, topic, parts)
            own = places.of(reason)
            chunk: list[RawRecord] = []
            published = remaining = 0
            for letter in read(reader, topic) or ():
                letter_reason = _header(letter, REASON)
                if (reason is not None and letter_reason != reason) or places.is_done(
                    letter, letter_reason
                ):
                    continue
                if stop() or (limit is not None and published + len(chunk) >= limit):
                    remaining += 1
                    continue
                chunk.append(letter)
                if len(chunk) == _CHUNK:
                    published += _send(chunk, publisher, places, own)
                    chunk = []
            if chunk:
                published += _send(chunk, publisher, places, own)
            return Redrive(published, remaining)

    @contextmanager
    def _admin(self) -> Iterator[KafkaAdminClient]:
        admin = KafkaAdminClient(
            bootstrap_servers=self._bootstrap_servers, bootstrap_timeout_ms=10_000
        )
        try:
            yield admin
        finally:
            admin.close()


class _Places:
    """How far the redrives of a topic are: of all reasons, and of each."""

    def __init__(self, admin: KafkaAdminClient, topic: str, parts: list[TopicPartition]) -> None:
        self._admin = admin
        self._topic = topic
        self._parts = parts
        self._places: dict[str | None, _Place] = {}

    def of(self, reason: str | None) -> _Place:
        if reason not in self._places:
            group = f"{self._topic}.redrive" + (f".{reason}" if reason else "")
            found = self._admin.list_group_offsets({group: self._parts})[group]
            self._places[reason] = _Place(
                group,
                {
                    (part.topic, part.partition): committed.offset
                    for part, committed in found.items()
                    if committed.offset >= 0
                },
            )
        return self._places[reason]

    def is_done(self, letter: RawRecord, reason: str) -> bool:
        partition = letter.topic, letter.partition
        return any(
            letter.offset < place.offsets.get(partition, 0)
            for place in (self.of(None), self.of(reason))
        )

    def commit(self, place: _Place, letters: list[RawRecord]) -> None:
        following = {
            TopicPartition(letter.topic, letter.partition): letter.offset + 1 for letter in letters
        }
        answer = self._admin.alter_group_offsets(
            place.group,
            {part: OffsetAndMetadata(offset, "", -1) for part, offset in following.items()},
        )
        for fault in answer.values():
            if fault is not NoError:
                raise RedriveFailed(
                    f"The broker did not keep how far the redrive is ({fault.__name__}):"
                    f" the last {len(letters)} messages will be sent again."
                )


def _send(letters: list[RawRecord], publisher: Publisher, places: _Places, place: _Place) -> int:
    faults = publisher.publish(
        [
            Message(
                topic=_header(letter, TOPIC),
                key=letter.key,
                value=letter.value or b"",
                headers=_original_headers(letter),
            )
            for letter in letters
        ]
    )
    # Up to the first that was refused: a later one that arrived is sent again, never lost.
    sent = next((index for index, fault in enumerate(faults) if fault), len(letters))
    if sent:
        places.commit(place, letters[:sent])
    if sent < len(letters):
        refusal = faults[sent]
        assert refusal is not None  # that is what `sent` stands at
        raise RedriveFailed(f"The broker refused a message: {refusal.code}.")
    return sent
