"""Work to do while one waits: a loop offers it, and whoever begins a long wait does it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_offered: ContextVar[Callable[[], None] | None] = ContextVar("meanwhile", default=None)


@contextmanager
def offered(work: Callable[[], None]) -> Iterator[None]:
    """Offer work to what the block calls. It is done once, or not at all; it must not raise."""
    token = _offered.set(work)
    try:
        yield
    finally:
        _offered.reset(token)


def do_offered() -> None:
    """Do what is offered, if anything is: the wait is as long, and the time not lost."""
    work = _offered.get()
    if work is not None:
        _offered.set(None)
        work()
