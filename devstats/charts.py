"""What the page of dev-stats draws: SVG that is as wide as its place, with text beside it.

Text in an SVG would shrink with it on a phone. Colours are the style sheet's (page.css).
"""

from collections.abc import Mapping, Sequence
from datetime import date

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from devstats.selectors import ObjectSummary, SessionFigures
from pinactivity.admin.charts import outline_bar, tabulate, write_table
from pinactivity.core.times import say_duration

_HEIGHT = 100
_STEP, _GAP = 10, 2
_NO_SESSIONS = SessionFigures(0, None, None, None)
_KIND_NAMES = {"Guest": "Guests", "User": "Users"}

Days = Sequence[tuple[date, SessionFigures]]


def fill_days(days: Sequence[date], by_day: Days) -> Days:
    """Give each day its figures, and a day without a session figures of none."""
    known = dict(by_day)
    return [(day, known.get(day, _NO_SESSIONS)) for day in days]


def draw_sessions(days: Days) -> SafeString:
    """Draw how many sessions there were on each day."""
    counts = [figures.sessions for _, figures in days]
    most = max(counts)
    bars = [
        (_bar(place, count, most), f"{day}: {count:,} {_noun(count)}")
        for place, ((day, _), count) in enumerate(zip(days, counts, strict=True))
        if count
    ]
    return _figure(
        "sessions-by-day",
        "Sessions by day",
        f"{sum(counts):,} {_noun(sum(counts))} on {_count_days(days)}, {most:,} a day at most.",
        days,
        scale=f"up to {most:,} a day",
        shapes=_bars(bars),
        table=tabulate(
            ("Day", "Sessions"), ((day, f"{figures.sessions:,}") for day, figures in days)
        ),
    )


def draw_durations(days: Days) -> SafeString:
    """Draw the durations of each day's sessions: a bar to the median, a line at the average."""
    known = [
        (place, day, figures.median, figures.average)
        for place, (day, figures) in enumerate(days)
        if figures.median is not None and figures.average is not None
    ]
    most = max(max(median, average) for _, _, median, average in known)
    bars = [
        (
            _bar(place, median, most),
            f"{day}: median {say_duration(median)}, average {say_duration(average)}",
        )
        for place, day, median, average in known
    ]
    lines = "".join(
        f"M{_STEP * place + _GAP / 2:g} {_HEIGHT - _HEIGHT * average / (most or 1):.1f}"
        f"h{_STEP - _GAP}"
        for place, _, _, average in known
    )
    return _figure(
        "duration-by-day",
        "Duration of sessions by day",
        f"Median and average of each day, {say_duration(most)} at most.",
        days,
        scale=f"up to {say_duration(most)}",
        shapes=format_html('{}<path class="line" d="{}"/>', _bars(bars), lines),
        legend=(("bar", "Median"), ("line", "Average")),
        table=tabulate(
            ("Day", "Median", "Average"),
            (
                (day, tell_duration(figures.median), tell_duration(figures.average))
                for day, figures in days
            ),
        ),
    )


def draw_viewer_kinds(by_viewer_kind: Sequence[tuple[str, SessionFigures]]) -> SafeString:
    """Draw the sessions of guests against those of users, as the two parts of one bar."""
    kinds: Mapping[str, SessionFigures] = dict(by_viewer_kind)
    named = [(name, kinds.get(kind, _NO_SESSIONS)) for kind, name in _KIND_NAMES.items()]
    total = sum(figures.sessions for _, figures in named)
    guests = 100 * kinds.get("Guest", _NO_SESSIONS).sessions / total
    told = [
        f"{name}: {figures.sessions:,} {_noun(figures.sessions)} ({share(figures.sessions, total)})"
        for name, figures in named
    ]
    return _figure(
        "guests-and-users",
        "Guests and users",
        "; ".join(told),
        (),
        scale="",
        shapes=format_html(
            '<path class="bar" d="M0 0h{}v10H0z"><title>{}</title></path>'
            '<path class="other" d="M{} 0H100v10H{}z"><title>{}</title></path>',
            f"{guests:.2f}",
            told[0],
            *(f"{guests:.2f}", f"{guests:.2f}"),
            told[1],
        ),
        box="0 0 100 10",
        legend=(("bar", told[0]), ("other", told[1])),
        table=tabulate(
            ("Viewers", "Sessions", "Share", "Average", "Median", "P95"),
            (
                (
                    name,
                    f"{figures.sessions:,}",
                    share(figures.sessions, total),
                    tell_duration(figures.average),
                    tell_duration(figures.median),
                    tell_duration(figures.percentile_95),
                )
                for name, figures in named
            ),
        ),
    )


def list_objects(objects: Sequence[ObjectSummary]) -> SafeString:
    """Write the table of objects."""
    return write_table(
        ("Property object", "Views", "Viewers", "Time in all", "Time a view", "Guests' share"),
        (
            (
                item.property_object_id,
                f"{item.figures.views:,}",
                f"{item.figures.unique_viewers:,}",
                say_duration(item.figures.total),
                say_duration(item.figures.average),
                share(
                    sum(of.views for kind, of in item.by_viewer_kind if kind == "Guest"),
                    item.figures.views,
                ),
            )
            for item in objects
        ),
    )


def tell_duration(seconds: float | None) -> str:
    """Say a duration that there is only if there was a session."""
    return "none" if seconds is None else say_duration(seconds)


def share(part: int, whole: int) -> str:
    """Say a share in whole percents."""
    return f"{100 * part / whole:.0f} %"


def _figure(  # its parts, in their order
    name: str,
    title: str,
    description: str,
    days: Days,
    *,
    scale: str,
    shapes: SafeString,
    table: SafeString,
    box: str = "",
    legend: Sequence[tuple[str, str]] = (),
) -> SafeString:
    return format_html(
        '<figure id="{name}"><figcaption>{title} <small>{scale}</small></figcaption>{legend}'
        '<svg role="img" aria-labelledby="{name}-title {name}-description" viewBox="{box}"'
        ' preserveAspectRatio="none"><title id="{name}-title">{title}</title>'
        '<desc id="{name}-description">{description}</desc>{shapes}</svg>{ends}{table}</figure>',
        name=name,
        title=title,
        description=description,
        scale=scale,
        box=box or f"0 0 {_STEP * len(days)} {_HEIGHT}",
        shapes=shapes,
        table=table,
        ends=format_html('<p class="ends"><span>{}</span><span>{}</span></p>', *_ends(days))
        if len(days) > 1
        else "",
        legend=format_html(
            '<ul class="legend">{}</ul>',
            format_html_join("", '<li class="{}">{}</li>', legend),
        )
        if legend
        else "",
    )


def _ends(days: Days) -> tuple[date, date]:
    return days[0][0], days[-1][0]


def _bars(bars: Sequence[tuple[str, str]]) -> SafeString:
    return format_html_join("", '<path class="bar" d="{}"><title>{}</title></path>', bars)


def _bar(place: int, value: float, most: float) -> str:
    return outline_bar(
        left=_STEP * place + _GAP / 2,
        base=_HEIGHT,
        width=_STEP - _GAP,
        height=_HEIGHT * value / (most or 1),
    )


def _count_days(days: Days) -> str:
    return f"{len(days)} day{'s' if len(days) > 1 else ''}"


def _noun(count: int) -> str:
    return "session" if count == 1 else "sessions"
