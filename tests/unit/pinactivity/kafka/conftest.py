"""What the tests of the loop work on."""

from collections.abc import Iterator

import pytest

from tests.consuming import (
    Bench,
    MemoryBroker,
    NumberHandler,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryBroker())
    yield bench
    bench.close()


@pytest.fixture
def handler() -> NumberHandler:
    return NumberHandler()
