"""One loop for every consumer: poll -> handle -> flush -> commit (design, section 10).

An app declares its consumers in `<app>/consumers.py`, and `manage.py consume NAME` runs them:

    register(ConsumerSpec(name="..", topics=(..,), group="..", handler=MyHandler))

Delivery is at least once: an offset is committed last, when everything before it was written
by the handler or acknowledged by the dead-letter topic. Handlers are therefore idempotent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from django.utils.module_loading import autodiscover_modules

Row = TypeVar("Row")


class Poison(Exception):
    """This message can never be handled: to the dead-letter topic with it.

    Args:
        reason: A short code for `dlq-reason`, log and metric ("session-id-missing"); never
            a value of the message.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class SlowDown(Exception):
    """Not now: keep the batch, wait (1 s to 60 s), flush it again. No offset moves."""


class SinkUnavailable(SlowDown):
    """The storage that the handler writes to is away; not the messages' fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One message as the handler gets it: bytes outside, our headers strictly decoded."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    message_id: UUID
    """Of the header MessageId: the SourceEventId of the specification."""
    created_at: datetime
    """Of the header CreatedAt, aware; the broker's timestamp when absent or unreadable."""
    correlation_id: UUID
    """Of the header CorrelationId, else the MessageId."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Decode the value: one JSON object, as strict as `pinactivity.strict_json`.

        Raises:
            Poison: `value-not-json` or `value-not-an-object`.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Entry(Generic[Row]):
    """A row and the message that it was made from."""

    record: Record
    row: Row


class Handler(Protocol[Row]):
    """What a consumer does. One instance a thread, so it may keep a client of its own."""

    def decode(self, record: Record) -> Row | None:
        """Make a row of a message, purely: no network, no database.

        Returns:
            The row; None skips the message (the handler counts why).

        Raises:
            Poison: the message breaks the contract. Any other exception counts as
                `Poison("handler-error")`.
        """

    def flush(self, entries: Sequence[Entry[Row]]) -> None:
        """Write rows durably, all or none or idempotently: they may come again.

        `entries` are in order within a partition, never empty, and exactly one when the
        consumer works `one_by_one` (then the message's correlation id and trace are in force).

        Raises:
            Poison: a row is at fault. Of several rows the loop halves the batch until the one
                stands alone; it goes to the dead-letter topic, the others are written.
            SinkUnavailable: the storage is away. The batch is kept, no offset moves. Any
                other exception is treated so too, and logged as an error.
        """

    def close(self) -> None:
        """Give up what the handler holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """When a batch is flushed: `rows` messages, or `age` after its first one.

    Raises:
        InvalidOptions: a field is out of bounds.
    """

    rows: int = 1000
    age: timedelta = timedelta(seconds=5)
    """Zero flushes after every poll: for consumers that people wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A consumer as an app declares it.

    Args:
        name: What `manage.py consume` calls it: "signed-in".
        topics: Read with one group; each has its dead-letter topic `<topic>.<group>.dlq`.
        group: The consumer group.
        handler: Makes the handler, in the thread that will use it.
        limits: Of a batch.
        one_by_one: `flush` gets one entry a call: one transaction a message. Offsets are still
            committed once a batch.
    """

    name: str
    topics: tuple[str, ...]
    group: str
    handler: Callable[[], Handler[Any]]
    limits: BatchLimits = BatchLimits()
    one_by_one: bool = False


_registered: dict[str, ConsumerSpec] = {}


def register(spec: ConsumerSpec) -> ConsumerSpec:
    """Declare a consumer; called at the import of an app's `consumers.py`.

    Raises:
        ValueError: the name is taken by another declaration.
    """
    if _registered.setdefault(spec.name, spec) != spec:
        raise ValueError(f"There are two consumers {spec.name}.")
    return spec


def registered_consumers() -> Mapping[str, ConsumerSpec]:
    """Import every app's `consumers.py` and return what they declared, by name."""
    autodiscover_modules("consumers")
    return _registered
