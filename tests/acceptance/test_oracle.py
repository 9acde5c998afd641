"""The oracle against hand-made cases and against a second derivation written another way.

``tests/acceptance/oracle.py`` moves a clock and keeps state. The derivation here has neither
clock nor ticks: it takes one device's visit times and cuts them analytically, in whole seconds.
Only if both make the same mistake can a wrong expectation slip through.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple
from uuid import NAMESPACE_URL, UUID, uuid5

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.acceptance.oracle import (
    ExpectedSession,
    ExpectedView,
    Totals,
    Visit,
    anonymous_id,
    expected_session_ended_payload,
    expected_view_ended_payload,
    format_time,
    last_viewed_by_object,
    predict,
    property_object_id,
    read_visits,
    session_totals,
    view_totals,
    view_totals_by_object,
    whole_seconds,
)

DATA = Path(__file__).parents[2] / "data" / "web-visits-1995-08-01.csv"
START = datetime(2024, 3, 1, tzinfo=UTC)


# The second derivation.


class Span(NamedTuple):
    """A stretch of activity in seconds after the start, how it ended, and what it is of."""

    key: int
    created: int
    last: int
    ended: int
    reason: str


def first_tick_after_silence(last: int, threshold: int, tick: int) -> int:
    """Return the first multiple of ``tick`` that is strictly later than last + threshold."""
    return ((last + threshold) // tick + 1) * tick


def spans(key: int, times: Iterable[int], threshold: int, tick: int) -> list[Span]:
    """Cut one sorted series of times where the closer or an abandonment ends it.

    A time at the closing tick itself comes after the tick, hence starts the next span. Earlier
    than that tick, a silence of more than twice the threshold ends the span at the new time.
    """
    found: list[Span] = []
    created = last = None
    for time in times:
        if created is None or last is None:
            created = last = time
            continue
        closing = first_tick_after_silence(last, threshold, tick)
        if time >= closing:
            found.append(Span(key, created, last, closing, "Inactivity"))
            created = time
        elif time - last > 2 * threshold:
            found.append(Span(key, created, last, time, "Abandoned"))
            created = time
        last = time
    if created is not None and last is not None:
        closing = first_tick_after_silence(last, threshold, tick)
        found.append(Span(key, created, last, closing, "Inactivity"))
    return found


def derive(rows: Iterable[Visit], threshold: int, tick: int) -> dict[Span, Counter[Span]]:
    """Return the sessions (key = device), each with its views (key = page)."""
    visits_by_device: dict[int, list[Visit]] = defaultdict(list)
    for row in rows:
        visits_by_device[row.device].append(row)

    derived: dict[Span, Counter[Span]] = {}
    for device, visits in visits_by_device.items():
        for session in spans(device, (visit.seconds for visit in visits), threshold, tick):
            times_by_page: dict[int, list[int]] = defaultdict(list)
            for visit in visits:
                if visit.page is not None and session.created <= visit.seconds <= session.last:
                    times_by_page[visit.page].append(visit.seconds)
            views: Counter[Span] = Counter()
            for page, times in times_by_page.items():
                for view in spans(page, times, threshold, tick):
                    # A view that would outlive its session is closed along with it.
                    outlives = view.ended > session.ended
                    end = session if outlives else view
                    views[view._replace(ended=end.ended, reason=end.reason)] += 1
            derived[session] = views
    return derived


def as_derived(
    sessions: list[ExpectedSession], rows: list[Visit], start: datetime
) -> dict[Span, Counter[Span]]:
    """Translate the oracle's answer back to seconds, device numbers and page numbers."""
    devices = {uuid5(NAMESPACE_URL, f"device:{row.device}"): row.device for row in rows}
    pages = {
        uuid5(NAMESPACE_URL, f"page:{row.page}"): row.page for row in rows if row.page is not None
    }

    def span(key: int, item: ExpectedSession | ExpectedView) -> Span:
        moments = (item.created_at, item.last_activity_at, item.ended_at)
        created, last, ended = ((moment - start) // timedelta(seconds=1) for moment in moments)
        assert item.duration == timedelta(seconds=last - created)
        return Span(key, created, last, ended, item.close_reason)

    return {
        span(devices[session.anonymous_id], session): Counter(
            span(pages[view.property_object_id], view) for view in session.views
        )
        for session in sessions
    }


def run(
    rows: list[Visit], threshold: int = 720, tick: int = 60, start: datetime = START
) -> list[ExpectedSession]:
    return predict(
        rows, start=start, threshold=timedelta(seconds=threshold), tick=timedelta(seconds=tick)
    )


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


# Both derivations agree.


@pytest.fixture(scope="module")
def visits() -> list[Visit]:
    return read_visits(DATA)


@pytest.mark.parametrize("tick", [60, 3600])
@pytest.mark.parametrize("threshold", [720, 600])
def test_agrees_with_the_derivation_on_the_recorded_visits(
    visits: list[Visit], threshold: int, tick: int
) -> None:
    sessions = run(visits, threshold, tick)

    derived = derive(visits, threshold, tick)
    assert as_derived(sessions, visits, START) == derived
    assert len(sessions) == len(derived)


@st.composite
def recorded_visits(draw: st.DrawFn, around: int) -> list[Visit]:
    """Draw a few devices and pages, with gaps that gather around the interesting lengths."""
    edges = [0, around, 2 * around]
    gap = st.one_of(
        st.integers(0, 3),
        st.integers(0, 3 * around),
        st.sampled_from(edges).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2)),
    )
    seconds = 0
    visits = []
    for _ in range(draw(st.integers(0, 25))):
        seconds += draw(gap)
        device = draw(st.integers(1, 3))
        visits.append(Visit(seconds, device, draw(st.none() | st.integers(1, 3))))
    return visits


