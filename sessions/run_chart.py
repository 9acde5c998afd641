"""The last day of the ActivityCloserJob as a picture: an SVG without scripts, and its table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from pinactivity.admin.charts import outline_bar, tabulate
from sessions.selectors import RunsOfStep

_LEFT, _TOP, _STEP_WIDTH = 8, 22, 5
_PANEL_HEIGHT, _PANEL_DISTANCE = 48, 80
_LABEL_EVERY = 24
"""Steps between two times at the bottom."""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    colour: str
    """Told apart from black and from white alike: the admin is light or dark."""
    value: Callable[[RunsOfStep], int | None]


_PANELS = (
    _Panel("Closed sessions", "#3b82c4", lambda step: step.closed_sessions),
    _Panel("Closed views", "#2f9e77", lambda step: step.closed_views),
    _Panel("Failures", "#d64545", lambda step: step.failures),
    _Panel("Active sessions", "#a06cd5", lambda step: step.active_sessions),
)


def draw_history(history: Sequence[RunsOfStep]) -> SafeString:
    """Draw steps of equal length side by side, one panel a figure, each on a scale of its own.

    Where no run began the ground is grey; the last step is under way and is never grey.
    """
    if not any(step.runs for step in history):
        return format_html("<p>{}</p>", "No run in the last 24 hours.")
    return format_html(
        "<figure><figcaption>The last 24 hours by 10 minutes, UTC</figcaption>{}{}</figure>",
        _draw(history),
        _tabulate(history),
    )


def _draw(history: Sequence[RunsOfStep]) -> SafeString:
    width = _STEP_WIDTH * len(history)
    bottom = _TOP + _PANEL_DISTANCE * (len(_PANELS) - 1) + _PANEL_HEIGHT
    gaps = [index for index, step in enumerate(history[:-1]) if not step.runs]
    grey = "".join(f"M{_x(index)} {_TOP}h{_STEP_WIDTH}V{bottom}h-{_STEP_WIDTH}z" for index in gaps)
    times = [
        (_x(index), bottom + 16, f"{step.begins_at:%H:%M}")
        for index, step in enumerate(history)
        if index % _LABEL_EVERY == 0
    ]
    return format_html(
        '<svg role="img" aria-labelledby="closer-history-title closer-history-summary"'
        ' viewBox="0 0 {} {}" width="100%" style="max-width: 60rem" font-size="12"'
        ' fill="currentColor">'
        '<title id="closer-history-title">Runs of the ActivityCloserJob, the last 24 hours</title>'
        '<desc id="closer-history-summary">{}</desc>'
        '<path d="{}" fill-opacity="0.12"/>{}{}</svg>',
        width + 2 * _LEFT,
        bottom + 22,
        _summarise(history, len(gaps)),
        grey,
        format_html_join(
            "",
            "{}",
            ((_draw_panel(panel, history, n),) for n, panel in enumerate(_PANELS)),
        ),
        format_html_join("", '<text x="{}" y="{}">{}</text>', times),
    )


def _draw_panel(panel: _Panel, history: Sequence[RunsOfStep], number: int) -> SafeString:
    values = [panel.value(step) or 0 for step in history]
    most = max(values)
    base = _TOP + _PANEL_DISTANCE * number + _PANEL_HEIGHT
    bars = []
    for index, value in enumerate(values):
        if value:
            bars.append(
                outline_bar(
                    left=_x(index),
                    base=base,
                    width=_STEP_WIDTH - 1,
                    height=_PANEL_HEIGHT * value / most,
                )
            )
    return format_html(
        '<text x="{}" y="{}">{}, up to {}</text><path d="{}" fill="{}"/>'
        '<path d="M{} {}h{}" stroke="currentColor" stroke-opacity="0.4"/>',
        _LEFT,
        base - _PANEL_HEIGHT - 6,
        panel.title,
        f"{most:,}",
        "".join(bars),
        panel.colour,
        _LEFT,
        base,
        _STEP_WIDTH * len(history),
    )


def _x(index: int) -> int:
    return _LEFT + _STEP_WIDTH * index


def _summarise(history: Sequence[RunsOfStep], gaps: int) -> str:
    sessions, views, failures = (
        sum(panel.value(step) or 0 for step in history) for panel in _PANELS[:3]
    )
    active = [step.active_sessions for step in history if step.active_sessions is not None]
    return (
        f"Closed: {sessions:,} sessions and {views:,} views. Failures: {failures:,}."
        f" Active sessions: {f'{max(active):,} at most' if active else 'not counted'}."
        f" Steps without a run, shown in grey: {gaps}."
    )


def _tabulate(history: Sequence[RunsOfStep]) -> SafeString:
    """Write the steps that had a run as rows, the newest first."""
    return tabulate(
        ("From", "Runs", *(panel.title for panel in _PANELS)),
        (
            (
                f"{step.begins_at:%Y-%m-%d %H:%M}",
                *(
                    f"{value:,}" if value is not None else ""
                    for value in (step.runs, *(panel.value(step) for panel in _PANELS))
                ),
            )
            for step in reversed(history)
            if step.runs
        ),
    )
