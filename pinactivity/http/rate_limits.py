"""Rate limits that hold across web processes, without Redis (design, section 13).

PostgreSQL counts in fixed windows of a minute; one upsert counts a request against all its limits.
Each web process counts heartbeats itself, because a heartbeat takes only one statement.
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
    """Count a start.

    Raises:
        RateLimited: the address is past its limit.
    """
    _count({_of_address("start", address): settings.RATE_LIMITS.start_per_address})


def limit_call(call: str, *, anonymous_id: object, address: str | None) -> None:
    """Count a link or an opening.

    Args:
        call: `link` or `open`, counted apart.
        anonymous_id: Of the device.
        address: Of the client, or None if it could not be read.

    Raises:
        RateLimited: the device or the address is past its limit.
    """
    _count(
        {
            f"{call}:device:{anonymous_id}": settings.RATE_LIMITS.per_anonymous_id,
            _of_address(call, address): settings.RATE_LIMITS.per_address,
        }
    )


def _of_address(call: str, address: str | None) -> str | None:
    """Name the limit of an address.

    An IPv6 address counts as its /64 network, because a household has 2^64 addresses. An address
    that could not be read has no limit, because unrelated devices would share it.
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


class HeartbeatLimit:
    """Counts heartbeats of this process; every minute begins empty, so the counts stay few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window = 0
        self._counts: defaultdict[object, int] = defaultdict(int)

    def count(self, key: object) -> None:
        """Count a heartbeat.

        Args:
            key: What the limit is of: the device of a session, or a view.

        Raises:
            RateLimited: the key is past its limit.
        """
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


heartbeats = HeartbeatLimit()


def _refuse(limit: str, retry_after: int) -> None:
    REQUESTS_LIMITED.labels(limit).inc()
    raise RateLimited(max(retry_after, 1))
