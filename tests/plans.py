"""PostgreSQL's plans, as EXPLAIN returns them in JSON."""

from typing import Any


def index_scans(node: dict[str, Any]) -> list[str]:
    """Return what a plan reads tables by: indexes, or a word for what is none."""
    found = [node["Index Name"]] if "Index Name" in node else []
    if node["Node Type"] == "Seq Scan":
        found.append("the whole table")
    return found + [name for part in node.get("Plans", []) for name in index_scans(part)]
