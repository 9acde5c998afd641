"""What charts share: SVG without scripts or styles of its own, and the same as a table."""

from collections.abc import Iterable, Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

LEAST_HEIGHT = 2.0
"""Of a bar: one must be seen beside a hundred."""


def outline_bar(*, left: float, base: float, width: float, height: float) -> str:
    """Outline a bar as a path's data; it stands on `base`, and has a height that can be seen."""
    return f"M{left:g} {base:g}v-{max(height, LEAST_HEIGHT):.1f}h{width:g}V{base:g}z"


def tabulate(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> SafeString:
    """Write a table, folded, for whom the picture says nothing; a row begins with its name."""
    return format_html(
        "<details><summary>The same as a table</summary>{}</details>", write_table(headings, rows)
    )


def write_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> SafeString:
    """Write a table whose rows begin with their names."""
    return format_html(
        "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>",
        format_html_join("", '<th scope="col">{}</th>', ((heading,) for heading in headings)),
        format_html_join(
            "",
            '<tr><th scope="row">{}</th>{}</tr>',
            (
                (name, format_html_join("", "<td>{}</td>", ((cell,) for cell in cells)))
                for name, *cells in rows
            ),
        ),
    )
