"""A message on its way through a consumer, from the poll to the commit."""

from enum import Enum
from typing import Generic, TypeVar

import msgspec
from opentelemetry.context import Context

from pinactivity.kafka.record import Record

Row = TypeVar("Row")


class State(Enum):
    DECODED = "decoded"
    WRITTEN = "written"
    SKIPPED = "skipped"
    POISON = "poison"
    DEAD_LETTERED = "dead-lettered"


class Entry(msgspec.Struct, Generic[Row]):
    """A message, the row that the handler made of it, and how far it is."""

    record: Record
    row: Row
    state: State = State.DECODED
    reason: str = ""
    """Why it is poison."""
    context: Context | None = None
    """The trace that the message carries, where somebody reads it."""

    @property
    def is_poison(self) -> bool:
        return self.state is State.POISON or self.state is State.DEAD_LETTERED

    def mark_as_poison(self, reason: str) -> None:
        self.state, self.reason = State.POISON, reason