@settings(max_examples=500, deadline=None)
@given(data=st.data(), threshold=st.integers(1, 30), tick=st.integers(1, 120))
def test_agrees_with_the_derivation_on_random_visits(
    data: st.DataObject, threshold: int, tick: int
) -> None:
    rows = data.draw(recorded_visits(around=threshold))

    sessions = run(rows, threshold, tick)

    derived = derive(rows, threshold, tick)
    assert as_derived(sessions, rows, START) == derived
    assert len(sessions) == len(derived)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), threshold=st.integers(1, 30), tick=st.integers(1, 120))
def test_keeps_the_invariants(data: st.DataObject, threshold: int, tick: int) -> None:
    rows = data.draw(recorded_visits(around=threshold))

    sessions = run(rows, threshold, tick)

    assert sessions == sorted(sessions, key=lambda s: (s.created_at, s.anonymous_id))
    seen: dict[UUID, ExpectedSession] = {}
    for session in sessions:
        assert session.created_at <= session.last_activity_at <= session.ended_at
        earlier = seen.get(session.anonymous_id)
        assert earlier is None or earlier.ended_at <= session.created_at
        seen[session.anonymous_id] = session
        for view in session.views:
            assert session.created_at <= view.created_at <= view.last_activity_at
            assert view.last_activity_at <= session.last_activity_at
            assert view.last_activity_at <= view.ended_at <= session.ended_at
        if tick <= threshold:
            reasons = {session.close_reason, *(view.close_reason for view in session.views)}
            assert reasons == {"Inactivity"}
            assert session.ended_at - session.last_activity_at <= timedelta(
                seconds=threshold + tick
            )


# The recorded visits.


def test_reads_the_recorded_visits(visits: list[Visit]) -> None:
    assert len(visits) == 30_969
    assert len({visit.device for visit in visits}) == 2_365
    assert visits[:3] == [Visit(0, 1), Visit(4, 2, 1), Visit(6, 1)]
    assert visits == sorted(visits, key=lambda visit: visit.seconds)


@pytest.mark.parametrize(
    ("threshold", "sessions_expected", "views_expected"),
    [
        (720, Totals(3_348, 746_933), Totals(7_752, 185_840)),
        (600, Totals(3_448, 678_606), Totals(7_805, 149_358)),
    ],
)
def test_totals_of_the_recorded_visits(
    visits: list[Visit], threshold: int, sessions_expected: Totals, views_expected: Totals
) -> None:
    sessions = run(visits, threshold)

    assert session_totals(sessions) == sessions_expected
    assert view_totals(sessions) == views_expected
    by_object = view_totals_by_object(sessions).values()
    assert sum(totals.count for totals in by_object) == views_expected.count
    assert sum(totals.total_seconds for totals in by_object) == views_expected.total_seconds


# Hand-made cases.


