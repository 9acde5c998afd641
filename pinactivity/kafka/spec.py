"""What an app declares of a consumer, in its `consumers.py`:

    register(ConsumerSpec(name="..", topics=(..,), group="..", handler=MyHandler))

`manage.py consume NAME` runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from django.utils.module_loading import autodiscover_modules

from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry, Row
from pinactivity.kafka.record import Record
from pinactivity.telemetry import metrics


class SlowDown(Exception):
    """Keep the batch, wait (1 s to 60 s) and flush it again. No offset moves."""


class SinkUnavailable(SlowDown):
    """The storage that the handler writes to is away; the messages are not at fault."""


class Handler(Protocol[Row]):
    """What a consumer does. Each thread has an instance, which may keep a client."""

    def decode(self, record: Record) -> Row | None:
        """Make a row of a message, purely: no network, no database.

        Returns:
            The row; None skips the message (the handler counts why).

        Raises:
            Poison: the message breaks the contract. Any other exception counts as
                `Poison("handler-error")`.
        """

    def flush(self, entries: Sequence[Entry[Row]], while_waiting: Callable[[], None], /) -> None:
        """Write rows durably, all or none or idempotently: they may come again.

        `entries` are in order within a partition, never empty, and exactly one when the
        consumer works `one_by_one` (then the message's correlation id and trace are in force).

        `while_waiting` polls and decodes the next batch. A handler may call it, in its own thread
        and any number of times, while it waits for its storage; it never raises, and nothing of
        the next batch is written before this one is committed.

        Raises:
            Poison: a row is at fault. A DataError of PostgreSQL means the same. The loop halves
                the batch until it has found the row, dead-letters it and writes the others.
            SinkUnavailable: the storage is away. The batch is kept, no offset moves. Any
                other exception means the same, and is logged as an error.
        """

    def close(self) -> None:
        """Close the connections of the handler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A consumer as an app declares it.

    Args:
        name: What `manage.py consume` calls it: "signed-in".
        topics: Read with one group; each has its dead-letter topic `<topic>.<group>.dlq`.
        group: The consumer group.
        handler: Makes the handler, in the thread that will use it.
        limits: Of a batch; asked when the consumer is made, since they may be settings.
        one_by_one: `flush` gets one entry a call: one transaction a message. Offsets are still
            committed once a batch.
        extra_metrics: Fed besides the loop's own, for consumers whose specification names them.
    """

    name: str
    topics: tuple[str, ...]
    group: str
    handler: Callable[[], Handler[Any]]
    limits: Callable[[], BatchLimits] = BatchLimits
    one_by_one: bool = False
    extra_metrics: tuple[metrics.ConsumerMetrics, ...] = ()


_registered: dict[str, ConsumerSpec] = {}


def register(spec: ConsumerSpec) -> ConsumerSpec:
    """Declare a consumer; called at the import of an app's `consumers.py`.

    Raises:
        ValueError: another declaration has the name.
    """
    if _registered.setdefault(spec.name, spec) != spec:
        raise ValueError(f"There are two consumers {spec.name}.")
    return spec


def registered_consumers() -> Mapping[str, ConsumerSpec]:
    """Import every app's `consumers.py` and return what they declared, by name."""
    autodiscover_modules("consumers")
    return _registered
