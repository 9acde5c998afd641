"""An orderly stop of a command: SIGTERM or Ctrl-C sets an event, and the command ends its work."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set, while the block runs; in the main thread."""
    stop = threading.Event()

    def set_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, set_stop) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
