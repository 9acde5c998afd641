"""The health of consumers: whether they make progress."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

STUCK_AFTER = timedelta(minutes=2)
"""Longer than the timeout of any handler's call: one that takes longer will not return."""


class Progress(Protocol):
    """What a consumer reports of itself."""

    @property
    def silent_seconds(self) -> float: ...
    @property
    def waits_for(self) -> str | None: ...


def report(consumers: Mapping[str, Progress]) -> tuple[bool, dict[str, Any]]:
    """Report the progress of consumers.

    Returns:
        Whether all are alive, and the report. A consumer that waits for its storage to come
        back is alive, since a restart would not help it.
    """
    bound = STUCK_AFTER.total_seconds()
    parts = {
        name: {
            "Status": _status(consumer, bound),
            "WaitsFor": consumer.waits_for,
            "SilentSeconds": round(consumer.silent_seconds, 1),
        }
        for name, consumer in consumers.items()
    }
    alive = all(part["Status"] != "stuck" for part in parts.values())
    return alive, {"Status": "live" if alive else "stuck", "Consumers": parts}


def _status(consumer: Progress, bound: float) -> str:
    if consumer.silent_seconds > bound:
        return "stuck"
    return "waiting" if consumer.waits_for else "working"
