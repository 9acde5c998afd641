"""The watermark of a shard: the relay has seen every message up to this id (docs/adr/0009)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from django.db import connection

_FULL_SCAN_SECONDS = 10.0
"""A full scan starts at the earliest so long after the last one."""
_FULL_SCAN_SHARE = 20
"""Full scans take at most one part in 20 of the time: a held snapshot makes them slow."""


class _Candidate(NamedTuple):
    """An id that the watermark may move to."""

    id: int
    writers: frozenset[str]
    """The transactions that may still commit a lower id."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to which id every message is committed, and was sent or parked.

    A scan starts behind the watermark. While a transaction elsewhere holds a snapshot, the
    index keeps an entry of every message sent since, and a scan from the first would read
    them all.

    PostgreSQL gives an id before it commits the row, so a lower id can appear later. But a
    writer locks the table before it gets an id, and until it commits. The watermark moves in
    three scans:

    1. The first scan reads up to an id, which becomes the candidate.
    2. The second scan starts. The transactions that have the table locked now are the only
       ones that may still commit a lower id.
    3. A later scan starts when all of these have ended, so it reads whatever they committed.
       When that scan ends, the watermark moves to the candidate.
    """

    position: int = 0
    """Id."""
    _scanned_to: int = 0
    _candidate: _Candidate | None = None
    _proven: int | None = None
    """Where the watermark moves when the scan under way ends."""
    _full_scan_at: float = 0.0

    def begin_scan(self, writers: frozenset[str]) -> "Watermark":
        """Return the watermark for a scan.

        Args:
            writers: The other transactions that have the table locked, as of before the scan.
        """
        candidate, proven = self._candidate, None
        if candidate and not candidate.writers & writers:
            proven, candidate = candidate.id, None
        if candidate is None and self._scanned_to > (proven or self.position):
            candidate = _Candidate(self._scanned_to, writers)
        return replace(self, _candidate=candidate, _proven=proven)

    def scan_start(self, now: float) -> int:
        """Return the id behind which the scan starts; 0 makes it a full scan.

        A full scan finds what no rule allows behind the watermark: a failover may set ids
        back, and a person may write SQL.

        Args:
            now: Seconds by the monotonic clock.
        """
        return self.position if now < self._full_scan_at else 0

    def end_scan(
        self, last_new_id: int | None, *, seconds: float, was_full: bool, now: float
    ) -> "Watermark":
        """Return the watermark after a scan of which every message was sent or parked.

        Args:
            last_new_id: The highest id of a new message; None if there was none.
            seconds: How long the scan took.
            was_full: It started at the first message.
            now: Seconds by the monotonic clock.
        """
        position, candidate = self.position, self._candidate
        if self._proven is not None:
            position = self._proven
        if last_new_id is not None and last_new_id <= position:
            # A full scan found messages behind the watermark, and there may be more.
            position, candidate = 0, None
        full_scan_at = self._full_scan_at
        if was_full:
            full_scan_at = now + max(_FULL_SCAN_SECONDS, _FULL_SCAN_SHARE * seconds)
        return replace(
            self,
            position=position,
            _scanned_to=self._scanned_to if last_new_id is None else last_new_id,
            _candidate=candidate,
            _full_scan_at=full_scan_at,
        )


def find_writers() -> frozenset[str]:
    """Return the other transactions that have written into the outbox, or are about to.

    Raw SQL: Django knows no model of `pg_locks`.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT virtualtransaction FROM pg_locks
            WHERE locktype = 'relation' AND relation = 'outbox_messages'::regclass
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND mode = 'RowExclusiveLock' AND pid <> pg_backend_pid()
            """
        )
        return frozenset(name for (name,) in cursor.fetchall())
