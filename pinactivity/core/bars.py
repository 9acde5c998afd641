"""Bars and tables, as the templates in `pinactivity/templates/pinactivity` write them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEAST_HEIGHT = 2.0
"""A bar of one must be visible beside one of a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar that stands on `base`; lengths in units of the chart (`bars.html`).

    Args:
        label: What pointing at the bar shows; empty for nothing.
        kind: The class of its style.
    """

    left: float
    base: float
    width: float
    height: float
    label: str = ""
    kind: str = "bar"

    @property
    def outline(self) -> str:
        """Return the data of its SVG path; however small its value, it can be seen."""
        height = max(self.height, _LEAST_HEIGHT)
        return f"M{self.left:g} {self.base:g}v-{height:.1f}h{self.width:g}V{self.base:g}z"


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose rows begin with their names (`table.html`, `folded_table.html`)."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Make a table; its cells are written as `str` has them, whatever the locale."""
    return Table(headings, [[str(cell) for cell in row] for row in rows])
