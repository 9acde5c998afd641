"""Alerts and dashboard against the code: a metric that is renamed would silence them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
import yaml
from django.conf import settings
from django_prometheus.middleware import Metrics

from pinactivity.monitoring import scrape  # noqa: F401 - imported for what they register
from pinactivity.telemetry import metrics

ROOT = Path(settings.BASE_DIR)
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
TESTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yml").read_text())
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
METRIC = re.compile(r"\b(?:activity|outbox|kafka|django|dev_stats)_\w+")


def _expressions() -> Iterator[str]:
    for rule in RULES.values():
        yield rule["expr"]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/pinactivity.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def _exported() -> set[str]:
    """Return the names of all series that the code can export."""
    source = (ROOT / "pinactivity/monitoring/scrape.py").read_text()
    Metrics.get_instance()  # registers the metrics of requests
    names = set(re.findall(r'GaugeMetricFamily\(\s*"(\w+)"', source))
    for family in prometheus_client.REGISTRY.collect():
        names.add(family.name)
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


@pytest.mark.parametrize("expression", sorted(set(_expressions())))
def test_only_metrics_that_exist_are_asked_for(expression: str) -> None:
    assert set(METRIC.findall(expression)) <= _exported()


def test_histogram_takes_many_values_as_it_takes_them_one_by_one() -> None:
    amounts = [-1.0, 0.0, 0.01, 0.02, 0.1, 0.1000001, 3600.0, 3601.0]
    single, bulk = (
        metrics.BulkHistogram("h", "h", ["of"], buckets=(0.01, 0.1, 3600), registry=None)
        for _ in range(2)
    )
    for amount in amounts:
        single.labels("x").observe(amount)
    bulk.labels("x").observe_all(amounts)
    bulk.labels("x").observe_all([])

    assert _samples(bulk) == _samples(single)
    assert _samples(bulk)["_bucket", "0.1"] == 5


def _samples(histogram: metrics.BulkHistogram) -> dict[tuple[str, str | None], float]:
    (family,) = histogram.collect()
    return {
        (sample.name.removeprefix("h"), sample.labels.get("le")): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    cases = [case for test in TESTS["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == RULES.keys()
    assert {case["alertname"] for case in cases} == RULES.keys()


@pytest.mark.parametrize("alert", RULES)
def test_every_alert_has_a_section_in_the_runbook(alert: str) -> None:
    page, _, anchor = RULES[alert]["annotations"]["runbook"].partition("#")
    titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
