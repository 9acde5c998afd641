"""Fixtures of the tests of dev-stats: consumers with topics of their own, and all stores."""

from collections.abc import Iterator
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from devstats import tasks
from devstats.reconciliation import compare
from tests.consuming import Broker, MemoryBroker, RealBroker
from tests.dev_stats import OBJECTS, SESSIONS, VIEWS, Ingest, Scale
from tests.reconciliation import Stores
from tests.tokens import SECRET


@pytest.fixture
def development_secret(settings: Any) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET


@pytest.fixture
def scale(pytestconfig: pytest.Config) -> Scale:
    if pytestconfig.getoption("--dev-stats-scale") == "full":
        return Scale(kills=50, away_seconds=120, joins=18, join_seconds=10)
    return Scale(kills=10, away_seconds=0, joins=1, join_seconds=0)


@pytest.fixture
def broker() -> Broker:
    return MemoryBroker()


@pytest.fixture
def real_broker() -> Iterator[RealBroker]:
    broker = RealBroker()
    yield broker
    broker.close()


@pytest.fixture
def sessions(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, SESSIONS)
    yield ingest
    ingest.close()


@pytest.fixture
def views(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, VIEWS)
    yield ingest
    ingest.close()


@pytest.fixture
def objects(broker: Broker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(broker, OBJECTS)
    yield ingest
    ingest.close()


@pytest.fixture
def real_sessions(real_broker: RealBroker, clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(real_broker, SESSIONS)
    yield ingest
    ingest.close()


@pytest.fixture
def stores(clickhouse: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    broker = RealBroker()
    made = Stores(broker)
    for module in (compare, tasks):
        monkeypatch.setattr(module, "reconciled_topics", lambda: made.topics)
    yield made
    broker.close()
