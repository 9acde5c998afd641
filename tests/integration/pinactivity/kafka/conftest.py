"""The brokers, benches and processes of consumers' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.consuming import (
    Bench,
    Broker,
    MemoryBroker,
    NumberHandler,
    RealBroker,
)
from tests.echo.process import Echo


@pytest.fixture(params=["memory", "memory-prefetching", "real-prefetching"])
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker, and whether handlers prefetch the next batch while they write one."""
    monkeypatch.setattr(NumberHandler, "all_prefetch", "prefetching" in request.param)
    broker: Broker = MemoryBroker() if "memory" in request.param else RealBroker()
    yield broker
    broker.close()


@pytest.fixture
def bench(broker: Broker) -> Iterator[Bench]:
    bench = Bench(broker)
    yield bench
    bench.close()


@pytest.fixture
def handler() -> NumberHandler:
    return NumberHandler()


@pytest.fixture
def echo(transactional_db: None, tmp_path: Path) -> Iterator[Echo]:
    broker = RealBroker()
    bench = Bench(broker)
    yield Echo(bench, tmp_path)
    bench.close()
    broker.close()
