"""Is it alive, can it serve, and what does Prometheus see (design, section 15)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import prometheus_client
import pytest
from django.core.management import call_command
from django.db import close_old_connections, connection
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.monitoring import scrape, web
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import ActivityCloserRun
from sessions.options import ActivityCloserOptions
from tests.api import START, assert_unavailable
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, silent_session
from tests.outages import postgres_away

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process just started: nothing known of migrations, nothing read for a scrape."""
    monkeypatch.setattr(web, "_migrated", False)
    registry = prometheus_client.CollectorRegistry()
    registry.register(scrape.StorageCollector())
    monkeypatch.setattr(scrape, "_storage", registry)


# -- /health -------------------------------------------------------------------------------


def test_live_asks_nothing_of_the_database(
    api: Client, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = api.get("/health/live")
    assert (response.status_code, response.json()) == (200, {"Status": "live"})
    assert len(statements) == 0


@pytest.mark.django_db(transaction=True)
def test_live_answers_while_postgresql_is_away(api: Client) -> None:
    with postgres_away():
        assert api.get("/health/live").status_code == 200


def test_ready_on_a_migrated_database(api: Client) -> None:
    response = api.get("/health/ready")
    assert (response.status_code, response.json()) == (200, {"Status": "ready"})


def test_ready_asks_for_the_migrations_once_and_for_the_database_always(
    api: Client, count_statements: Callable[[], Any]
) -> None:
    api.get("/health/ready")
    with count_statements() as statements:
        assert api.get("/health/ready").status_code == 200
    assert [s["sql"] for s in statements] == ["SHOW default_transaction_isolation"]


@pytest.mark.parametrize("app", ["outbox", "views", "activity_sessions", "admin"])
def test_not_ready_while_a_migration_is_missing_and_ready_after_it(api: Client, app: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM django_migrations WHERE app = %s RETURNING app, name, applied", [app]
        )
        applied = cursor.fetchall()
    assert applied

    before = api.get("/health/ready")
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, %s)", applied
        )
    after = api.get("/health/ready")

    assert_unavailable(before)
    assert before.json()["detail"] == "Not migrated."
    assert after.status_code == 200


