"""The last day of the ActivityCloserJob above its list in the admin: totals, picture, table."""

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.template.loader import render_to_string
from django.test import Client
from django.urls import reverse

from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import ActivityCloserRun
from sessions.options import ActivityCloserOptions
from sessions.run_chart import chart_runs
from sessions.selectors import HISTORY_STEP, RunsOfStep, closer_history
from tests.factories import make_session, silent_session
from tests.plans import index_scans

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)
SVG = "{http://www.w3.org/2000/svg}"


def make_run(started_at: datetime, **fields: Any) -> ActivityCloserRun:
    return ActivityCloserRun.objects.create(
        **{
            "id": new_id(),
            "started_at": started_at,
            "finished_at": started_at,
            "cutoff": started_at,
            "outcome": "Succeeded",
            **fields,
        }
    )


def svg_of(page: str) -> ET.Element:
    """Parse the only picture of a page; it must be well-formed, without scripts and links."""
    (text,) = re.findall("<figure>.*?(<svg.*?</svg>)", page, re.DOTALL)
    root = ET.fromstring(text.replace("<svg", f'<svg xmlns="{SVG[1:-1]}"', 1))
    names = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert names == {"svg", "title", "desc", "path", "text", "g"}
    assert not any("href" in name for element in root.iter() for name in element.attrib)
    return root


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(root: ET.Element) -> list[list[tuple[float, float, float]]]:
    """Return the bars of each panel: (left edge, width, height)."""
    bar = re.compile(r"M([\d.]+) [\d.]+v-([\d.]+)h([\d.]+)V")
    panels = [
        [bar.match(path.attrib["d"]) for path in panel.iter(f"{SVG}path")]
        for panel in root.iter(f"{SVG}g")
    ]
    return [
        [(float(found[1]), float(found[3]), float(found[2])) for found in panel if found]
        for panel in panels
    ]


def table_of(page: str) -> list[list[str]]:
    (body,) = re.findall("<details>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    rows = re.findall("<tr>(.*?)</tr>", body)
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_runs_add_up_in_steps_of_ten_minutes_over_a_day() -> None:
    now = NOON + timedelta(minutes=7)
    make_run(now - timedelta(days=1, minutes=-2), closed_sessions=99)  # in the step before
    make_run(NOON - timedelta(days=1, minutes=-10), closed_sessions=1, active_sessions=5)
    make_run(NOON - timedelta(microseconds=1), closed_sessions=2, failures=1, outcome="Failed")
    make_run(NOON, closed_sessions=3, closed_views=7, active_sessions=40)
    make_run(NOON + timedelta(minutes=6), closed_sessions=4, closed_views=1, active_sessions=30)

    history = closer_history(now=now)

    assert len(history) == 144
    assert [step.begins_at for step in history] == [
        NOON - HISTORY_STEP * n for n in reversed(range(144))
    ]
    assert history[0] == RunsOfStep(history[0].begins_at, 1, 1, 0, 0, 5)
    assert history[-2] == RunsOfStep(history[-2].begins_at, 1, 2, 0, 1, None)
    assert history[-1] == RunsOfStep(NOON, 2, 7, 8, 0, 40)
    assert {step.runs for step in history[1:-2]} == {0}


def test_run_is_drawn_above_the_list_and_repeated_as_a_table() -> None:
    silent_session(minutes=13, views=2)
    for _ in range(3):
        make_session()
    ActivityCloser(ActivityCloserOptions()).run()
    client = Client()
    client.force_login(User.objects.create_superuser("root"))

    page = client.get(reverse("admin:activity_sessions_activitycloserrun_changelist"))

    content = page.content.decode()
    root = svg_of(content)
    assert root.attrib["role"] == "img"
    title, desc = root[0], root[1]
    assert root.attrib["aria-labelledby"].split() == [title.attrib["id"], desc.attrib["id"]]
    assert desc.text is not None
    assert desc.text.startswith(
        "Closed: 1 sessions and 2 views. Failures: 0. Active sessions: 3 at most."
    )
    assert texts(root)[:4] == [
        "Closed sessions, up to 1",
        "Closed views, up to 2",
        "Failures, up to 0",
        "Active sessions, up to 3",
    ]
    assert [len(panel) for panel in bars(root)] == [1, 1, 0, 1]
    ((moment, *totals),) = table_of(content)
    assert totals == ["1", "1", "2", "0", "3"]
    started = ActivityCloserRun.objects.get().started_at
    assert timedelta(0) <= started - datetime.fromisoformat(f"{moment}+00:00") < HISTORY_STEP
    assert content.index("<figure") < content.index('id="result_list"')


def test_no_run_is_said_in_words() -> None:
    make_run(statement_time() - timedelta(days=2))
    client = Client()
    client.force_login(User.objects.create_superuser("root"))

    page = client.get(reverse("admin:activity_sessions_activitycloserrun_changelist"))

    assert "No run in the last 24 hours." in page.content.decode()
    assert "<figure" not in page.content.decode()


def drawn(steps: list[RunsOfStep]) -> str:
    return render_to_string("activity_sessions/run_chart.html", {"chart": chart_runs(steps)})


def history(**values: tuple[int, ...]) -> list[RunsOfStep]:
    """Steps of a run each, with the given totals."""
    length = len(next(iter(values.values())))
    return [
        RunsOfStep(
            NOON + HISTORY_STEP * index,
            runs=1,
            **{name: totals[index] for name, totals in values.items()},
        )
        for index in range(length)
    ]


def test_bars_are_to_scale_side_by_side_and_the_least_can_be_seen() -> None:
    root = svg_of(drawn(history(closed_sessions=(1000, 500, 0, 1))))
    sessions, views, *_ = bars(root)
    (x1, width, full), (x2, _, half), (x4, _, least) = sessions
    assert half == full / 2
    assert least > full / 1000
    assert x2 - x1 == (x4 - x2) / 2 > width
    assert views == []
    assert "Closed sessions, up to 1,000" in texts(root)


def test_steps_without_a_run_are_grey_but_for_the_one_under_way() -> None:
    steps = history(closed_sessions=(1, 1, 1, 1))
    steps[1], steps[3] = RunsOfStep(steps[1].begins_at), RunsOfStep(steps[3].begins_at)
    page = drawn(steps)
    root = svg_of(page)
    grey = root.find(f"{SVG}path")
    assert grey is not None
    (gap,) = re.findall(r"M(\d+) ", grey.attrib["d"])
    (first, *_), _, _, _ = bars(root)
    assert int(gap) == first[0] + 5
    assert "shown in grey: 1." in (root[1].text or "")
    assert [row[0] for row in table_of(page)] == ["2026-03-29 12:20", "2026-03-29 12:00"]


def test_history_reads_a_day_of_a_long_table_by_its_index() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO activity_closer_runs (id, started_at, finished_at, cutoff, outcome)
            SELECT gen_random_uuid(), moment, moment, moment, 'Succeeded'
            FROM (SELECT statement_timestamp() - n * interval '1 min'
                  FROM generate_series(1, 43200) AS n) AS month (moment)
            """
        )
        cursor.execute("ANALYZE activity_closer_runs")
    plans: list[Any] = []

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if "date_bin" in sql:
            execute(f"EXPLAIN (FORMAT JSON) {sql}", parameters, many, context)
            plans.append(context["cursor"].fetchone()[0][0]["Plan"])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        steps = closer_history()

    assert 1430 <= sum(step.runs for step in steps) <= 1440
    (plan,) = plans
    assert index_scans(plan) == ["ix_activity_closer_runs_started_at"]
