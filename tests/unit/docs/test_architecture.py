"""The documents against the tree: tests, files and modules that they name, and their links."""

import pkgutil
import re
from pathlib import Path

import pytest
from django.conf import settings

ROOT = Path(settings.BASE_DIR)
PAGE = (ROOT / "docs/architecture.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
FUNCTIONS = {
    name
    for path in TESTS
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMES = sorted(set(re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE))))
PATHS = [name for name in NAMES if re.fullmatch(r"[\w./*-]+(?:\.(?:py|md|yml|sh|html)|/)", name)]
MODULES = sorted(
    set(
        re.findall(
            r"\b(?:pinactivity|sessions|views|outbox|devstats)\.[a-z_.]+\b",
            "".join(FENCE.findall(PAGE)),
        )
    )
)
LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as they are rendered."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def links(document: Path) -> list[tuple[str, str]]:
    """Return the relative links of a document: (path, anchor), each "" if left out."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", document.read_text()))
    return [(path, anchor) for path, anchor in LINK.findall(text) if path or anchor]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if re.fullmatch(r"test_\w+(?:\.\.)?", name)]
)
def test_test_that_the_architecture_names_exists(name: str) -> None:
    """`test_x..` is the beginning of a name."""
    prefix = name.removesuffix("..")
    if prefix == name:
        assert name in FUNCTIONS
    else:
        assert any(function.startswith(prefix) for function in FUNCTIONS)


@pytest.mark.parametrize("path", PATHS)
def test_file_that_the_architecture_names_exists(path: str) -> None:
    """A path may begin anywhere in the tree: `events.py` is a file of each app."""
    tree = ("pinactivity", "sessions", "views", "outbox", "devstats", "tests", "deploy", "docs")
    if (ROOT / path).exists() or any(ROOT.glob(path)):
        return
    assert any(True for folder in tree for _ in (ROOT / folder).rglob(path.rstrip("/")))


@pytest.mark.parametrize("name", MODULES)
def test_module_of_the_drawing_exists(name: str) -> None:
    """The last part may be a function or a class of the module."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as exc:
        pytest.fail(f"{name}: {exc}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_resolve(document: Path) -> None:
    broken = []
    for path, anchor in links(document):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert broken == []
