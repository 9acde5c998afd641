"""A consumer whose environment states what to read and where to write."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.spec import ConsumerSpec, register


class EchoHandler:
    """Writes a line a message.

    ECHO_DIE kills the process between the writing and the commit, ECHO_HANG never comes back.
    """

    def __init__(self) -> None:
        self._file = Path(os.environ["ECHO_FILE"])

    def decode(self, record: Record) -> int:
        number = record.payload().get("Number")
        if not isinstance(number, int):
            raise Poison("number-missing")
        return number

    def flush(self, entries: Sequence[Entry[int]], while_waiting: Callable[[], None]) -> None:
        if "ECHO_HANG" in os.environ:
            Path(os.environ["ECHO_HANG"]).touch()
            threading.Event().wait()
        with self._file.open("a") as file:
            file.writelines(f"{entry.row}\n" for entry in entries)
        if "ECHO_DIE" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


register(
    ConsumerSpec(
        name="echo",
        topics=(os.environ["ECHO_TOPIC"],),
        group=os.environ["ECHO_GROUP"],
        handler=EchoHandler,
        limits=lambda: BatchLimits(rows=1000, age=timedelta(seconds=float(os.environ["ECHO_AGE"]))),
    )
)