def test_no_visits_no_sessions() -> None:
    assert run([]) == []


def test_a_single_visit_is_closed_by_the_first_tick_past_the_threshold() -> None:
    assert run([Visit(5, 7, 9)]) == [
        ExpectedSession(
            anonymous_id=uuid5(NAMESPACE_URL, "device:7"),
            created_at=at(5),
            last_activity_at=at(5),
            ended_at=at(780),
            duration=timedelta(0),
            close_reason="Inactivity",
            views=(
                ExpectedView(
                    property_object_id=uuid5(NAMESPACE_URL, "page:9"),
                    created_at=at(5),
                    last_activity_at=at(5),
                    ended_at=at(780),
                    duration=timedelta(0),
                    close_reason="Inactivity",
                ),
            ),
        )
    ]


def test_silence_of_exactly_the_threshold_is_not_enough() -> None:
    (session,) = run([Visit(60, 1)])

    assert session.ended_at == at(60 + 720 + 60)


def test_the_visit_before_the_closing_tick_extends_the_session() -> None:
    (session,) = run([Visit(5, 1), Visit(779, 1)])

    assert session.duration == timedelta(seconds=774)


def test_the_visit_at_the_closing_tick_starts_a_new_session() -> None:
    first, second = run([Visit(5, 1), Visit(780, 1)])

    assert (first.ended_at, first.duration) == (at(780), timedelta(0))
    assert second.created_at == at(780)


def test_a_silent_view_is_closed_alone_and_its_page_opens_anew() -> None:
    rows = [Visit(1, 1, 5), Visit(400, 1, 6), Visit(700, 1), Visit(790, 1, 5)]

    (session,) = run(rows)

    assert (session.created_at, session.last_activity_at) == (at(1), at(790))
    assert session.ended_at == at(1560)
    assert [
        (view.property_object_id, view.created_at, view.ended_at) for view in session.views
    ] == [
        (property_object_id(5), at(1), at(780)),
        (property_object_id(6), at(400), at(1140)),
        (property_object_id(5), at(790), at(1560)),
    ]


def test_a_visit_without_a_page_does_not_extend_views() -> None:
    (session,) = run([Visit(1, 1, 5), Visit(10, 1, 5), Visit(600, 1)])

    (view,) = session.views
    assert view.duration == timedelta(seconds=9)
    assert session.duration == timedelta(seconds=599)


def test_devices_do_not_share_sessions_or_views() -> None:
    first, second = run([Visit(1, 1, 5), Visit(2, 2, 5), Visit(3, 1, 5)])

    assert first.duration == first.views[0].duration == timedelta(seconds=2)
    assert second.duration == second.views[0].duration == timedelta(0)


def test_an_abandoned_session_ends_with_its_views_and_a_new_one_starts() -> None:
    # Ticks an hour apart: at 1446 the session has been silent for 1441 s, more than 2 x 720 s.
    first, second = run([Visit(5, 1, 9), Visit(1446, 1, 9)], tick=3600)

    assert (first.ended_at, first.close_reason) == (at(1446), "Abandoned")
    assert first.duration == timedelta(0)
    assert [(view.ended_at, view.close_reason) for view in first.views] == [(at(1446), "Abandoned")]
    assert (second.created_at, second.ended_at) == (at(1446), at(3600))
    assert second.close_reason == "Inactivity"


def test_silence_of_exactly_twice_the_threshold_is_not_abandoned() -> None:
    (session,) = run([Visit(5, 1, 9), Visit(1445, 1, 9)], tick=3600)

    assert session.duration == timedelta(seconds=1440)
    assert session.views[0].duration == timedelta(seconds=1440)


def test_an_abandoned_view_in_a_live_session_is_closed_at_opening() -> None:
    rows = [Visit(5, 1, 9), Visit(900, 1), Visit(1446, 1, 9)]

    (session,) = run(rows, tick=3600)

    first, second = session.views
    assert (first.ended_at, first.close_reason) == (at(1446), "Abandoned")
    assert first.duration == timedelta(0)
    assert (second.created_at, second.close_reason) == (at(1446), "Inactivity")
    assert session.duration == timedelta(seconds=1441)


