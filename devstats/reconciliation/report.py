"""What a reconciliation found: counts by topic and hour, and why messages are lost."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

HOUR = timedelta(hours=1)


class Lost(StrEnum):
    """Why a message has no fact, and none is to come."""

    PARKED = "parked"
    """In the outbox, refused by Kafka; it is sent when a person redrives it."""
    DEAD_LETTERED = "dead-lettered"
    """A consumer marked it as poison."""
    NOT_STORED = "not stored"
    """The consumer has read past it, and there is no fact."""
    NOT_IN_KAFKA = "not in Kafka"
    """Published, or purged as published, and gone before it was stored."""
    NEVER_ENQUEUED = "never enqueued"
    """The row has no message where the outbox would still have it."""


@dataclass(slots=True)
class Count:
    """Of the messages of one topic and hour. Each is at most one of lost, late, not comparable."""

    closed: int = 0
    """Rows in PostgreSQL."""
    outbox: int = 0
    kafka: int = 0
    """Offsets."""
    facts: int = 0
    """Distinct sessions or views in ClickHouse."""
    lost: Counter[Lost] = field(default_factory=Counter)
    unrepairable: int = 0
    """Lost messages without a row in PostgreSQL to repair from."""
    duplicated: int = 0
    """Offsets beyond one for each message."""
    late: int = 0
    """No fact yet, but pending in the outbox or unread by the group."""
    not_comparable: int = 0
    """Stored, and older than what PostgreSQL, the outbox or Kafka keeps."""

    def __iadd__(self, other: "Count") -> Self:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True)
class Report:
    since: datetime
    until: datetime
    counts: dict[tuple[str, datetime], Count] = field(default_factory=dict)
    """By topic and the begin of the hour in UTC; hours without a message are absent."""

    def total(self, topic: str | None = None) -> Count:
        """Add up one topic, or all."""
        total = Count()
        for (name, _), count in self.counts.items():
            if topic in (None, name):
                total += count
        return total

    def count_at(self, topic: str, moment: datetime) -> Count:
        """Return the count of a moment's hour; the caller may add to it."""
        return self.counts.setdefault((topic, hour_of(moment)), Count())


def hour_of(moment: datetime) -> datetime:
    """Return the begin of a moment's hour, in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
