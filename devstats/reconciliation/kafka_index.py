"""What a topic holds, by key: an index in a temporary file of the process.

A file keeps memory bounded: 80 bytes of disk a key. SQLite opens it without a name in TMPDIR, so
it disappears with the process, however that ends.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from django.conf import settings

from devstats.clickhouse import MOST_IDS
from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.history import (
    committed_offsets,
    kept_since,
    opened_reader,
    partitions_of,
    read,
)
from pinactivity.kafka.record import Record
from pinactivity.kafka.topics import dead_letter_topic


@dataclass(frozen=True, slots=True)
class KeyInKafka:
    """What Kafka holds of one key."""

    created_at: datetime | None = None
    copies: int = 0
    unread: int = 0
    """Copies that the group has not read."""
    is_dead_letter: bool = False


class KafkaIndex:
    """The keys of one topic and of its dead letters.

    Args:
        earliest: From when on the topic holds everything; None when it holds nothing.
    """

    def __init__(self, earliest: datetime | None) -> None:
        self.earliest = earliest
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute(
            "CREATE TABLE keys (key TEXT PRIMARY KEY, created_at TEXT, copies INTEGER,"
            " unread INTEGER, dead INTEGER) WITHOUT ROWID"
        )
        self._file.execute("BEGIN")

    def add(
        self, key: str, created_at: datetime | None, *, copies: int, unread: int, dead: int
    ) -> None:
        """Add what one record says of a key to what is known of it."""
        self._file.execute(
            "INSERT INTO keys VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " created_at = coalesce(created_at, excluded.created_at), dead = dead + excluded.dead,"
            " copies = copies + excluded.copies, unread = unread + excluded.unread",
            (key, created_at and created_at.isoformat(), copies, unread, dead),
        )

    def find(self, keys: Collection[str]) -> dict[str, KeyInKafka]:
        """Return what is known of some keys; unknown ones are left out."""
        marks = ", ".join("?" * len(keys))
        return dict(self._select(f"WHERE key IN ({marks})", tuple(keys)))

    def chunks(self, since: datetime, until: datetime) -> Iterator[dict[str, datetime]]:
        """Yield keys whose events were created within a period, with those times."""
        after = ""
        while rows := list(self._select("WHERE key > ? ORDER BY key LIMIT ?", (after, MOST_IDS))):
            after = rows[-1][0]
            yield {
                key: found.created_at
                for key, found in rows
                if found.created_at and found.copies and since <= found.created_at < until
            }

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _select(self, rest: str, values: tuple[object, ...]) -> Iterator[tuple[str, KeyInKafka]]:
        for key, created_at, copies, unread, dead in self._file.execute(
            f"SELECT key, created_at, copies, unread, dead FROM keys {rest}", values
        ):
            moment = datetime.fromisoformat(created_at) if created_at else None
            yield key, KeyInKafka(moment, copies, unread, bool(dead))


def index_topic(
    topic: str, group: str, *, since: datetime, check: Callable[[], object]
) -> KafkaIndex:
    """Index a topic from a time to its end: an event may be published long after its row closed.

    Args:
        group: The consumer group whose offsets separate read from unread.
        check: Called every thousand records; what it raises ends the reading.

    Raises:
        KafkaError, OSError: Kafka is away.
        sqlite3.Error: the disk of TMPDIR is full.
    """
    servers = settings.KAFKA_BOOTSTRAP_SERVERS
    with opened_reader(servers) as reader:
        index = KafkaIndex(kept_since(reader, topic))
        parts = partitions_of(reader, topic)
        # Read first: what the group commits during the scan then counts as unread, so as late.
        committed = committed_offsets(servers, group, parts) if parts else {}
        dead_letters = dead_letter_topic(topic, group)
        records = read(reader, topic, dead_letters, since=since) or ()
        for number, raw in enumerate(records):
            if number % MOST_IDS == 0:
                check()
            if raw.topic == dead_letters:
                index.add(_key(raw), None, copies=0, unread=0, dead=1)
            elif not raw.is_tombstone:
                unread = raw.offset >= committed.get((raw.topic, raw.partition), 0)
                index.add(_key(raw), _created_at(raw), copies=1, unread=unread, dead=0)
    return index


def _key(raw: Record) -> str:
    """Return the message's key, an AggregateId, in the outbox's spelling."""
    if raw.key is None:
        return f"{raw.partition}/{raw.offset}"
    text = raw.key.decode(errors="backslashreplace")
    try:
        return str(parse_id(text))
    except ValueError:
        return text


def _created_at(raw: Record) -> datetime:
    header = dict(raw.headers).get("CreatedAt")
    try:
        return parse_time((header or b"").decode())
    except ValueError:
        return datetime.fromtimestamp(raw.timestamp / 1000, UTC)
