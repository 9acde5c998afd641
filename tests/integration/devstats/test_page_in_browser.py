"""The page of dev-stats as a building developer sees it: in Chromium, on a phone and a desktop."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client as ClickHouse

from devstats.facts import SessionFact, ViewFact
from devstats.writer import FactWriter
from pinactivity.core.ids import new_id
from pinactivity.core.times import say_duration
from tests.browser import Browser, opened_browser
from tests.facts import session_fact, store, view_fact
from tests.page_readers import PAGE, PASSWORD, make_reader

pytestmark = pytest.mark.django_db(transaction=True)

BUILDER = UUID("9e1c5f0a-3b7d-4c52-8f64-d20a7e91b3c8")
FIRST = datetime(2026, 3, 1, tzinfo=UTC)
DAYS = 31
SILENT_DAYS = (9, 10)
"""Of the month: without a session."""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with opened_browser(tmp_path) as browser:
        yield browser


@pytest.fixture
def month(clickhouse: ClickHouse) -> list[SessionFact | ViewFact]:
    """A month of sessions with views of BUILDER's twelve objects, busier at weekends."""
    chance = random.Random(31)
    objects = [UUID(int=chance.getrandbits(128), version=4) for _ in range(12)]
    users, guests = ([new_id() for _ in range(many)] for many in (150, 400))
    facts: list[SessionFact | ViewFact] = []
    for day in range(DAYS):
        begin = FIRST + timedelta(days=day)
        busy = 0 if day in SILENT_DAYS else (34 if begin.weekday() >= 5 else 20) + day // 3
        for _ in range(busy + chance.randint(-6, 6) if busy else 0):
            session = session_fact(
                int(chance.lognormvariate(5.3, 0.9)),
                begin + timedelta(seconds=chance.uniform(25_000, 82_000)),
                anonymous_id=chance.choice(guests),
                user_id=chance.choice(users) if chance.random() < 0.35 else None,
            )
            facts.append(session)
            seen = {min(int(chance.expovariate(0.35)), 11) for _ in range(chance.randint(1, 4))}
            facts += [
                view_fact(
                    session,
                    developer_id=BUILDER,
                    property_object_id=objects[place],
                    duration_seconds=session.duration_seconds // len(seen),
                )
                for place in seen
            ]
    writer = FactWriter()
    store(writer, *facts)
    writer.close()
    return facts


def test_developer_logs_in_and_sees_their_month_on_phone_and_desktop(
    browser: Browser,
    live_server: Any,
    month: list[SessionFact | ViewFact],
    request: pytest.FixtureRequest,
) -> None:
    sessions = [fact for fact in month if isinstance(fact, SessionFact)]
    views = [fact for fact in month if isinstance(fact, ViewFact)]
    make_reader(BUILDER)
    browser.resize(360, 740)
    browser.open(f"{live_server.url}{PAGE}?From=2026-03-01&Through=2026-03-31")
    assert browser.texts("h1") == ["Log in"]
    assert_fits(browser)
    browser.type("#id_username", "builder")
    browser.type("#id_password", PASSWORD)
    browser.press_enter()

    for width, height, dark in ((360, 740, True), (1280, 900, False)):
        browser.resize(width, height, dark=dark)
        assert_fits(browser)
        ground = browser.read("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 3 * 128) == dark

        assert browser.texts(".cards dt") == [
            "Sessions",
            "Unique viewers",
            "Average duration",
            "Median duration",
            "P95 of duration",
        ]
        average = sum(session.duration_seconds for session in sessions) / len(sessions)
        values = browser.texts(".cards dd")
        viewers = {session.user_id or session.anonymous_id for session in sessions}
        assert values[:2] == [str(len(sessions)), str(len(viewers))]
        assert values[2] == say_duration(average)

        for chart in ("sessions-by-day", "duration-by-day"):
            bars = visible_boxes(browser, f"#{chart} svg path.bar")
            assert len(bars) == DAYS - len(SILENT_DAYS)
            assert all(1 <= bar["height"] <= 144 for bar in bars)
            assert len({round(bar["x"]) for bar in bars}) == len(bars)  # side by side
        guests, users = visible_boxes(browser, "#guests-and-users svg path")
        share = sum(session.user_id is None for session in sessions) / len(sessions)
        drawn = guests["width"] / (guests["width"] + users["width"])
        assert drawn == pytest.approx(share, abs=0.01)

        listed = browser.texts("section tbody th")
        assert len(listed) == 12
        assert set(listed) == {str(view.property_object_id) for view in views}
        counts = [int(text) for text in browser.texts("section tbody td:nth-child(2)")]
        assert counts == sorted(counts, reverse=True)
        assert sum(counts) == len(views)

    if picture := request.config.getoption("--picture"):
        picture.write_bytes(browser.picture())
    assert browser.errors == []
    assert browser.requested_hosts == {live_server.url.removeprefix("http://")}


def assert_fits(browser: Browser) -> None:
    """No scrolling sideways, and the style sheet is there."""
    root = "document.documentElement"
    assert browser.read(f"{root}.scrollWidth <= {root}.clientWidth")
    assert browser.read("document.styleSheets[0].cssRules.length") > 10


def visible_boxes(browser: Browser, selector: str) -> list[dict[str, float]]:
    """Where elements are on the screen; each must be somewhere, with an area."""
    boxes: list[dict[str, float]] = browser.read(
        f"[...document.querySelectorAll('{selector}')].map(e => e.getBoundingClientRect().toJSON())"
    )
    width = browser.read("document.documentElement.clientWidth")
    assert all(0 <= box["left"] < box["right"] <= width for box in boxes)
    return boxes
