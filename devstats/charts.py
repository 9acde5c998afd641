"""What the page of dev-stats charts (`figure.html`): SVG as wide as its column, text beside it.

Text in an SVG would shrink with it on a phone. Colours are the style sheet's (page.css).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from devstats.selectors import ObjectSummary, SessionStatistics
from pinactivity.core.bars import Bar, Table, make_table
from pinactivity.core.times import say_duration

_HEIGHT = 100
_STEP, _GAP = 10, 2
_NO_SESSIONS = SessionStatistics(0, None, None, None)
_KIND_NAMES = {"Guest": "Guests", "User": "Users"}

Days = Sequence[tuple[date, SessionStatistics]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with its texts, and the same as a table.

    Args:
        name: Its element's id.
        line: The data of an SVG path over the bars; empty for none.
        legend: Kinds of bars or lines, and what they are.
        ends: The first and the last day; empty where there is no axis of days.
    """

    name: str
    title: str
    description: str
    scale: str = ""
    view_box: str
    bars: Sequence[Bar]
    line: str = ""
    legend: Sequence[tuple[str, str]] = ()
    ends: Sequence[str] = ()
    table: Table


def fill_days(days: Sequence[date], by_day: Days) -> Days:
    """Return the statistics of each day, also of those without a session."""
    known = dict(by_day)
    return [(day, known.get(day, _NO_SESSIONS)) for day in days]


def chart_sessions(days: Days) -> Figure:
    """Chart how many sessions there were on each day."""
    counts = [statistics.sessions for _, statistics in days]
    most = max(counts)
    return Figure(
        name="sessions-by-day",
        title="Sessions by day",
        description=f"{sum(counts):,} {_noun(sum(counts))} on {_count_days(days)},"
        f" {most:,} a day at most.",
        scale=f"up to {most:,} a day",
        view_box=_view_box(days),
        bars=[
            _bar(index, count, most, f"{day}: {count:,} {_noun(count)}")
            for index, ((day, _), count) in enumerate(zip(days, counts, strict=True))
            if count
        ],
        ends=_ends(days),
        table=make_table(
            ("Day", "Sessions"), ((day, f"{statistics.sessions:,}") for day, statistics in days)
        ),
    )


def chart_durations(days: Days) -> Figure:
    """Chart the durations of each day's sessions: a bar to the median, a line at the average."""
    known = [
        (index, day, statistics.median, statistics.average)
        for index, (day, statistics) in enumerate(days)
        if statistics.median is not None and statistics.average is not None
    ]
    most = max(max(median, average) for _, _, median, average in known)
    return Figure(
        name="duration-by-day",
        title="Duration of sessions by day",
        description=f"Median and average of each day, {say_duration(most)} at most.",
        scale=f"up to {say_duration(most)}",
        view_box=_view_box(days),
        bars=[
            _bar(
                index,
                median,
                most,
                f"{day}: median {say_duration(median)}, average {say_duration(average)}",
            )
            for index, day, median, average in known
        ],
        line="".join(
            f"M{_STEP * index + _GAP / 2:g} {_HEIGHT - _HEIGHT * average / (most or 1):.1f}"
            f"h{_STEP - _GAP}"
            for index, _, _, average in known
        ),
        legend=(("bar", "Median"), ("line", "Average")),
        ends=_ends(days),
        table=make_table(
            ("Day", "Median", "Average"),
            (
                (day, write_duration(statistics.median), write_duration(statistics.average))
                for day, statistics in days
            ),
        ),
    )


def chart_viewer_kinds(by_viewer_kind: Sequence[tuple[str, SessionStatistics]]) -> Figure:
    """Chart the sessions of guests and those of users, as the two parts of one bar."""
    kinds: Mapping[str, SessionStatistics] = dict(by_viewer_kind)
    named = [(name, kinds.get(kind, _NO_SESSIONS)) for kind, name in _KIND_NAMES.items()]
    total = sum(statistics.sessions for _, statistics in named)
    guests = 100 * kinds.get("Guest", _NO_SESSIONS).sessions / total
    labels = [
        f"{name}: {each.sessions:,} {_noun(each.sessions)} ({share(each.sessions, total)})"
        for name, each in named
    ]
    return Figure(
        name="guests-and-users",
        title="Guests and users",
        description="; ".join(labels),
        view_box="0 0 100 10",
        bars=[
            Bar(left=0, base=10, width=guests, height=10, label=labels[0]),
            Bar(left=guests, base=10, width=100 - guests, height=10, label=labels[1], kind="other"),
        ],
        legend=(("bar", labels[0]), ("other", labels[1])),
        table=make_table(
            ("Viewers", "Sessions", "Share", "Average", "Median", "P95"),
            (
                (
                    name,
                    f"{each.sessions:,}",
                    share(each.sessions, total),
                    write_duration(each.average),
                    write_duration(each.median),
                    write_duration(each.percentile_95),
                )
                for name, each in named
            ),
        ),
    )


def tabulate_objects(objects: Sequence[ObjectSummary]) -> Table:
    """Make the table of objects."""
    return make_table(
        ("Property object", "Views", "Viewers", "Time in all", "Time a view", "Guests' share"),
        (
            (
                item.property_object_id,
                f"{item.statistics.views:,}",
                f"{item.statistics.unique_viewers:,}",
                say_duration(item.statistics.total),
                say_duration(item.statistics.average),
                share(
                    sum(each.views for kind, each in item.by_viewer_kind if kind == "Guest"),
                    item.statistics.views,
                ),
            )
            for item in objects
        ),
    )


def write_duration(seconds: float | None) -> str:
    """Write a duration that exists only if there was a session."""
    return "none" if seconds is None else say_duration(seconds)


def share(part: int, whole: int) -> str:
    """Write a share in whole percents."""
    return f"{100 * part / whole:.0f} %"


def _view_box(days: Days) -> str:
    return f"0 0 {_STEP * len(days)} {_HEIGHT}"


def _ends(days: Days) -> Sequence[str]:
    return [str(days[0][0]), str(days[-1][0])] if len(days) > 1 else []


def _bar(index: int, value: float, most: float, label: str) -> Bar:
    return Bar(
        left=_STEP * index + _GAP / 2,
        base=_HEIGHT,
        width=_STEP - _GAP,
        height=_HEIGHT * value / (most or 1),
        label=label,
    )


def _count_days(days: Days) -> str:
    return f"{len(days)} day{'s' if len(days) > 1 else ''}"


def _noun(count: int) -> str:
    return "session" if count == 1 else "sessions"
