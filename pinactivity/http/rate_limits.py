"""Rate limits that hold across web processes without Redis (design, section 13).

Fixed windows of a minute in PostgreSQL: one upsert a request, of all the limits that it counts
against. Beats are counted in process, since a beat is one statement in all.
"""

import ipaddress
import threading
import time
from collections import defaultdict

from django.conf import settings

from pinactivity.core.errors import RateLimited
from pinactivity.models import WINDOW, RateLimitWindow
from pinactivity.telemetry.metrics import REQUESTS_LIMITED


def limit_start(*, address: str | None) -> None:
    """Count a start; raises RateLimited past the limit of its address."""
    _count({_of_address("start", address): settings.RATE_LIMITS.start_per_address})


def limit_call(call: str, *, anonymous_id: object, address: str | None) -> None:
    """Count a link or an opening; raises RateLimited past the limit of device or address."""
    _count(
        {
            f"{call}:device:{anonymous_id}": settings.RATE_LIMITS.per_anonymous_id,
            _of_address(call, address): settings.RATE_LIMITS.per_address,
        }
    )


def _of_address(call: str, address: str | None) -> str | None:
    """Name the limit of an address: IPv6 by /64, since a household has 2^64 of them.

    None for an address that could not be read: many devices would share it.
    """
    if address is None:
        return None
    parsed = ipaddress.ip_address(address)
    if parsed.version == 6:
        return f"{call}:address:{ipaddress.ip_network((parsed, 64), strict=False)}"
    return f"{call}:address:{parsed}"


def _count(limits: dict[str | None, int]) -> None:
    in_force = {key: limit for key, limit in limits.items() if key is not None and limit}
    if not in_force:
        return
    counts, retry_after = RateLimitWindow.objects.count_request(in_force)
    for key, limit in in_force.items():
        if counts[key] > limit:
            call, kind, _ = key.split(":", 2)
            _refuse(f"{call}-{kind}", retry_after)


class BeatLimit:
    """Counts beats within this process; every minute begins empty, so it stays small."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window = 0
        self._counts: defaultdict[object, int] = defaultdict(int)

    def count(self, key: object) -> None:
        """Count a beat of a device's session, or of its view; raises RateLimited past the limit."""
        limit = settings.RATE_LIMITS.heartbeats
        if not limit:
            return
        now = time.monotonic()
        window = int(now // WINDOW.total_seconds())
        with self._lock:
            if window != self._window:
                self._window = window
                self._counts.clear()
            self._counts[key] += 1
            count = self._counts[key]
        if count > limit:
            _refuse("heartbeat", int((window + 1) * WINDOW.total_seconds() - now) + 1)


beats = BeatLimit()


def _refuse(limit: str, retry_after: int) -> None:
    REQUESTS_LIMITED.labels(limit).inc()
    raise RateLimited(max(retry_after, 1))
