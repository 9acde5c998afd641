"""Fixtures on the real servers that `make test` starts (see embedded/)."""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pinactivity.kafka.topic_admin import create_topics
from pinactivity.kafka.topics import TOPICS
from tests.kafka import TopicReader

USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/120.0 Safari/537.36"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--storm-seconds",
        type=float,
        default=15,
        help="how long test_opening_while_closing.py opens views under closers",
    )
    parser.addoption(
        "--outbox-scale",
        choices=("small", "full"),
        default="small",
        help="full takes the design's numbers in tests/acceptance/test_outbox.py",
    )
    parser.addoption(
        "--chaos-scale",
        choices=("small", "full"),
        default="small",
        help="full takes the design's numbers in tests/acceptance/test_closer_chaos.py",
    )
    parser.addoption(
        "--dev-stats-scale",
        choices=("small", "full"),
        default="small",
        help="full takes minutes of outages in tests/integration/devstats/test_ingest.py, and"
        " 2,000 calls of each read in tests/acceptance/test_schema_conformance.py",
    )
    parser.addoption(
        "--picture",
        type=Path,
        help="where test_dev_stats_in_browser.py leaves a picture of the page",
    )


@pytest.fixture
def now() -> datetime:
    """A moment of the past, with microseconds, for services that take an explicit `now`."""
    return datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture
def api() -> Client:
    """A front end: sends JSON and a User-Agent."""
    return Client(headers={"User-Agent": USER_AGENT})


@pytest.fixture
def postgres_log() -> Callable[[], list[str]]:
    """Return the ERROR lines that PostgreSQL has logged since the test began."""
    path = os.environ.get("EMBEDDED_POSTGRES_LOG")
    if path is None:
        pytest.skip("PostgreSQL is not the embedded one: its log is out of reach")
    log = Path(path)
    offset = log.stat().st_size

    def errors() -> list[str]:
        with log.open("rb") as file:
            file.seek(offset)
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if " ERROR: " in line or "FATAL: " in line]

    return errors


@pytest.fixture(scope="session")
def kafka_topics() -> None:
    """Make the topics, once."""
    create_topics(
        TOPICS,
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=6,
        replication=1,
        retention=timedelta(days=30),
    )


@pytest.fixture
def read_topic(kafka_topics: None) -> Iterator[Callable[[str], list[Any]]]:
    """Return what arrived in a topic since the test began."""
    readers = {topic: TopicReader(topic) for topic in TOPICS[:3]}

    def read(topic: str) -> list[Any]:
        return readers[topic].read()

    yield read
    for reader in readers.values():
        reader.close()


@pytest.fixture
def count_statements() -> Any:
    """Count the SQL statements of a block, transaction control apart."""
    from django.test.utils import CaptureQueriesContext  # noqa: PLC0415 - needs settings

    return lambda: CaptureQueriesContext(connection)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Keep the spans that end during the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("pinactivity.telemetry.tracing.tracer", provider.get_tracer("tests"))
    yield exporter
    provider.shutdown()


@pytest.fixture(scope="session")
def _clickhouse_tables() -> None:
    from tests.dev_stats import make_tables  # noqa: PLC0415 - needs settings

    make_tables()


@pytest.fixture
def clickhouse(_clickhouse_tables: None) -> Iterator[Any]:
    """A connection to ClickHouse that may do everything; dev-stats' tables are empty."""
    from devstats.clickhouse import connect_writer  # noqa: PLC0415 - needs settings
    from tests.dev_stats import clear_tables  # noqa: PLC0415 - needs settings

    client = connect_writer()
    clear_tables(client)
    yield client
    client.close()


@pytest.fixture
def writer(clickhouse: Any) -> Iterator[Any]:
    """The one way into dev-stats' empty tables."""
    from devstats.writer import FactWriter  # noqa: PLC0415 - needs settings

    writer = FactWriter()
    yield writer
    writer.close()
