"""Dead-letter records: messages that a consumer can never handle (design, section 10).

A dead-letter record is the original message, with headers that state why and from where. People
read them, and redrive them when the cause is corrected.
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
from pinactivity.kafka.record import Partition, Record
from pinactivity.kafka.source import to_record
from pinactivity.kafka.topic_admin import find_ends
from pinactivity.kafka.topics import dead_letter_topic

PREFIX = "dlq-"
REASON = f"{PREFIX}reason"
TOPIC = f"{PREFIX}topic"
PARTITION = f"{PREFIX}partition"
OFFSET = f"{PREFIX}offset"
AT = f"{PREFIX}at"
_CHUNK = 100
"""Messages between two commits of a redrive."""


class RedriveFailed(Exception):
    """A redrive ended early; a later one does not publish again what this one published."""


def make_dead_letter(record: Record, *, group: str, reason: str, at: datetime) -> Message:
    """Make the dead-letter record of a message: the message, and five headers more.

    A header or value that is null becomes an empty one: kafka-python sends no null.
    """
    return Message(
        topic=dead_letter_topic(record.topic, group),
        key=record.key,
        value=record.value,
        headers=(
            *_original_headers(record),
            (REASON, reason.encode()),
            (TOPIC, record.topic.encode()),
            (PARTITION, str(record.partition).encode()),
            (OFFSET, str(record.offset).encode()),
            (AT, iso_utc(at).encode()),
        ),
    )


def _original_headers(record: Record) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (name, content or b"") for name, content in record.headers if not name.startswith(PREFIX)
    )


def _header(record: Record, name: str) -> str:
    """Read one of the headers that we wrote; in a topic of ours there is no other kind."""
    content = dict(record.headers).get(name)
    return content.decode(errors="backslashreplace") if content else ""


def describe_record(record: Record) -> str:
    """Return a message as one line of JSON; bytes that are not text become escapes."""

    def text(content: bytes | None) -> str | None:
        return None if content is None else content.decode(errors="backslashreplace")

    value: Any = None if record.is_tombstone else text(record.value)
    with suppress(TypeError, ValueError):  # shown as the text it is
        value = json.loads(value)
    return json.dumps(
        {
            "partition": record.partition,
            "offset": record.offset,
            "key": text(record.key),
            "headers": {name: text(content) for name, content in record.headers},
            "value": value,
        },
        ensure_ascii=False,
    )


@dataclass(frozen=True, slots=True)
class Redrive:
    """How many records a redrive published, and how many it left."""

    published: int = 0
    remaining: int = 0
    """Records of this kind that are not redriven yet."""


@dataclass(frozen=True, slots=True)
class _RedriveOffsets:
    """How far the redrives of one kind were at the start."""

    group: str
    offsets: dict[Partition, int]


class DeadLetterTopics:
    """Reads dead-letter topics, and redrives their records.

    Args:
        bootstrap_servers: host:port each.

    Raises:
        KafkaError: from each of its methods: the broker is away.
    """

    def __init__(self, *, bootstrap_servers: list[str]) -> None:
        self._bootstrap_servers = bootstrap_servers

    def count(self, topics: Iterable[str]) -> dict[str, Mapping[str, int]]:
        """Count the records of each topic that exists, by reason."""
        counts: dict[str, Mapping[str, int]] = {}
        with opened_reader(self._bootstrap_servers) as reader:
            for topic in topics:
                records = read(reader, topic)
                if records is not None:
                    counts[topic] = Counter(_header(record, REASON) for record in records)
        return counts

    def find(self, topic: str, *, partition: int, offset: int) -> Record | None:
        """Return the record at an offset, if it is still there."""
        part = TopicPartition(topic, partition)
        with opened_reader(self._bootstrap_servers) as reader:
            if partition not in (reader.partitions_for_topic(topic) or ()):
                return None
            if offset >= find_ends(reader, [part])[part]:
                return None
            reader.seek(part, offset)
            while not (polled := reader.poll(timeout_ms=1000, max_records=1)):
                pass
            record = to_record(polled[part][0])
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
        """Publish records again to the topics that they came from, each once.

        The source topic has other groups, which get the message again too: consumers are
        idempotent by MessageId. A message that is still poison comes back as a new dead-letter
        record. Only what is there at the start is redriven.

        How far redrives are is kept as the offsets of groups that nobody joins: `<topic>.redrive`
        for redrives of all reasons, `<topic>.redrive.<reason>` for one reason. A record is done
        when either offset has passed it. Offsets are committed after the acknowledgement of 100
        messages: a redrive that is killed in between repeats at most those.

        Args:
            reason: Only records with this `dlq-reason`.
            limit: At most so many.
            stop: Ends between two messages.

        Raises:
            RedriveFailed: there is no such topic, or the broker refused a message.
        """
        with opened_reader(self._bootstrap_servers) as reader, self._admin() as admin:
            parts = partitions_of(reader, topic)
            if not parts:
                raise RedriveFailed(f"There is no topic {topic}.")
            groups = _RedriveGroups(admin, topic, parts)
            own = groups.of_reason(reason)
            chunk: list[Record] = []
            published = remaining = 0
            for record in read(reader, topic) or ():
                its_reason = _header(record, REASON)
                if (reason is not None and its_reason != reason) or groups.is_done(
                    record, its_reason
                ):
                    continue
                if stop() or (limit is not None and published + len(chunk) >= limit):
                    remaining += 1
                    continue
                chunk.append(record)
                if len(chunk) == _CHUNK:
                    published += _send(chunk, publisher, groups, own)
                    chunk = []
            if chunk:
                published += _send(chunk, publisher, groups, own)
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


class _RedriveGroups:
    """How far the redrives of a topic are: of all reasons, and of each."""

    def __init__(self, admin: KafkaAdminClient, topic: str, parts: list[TopicPartition]) -> None:
        self._admin = admin
        self._topic = topic
        self._parts = parts
        self._offsets: dict[str | None, _RedriveOffsets] = {}

    def of_reason(self, reason: str | None) -> _RedriveOffsets:
        if reason not in self._offsets:
            group = f"{self._topic}.redrive" + (f".{reason}" if reason else "")
            found = self._admin.list_group_offsets({group: self._parts})[group]
            self._offsets[reason] = _RedriveOffsets(
                group,
                {
                    (part.topic, part.partition): committed.offset
                    for part, committed in found.items()
                    if committed.offset >= 0
                },
            )
        return self._offsets[reason]

    def is_done(self, record: Record, reason: str) -> bool:
        partition = record.topic, record.partition
        return any(
            record.offset < done.offsets.get(partition, 0)
            for done in (self.of_reason(None), self.of_reason(reason))
        )

    def commit(self, done: _RedriveOffsets, records: list[Record]) -> None:
        following = {
            TopicPartition(record.topic, record.partition): record.offset + 1 for record in records
        }
        answer = self._admin.alter_group_offsets(
            done.group,
            {part: OffsetAndMetadata(offset, "", -1) for part, offset in following.items()},
        )
        for error in answer.values():
            if error is not NoError:
                raise RedriveFailed(
                    f"The broker did not keep how far the redrive is ({error.__name__}):"
                    f" the last {len(records)} messages will be sent again."
                )


def _send(
    records: list[Record], publisher: Publisher, groups: _RedriveGroups, done: _RedriveOffsets
) -> int:
    answers = publisher.publish(
        [
            Message(
                topic=_header(record, TOPIC),
                key=record.key,
                value=record.value,
                headers=_original_headers(record),
            )
            for record in records
        ]
    )
    # Up to the first that was refused. A later one that arrived is sent again, never lost.
    sent = next((index for index, refusal in enumerate(answers) if refusal), len(records))
    if sent:
        groups.commit(done, records[:sent])
    if sent < len(records):
        refusal = answers[sent]
        assert refusal is not None  # `sent` is its index
        raise RedriveFailed(f"The broker refused a message: {refusal.code}.")
    return sent
