"""A buffer that knows when to flush it, and knows neither Kafka nor offsets."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from pinactivity.core.errors import InvalidOptions

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """When a batch is flushed: `rows` messages, or `age` after its first one.

    Raises:
        InvalidOptions: a field is out of bounds.
    """

    rows: int = 1000
    age: timedelta = timedelta(seconds=5)
    """Zero flushes after every poll: for consumers that people wait for."""

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        if not 1 <= self.rows <= 100_000:
            errors["rows"] = "Must be from 1 to 100000."
        if not timedelta(0) <= self.age <= timedelta(minutes=5):
            errors["age"] = "Must be from 00:00:00 to 00:05:00."
        if errors:
            raise InvalidOptions(errors)


class Batch(Generic[Item]):
    """Items in the order of their arrival.

    Args:
        limits: When it is ready.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, limits: BatchLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._items: list[Item] = []
        self._began = 0.0

    def append(self, item: Item) -> None:
        """Add an item; the first one starts the batch's age."""
        if not self._items:
            self._began = self._clock()
        self._items.append(item)

    def keep(self, wanted: Callable[[Item], bool]) -> int:
        """Drop the items that are not wanted; return how many those were."""
        before = len(self._items)
        self._items = [item for item in self._items if wanted(item)]
        return before - len(self._items)

    def truncate(self, length: int) -> None:
        """Drop the items from the given index on."""
        del self._items[length:]

    def clear(self) -> None:
        """Drop everything."""
        self._items = []

    @property
    def is_empty(self) -> bool:
        return not self._items

    @property
    def is_ready(self) -> bool:
        """Full, or old enough."""
        return bool(self._items) and (self.room == 0 or self.seconds_left == 0)

    @property
    def room(self) -> int:
        """How many items are missing until it is full."""
        return max(self._limits.rows - len(self._items), 0)

    @property
    def seconds_left(self) -> float:
        """How long until it is old enough; an empty batch has its whole age before it."""
        age = self._limits.age.total_seconds()
        return max(self._began + age - self._clock(), 0.0) if self._items else age

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)