def test_not_ready_on_an_empty_database(api: Client) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_migrations RENAME TO hidden")
    assert_unavailable(api.get("/health/ready"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("known", [False, True], ids=["at its start", "after it was ready"])
def test_not_ready_while_postgresql_is_away_and_ready_again_after(api: Client, known: bool) -> None:
    if known:
        api.get("/health/ready")
    with postgres_away():
        away = api.get("/health/ready")
    close_old_connections()  # a server does so between requests; Django's client does not
    assert_unavailable(away)
    assert api.get("/health/ready").status_code == 200


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_probes_of_production_come_without_tls(settings: Any, api: Client, path: str) -> None:
    settings.SECURE_SSL_REDIRECT = True
    assert api.get(path).status_code == 200
    assert api.get("/admin/").status_code == 301


# -- /metrics ------------------------------------------------------------------------------


def scraped(api: Client) -> dict[str, Any]:
    """Scrape and parse as Prometheus does; return the families by name."""
    response = api.get("/metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.content.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)  # the format forbids a family twice
    return dict(zip(names, families, strict=True))


def value(api: Client, name: str) -> float:
    (sample,) = scraped(api)[name].samples
    assert sample.labels == {}
    return float(sample.value)


KINDS = {
    "activity_sessions_started": "counter",
    "activity_closer_run_duration_ms": "histogram",
    "activity_closer_sessions_closed": "counter",
    "activity_closer_views_closed": "counter",
    "activity_closer_batch_backlog": "gauge",
    "activity_closer_errors": "counter",
    "activity_closer_close_lag_seconds": "histogram",
    "activity_oldest_active_seconds": "gauge",
    "activity_active_sessions": "gauge",
    "activity_closer_last_success_timestamp_seconds": "gauge",
    "outbox_pending": "gauge",
    "outbox_parked": "gauge",
    "outbox_oldest_pending_seconds": "gauge",
    "outbox_published": "counter",
    "outbox_errors": "counter",
    "outbox_publish_latency_seconds": "histogram",
}


def test_every_metric_of_the_design_is_there_with_kind_and_meaning(api: Client) -> None:
    ActivityCloser(ActivityCloserOptions()).run()

    families = scraped(api)

    assert {name: families[name].type for name in KINDS if name in families} == KINDS
    assert [name for name in KINDS if not families[name].documentation] == []


def test_djangos_own_metrics_are_there_too(api: Client) -> None:
    api.get("/health/live")
    assert "django_http_requests_before_middlewares" in scraped(api)


def test_buckets_of_the_close_lag_are_the_designs(api: Client) -> None:
    family = scraped(api)["activity_closer_close_lag_seconds"]
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    expected = [*range(600, 1801, 30), 3600, 86_400]
    assert [float(bound) for bound in bounds] == [*expected, float("inf")]


def test_active_sessions_and_the_oldest_silence_are_read_from_the_database(api: Client) -> None:
    make_session()
    make_session(silent=10 * MINUTE)
    silent_session(minutes=60)
    ActivityCloser(ActivityCloserOptions()).run()

    families = scraped(api)

    assert families["activity_active_sessions"].samples[0].value == 2
    assert 600 <= families["activity_oldest_active_seconds"].samples[0].value < 3600


def test_empty_database_has_no_silence_and_no_backlog(api: Client) -> None:
    families = scraped(api)
    for name in (
        "activity_active_sessions",
        "activity_oldest_active_seconds",
        "outbox_pending",
        "outbox_parked",
        "outbox_oldest_pending_seconds",
    ):
        assert families[name].samples[0].value == 0
    assert "activity_closer_last_success_timestamp_seconds" not in families


def test_last_success_is_the_end_of_the_last_run_that_succeeded(api: Client) -> None:
    ActivityCloser(ActivityCloserOptions()).run()
    success = ActivityCloserRun.objects.get()
    ActivityCloserRun.objects.create(
        id=new_id(),
        started_at=statement_time(),
        finished_at=statement_time(),
        cutoff=statement_time(),
        outcome="Failed",
    )
    assert success.finished_at is not None
    assert value(api, "activity_closer_last_success_timestamp_seconds") == pytest.approx(
        success.finished_at.timestamp()
    )


def test_outbox_is_counted_as_pending_and_parked(api: Client) -> None:
    silent_session(minutes=30, views=3)
    ActivityCloser(ActivityCloserOptions()).run()
    oldest, parked, published, _ = OutboxMessage.objects.order_by("id")
    OutboxMessage.objects.filter(id=oldest.id).update(created_at=statement_time() - 5 * MINUTE)
    OutboxMessage.objects.filter(id=parked.id).update(parked_at=statement_time())
    OutboxMessage.objects.filter(id=published.id).update(published_at=statement_time())

    families = scraped(api)

    assert families["outbox_pending"].samples[0].value == 2
    assert families["outbox_parked"].samples[0].value == 1
    assert 300 <= families["outbox_oldest_pending_seconds"].samples[0].value < 3600


def test_scrape_reads_the_database_at_most_once_in_ten_seconds(
    api: Client, count_statements: Callable[[], Any]
) -> None:
    scraped(api)
    with count_statements() as statements:
        scraped(api)
    assert len(statements) == 0


def test_scrape_reads_no_whole_table(api: Client, count_statements: Callable[[], Any]) -> None:
    with count_statements() as statements:
        scraped(api)
    reads = [statement["sql"] for statement in statements if " FROM " in statement["sql"]]
    assert reads
    assert [read for read in reads if "LIMIT" not in read] == []


@pytest.mark.django_db(transaction=True)
def test_metrics_answer_without_the_databases_while_it_is_away(api: Client) -> None:
    with postgres_away():
        families = scraped(api)

    assert "activity_closer_errors" in families
    assert not families.keys() & {"activity_active_sessions", "outbox_pending"}


@contextmanager
def counted(api: Client, name: str) -> Iterator[list[float]]:
    """Yield a list that holds by how much a counter grew in the block."""
    grown: list[float] = []

    def total() -> float:
        samples = scraped(api)[name].samples
        return float(sum(each.value for each in samples if each.name.endswith("_total")))

    before = total()
    yield grown
    grown.append(total() - before)


@pytest.mark.django_db(transaction=True)
def test_started_sessions_are_counted_and_restored_ones_are_not(api: Client) -> None:
    with counted(api, "activity_sessions_started") as grown:
        first = api.post(START, headers={"User-Agent": USER_AGENT})
        api.post(START, headers={"X-Anonymous-Id": first.json()["AnonymousId"]})
    assert grown == [1]


def test_closed_sessions_and_views_are_counted(api: Client) -> None:
    silent_session(minutes=30, views=3)
    with (
        counted(api, "activity_closer_sessions_closed") as sessions,
        counted(api, "activity_closer_views_closed") as views,
        counted(api, "activity_closer_errors") as errors,
    ):
        ActivityCloser(ActivityCloserOptions()).run()
    assert (sessions, views, errors) == ([1], [3], [0])


def test_metrics_carry_no_ids_and_no_addresses(api: Client) -> None:
    session = silent_session(minutes=30, ip_address="203.0.113.77")
    api.post(START, headers={"X-Anonymous-Id": str(session.anonymous_id)})
    ActivityCloser(ActivityCloserOptions()).run()

    text = api.get("/metrics").content.decode()

    for secret in (session.id, session.anonymous_id, "203.0.113.77", "Mozilla", "127.0.0.1"):
        assert str(secret) not in text


def test_no_migration_is_missing() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