def test_an_abandoned_view_without_a_new_opening_is_left_to_the_closer() -> None:
    rows = [Visit(5, 1, 9), Visit(900, 1), Visit(1800, 1)]

    (session,) = run(rows, tick=3600)

    (view,) = session.views
    assert (view.ended_at, view.close_reason) == (at(3600), "Inactivity")


def test_another_time_zone_and_fractions_of_the_start_are_kept() -> None:
    start = datetime(2024, 3, 1, 3, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=3)))

    (session,) = run([Visit(5, 1), Visit(65, 1)], start=start)

    assert session.created_at == at(5) + timedelta(microseconds=250_000)
    assert session.created_at.tzinfo is UTC
    assert session.duration == timedelta(seconds=60)
    assert session.ended_at == at(840) + timedelta(microseconds=250_000)


# Input that cannot be played.


def test_refuses_rows_out_of_order_or_before_the_start() -> None:
    with pytest.raises(ValueError, match="out of order"):
        run([Visit(2, 1), Visit(1, 1)])
    with pytest.raises(ValueError, match="out of order"):
        run([Visit(-1, 1)])


def test_refuses_a_start_without_a_time_zone() -> None:
    with pytest.raises(ValueError, match="aware"):
        run([], start=START.replace(tzinfo=None))


@pytest.mark.parametrize(("threshold", "tick"), [(0, 60), (720, 0), (-1, 60)])
def test_refuses_a_threshold_or_tick_that_is_not_positive(threshold: int, tick: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        run([], threshold, tick)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "heading"),
        ("seconds,page,device\n", "heading"),
        ("seconds,device,page\n1,2\n", "line 2: expected 3 columns"),
        ("seconds,device,page\n1,2,3\n1,x,3\n", "line 3: invalid literal"),
    ],
)
def test_refuses_files_of_another_shape(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match=complaint):
        read_visits(path)


# Ids, payloads and totals.


def test_ids_are_stable() -> None:
    assert anonymous_id(1) == uuid5(NAMESPACE_URL, "device:1")
    assert property_object_id(1) == uuid5(NAMESPACE_URL, "page:1")


def test_times_are_written_in_utc_with_microseconds() -> None:
    assert format_time(START) == "2024-03-01T00:00:00.000000Z"
    moscow = datetime(2024, 3, 1, 2, 0, 0, 5, tzinfo=timezone(timedelta(hours=3)))
    assert format_time(moscow) == "2024-02-29T23:00:00.000005Z"
    with pytest.raises(ValueError, match="aware"):
        format_time(START.replace(tzinfo=None))


def test_seconds_are_rounded_down() -> None:
    assert whole_seconds(timedelta(seconds=1, microseconds=999_999)) == 1


def test_payloads_hold_every_field_that_can_be_predicted() -> None:
    (session,) = run([Visit(5, 7, 9), Visit(65, 7, 9), Visit(70, 7)])

    assert expected_session_ended_payload(session) == {
        "AnonymousId": str(uuid5(NAMESPACE_URL, "device:7")),
        "UserId": None,
        "CreatedAt": "2024-03-01T00:00:05.000000Z",
        "LastActivityAt": "2024-03-01T00:01:10.000000Z",
        "DurationSeconds": 65,
    }
    assert expected_view_ended_payload(session, session.views[0]) == {
        "PropertyObjectId": str(uuid5(NAMESPACE_URL, "page:9")),
        "AnonymousId": str(uuid5(NAMESPACE_URL, "device:7")),
        "UserId": None,
        "ViewSource": "Catalog",
        "ViewedAt": "2024-03-01T00:00:05.000000Z",
        "LastActivityAt": "2024-03-01T00:01:05.000000Z",
        "DurationSeconds": 60,
        "FilterSnapshot": None,
    }


def test_totals_count_rows_and_add_whole_seconds() -> None:
    rows = [Visit(0, 1, 5), Visit(10, 1, 5), Visit(20, 2, 5), Visit(23, 2, 5), Visit(40, 1, 6)]

    sessions = run(rows)

    assert session_totals(sessions) == Totals(2, 43)
    assert view_totals(sessions) == Totals(3, 13)
    assert view_totals_by_object(sessions) == {
        property_object_id(5): Totals(2, 13),
        property_object_id(6): Totals(1, 0),
    }
    assert last_viewed_by_object(sessions) == {
        property_object_id(5): START + timedelta(seconds=20),
        property_object_id(6): START + timedelta(seconds=40),
    }
