"""The last day of the ActivityCloserJob as a chart (`run_chart.html`): panels of bars, a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pinactivity.core.bars import Bar, Table, make_table
from sessions.selectors import RunsOfStep

_LEFT, _TOP, _STEP_WIDTH = 8, 22, 5
_PANEL_HEIGHT, _PANEL_DISTANCE = 48, 80
_LABEL_EVERY = 24
"""Steps between two times at the bottom."""


@dataclass(frozen=True, slots=True)
class _Measure:
    title: str
    colour: str
    """Visible on black and on white alike: the admin is light or dark."""
    value: Callable[[RunsOfStep], int | None]


_MEASURES = (
    _Measure("Closed sessions", "#3b82c4", lambda step: step.closed_sessions),
    _Measure("Closed views", "#2f9e77", lambda step: step.closed_views),
    _Measure("Failures", "#d64545", lambda step: step.failures),
    _Measure("Active sessions", "#a06cd5", lambda step: step.active_sessions),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The bars of one measure, on a scale of its own."""

    title: str
    title_at: int
    most: str
    colour: str
    bars: Sequence[Bar]
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChart:
    """What `run_chart.html` draws; lengths in units of the SVG."""

    width: int
    height: int
    left: int
    summary: str
    gaps: str
    """The ground behind steps without a run, which is grey."""
    panels: Sequence[Panel]
    times: Sequence[tuple[int, str]]
    times_at: int
    table: Table


def chart_runs(history: Sequence[RunsOfStep]) -> RunChart | None:
    """Chart steps of equal length side by side; None without any run.

    The last step is under way, so its ground is never grey.
    """
    if not any(step.runs for step in history):
        return None
    bottom = _TOP + _PANEL_DISTANCE * (len(_MEASURES) - 1) + _PANEL_HEIGHT
    gaps = [index for index, step in enumerate(history[:-1]) if not step.runs]
    return RunChart(
        width=_STEP_WIDTH * len(history) + 2 * _LEFT,
        height=bottom + 22,
        left=_LEFT,
        summary=_summarise(history, len(gaps)),
        gaps="".join(
            f"M{_x(index)} {_TOP}h{_STEP_WIDTH}V{bottom}h-{_STEP_WIDTH}z" for index in gaps
        ),
        panels=[_chart_panel(measure, history, n) for n, measure in enumerate(_MEASURES)],
        times=[
            (_x(index), f"{step.begins_at:%H:%M}")
            for index, step in enumerate(history)
            if index % _LABEL_EVERY == 0
        ],
        times_at=bottom + 16,
        table=_tabulate(history),
    )


def _chart_panel(measure: _Measure, history: Sequence[RunsOfStep], number: int) -> Panel:
    values = [measure.value(step) or 0 for step in history]
    most = max(values)
    base = _TOP + _PANEL_DISTANCE * number + _PANEL_HEIGHT
    return Panel(
        title=measure.title,
        title_at=base - _PANEL_HEIGHT - 6,
        most=f"{most:,}",
        colour=measure.colour,
        bars=[
            Bar(
                left=_x(index),
                base=base,
                width=_STEP_WIDTH - 1,
                height=_PANEL_HEIGHT * value / most,
            )
            for index, value in enumerate(values)
            if value
        ],
        axis=f"M{_LEFT} {base}h{_STEP_WIDTH * len(history)}",
    )


def _x(index: int) -> int:
    return _LEFT + _STEP_WIDTH * index


def _summarise(history: Sequence[RunsOfStep], gaps: int) -> str:
    sessions, views, failures = (
        sum(measure.value(step) or 0 for step in history) for measure in _MEASURES[:3]
    )
    active = [step.active_sessions for step in history if step.active_sessions is not None]
    return (
        f"Closed: {sessions:,} sessions and {views:,} views. Failures: {failures:,}."
        f" Active sessions: {f'{max(active):,} at most' if active else 'not counted'}."
        f" Steps without a run, shown in grey: {gaps}."
    )


def _tabulate(history: Sequence[RunsOfStep]) -> Table:
    """Make rows of the steps that had a run, the newest first."""
    return make_table(
        ("From", "Runs", *(measure.title for measure in _MEASURES)),
        (
            (
                f"{step.begins_at:%Y-%m-%d %H:%M}",
                *(
                    f"{value:,}" if value is not None else ""
                    for value in (step.runs, *(measure.value(step) for measure in _MEASURES))
                ),
            )
            for step in reversed(history)
            if step.runs
        ),
    )
