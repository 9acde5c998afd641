"""Deletes published messages once support staff no longer need them (design, section 9)."""

import time

import structlog
from django.db import connection, transaction

from outbox.models import scan_indexes_only
from outbox.options import OutboxOptions
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry.metrics import OUTBOX_PURGED

log = structlog.get_logger(__name__)

_BATCH = 5000
_MAX_SECONDS = 10.0
"""Of one run. Shorter than a worker's grace period, so the run needs no signal to stop."""


def purge_published(options: OutboxOptions) -> int:
    """Delete messages that were published longer ago than `published_kept`, in batches.

    Reads from the lowest id upwards, and ends at the first batch with a message that was
    created within `published_kept`: a message is not published before it is created. So this
    needs no index on `published_at`. Pending and parked messages stay, however old.

    Ends after 10 s at the latest; the next run goes on. Idempotent, also beside another run.

    Returns:
        How many were deleted.
    """
    deadline = time.monotonic() + _MAX_SECONDS
    cutoff = statement_time() - options.published_kept
    purged, after, is_done = 0, 0, False
    while not is_done and time.monotonic() < deadline:
        with transaction.atomic(), connection.cursor() as cursor:
            scan_indexes_only()
            cursor.execute(_PURGE, {"after": after, "limit": _BATCH, "cutoff": cutoff})
            count, last_id, is_done = cursor.fetchone()
        purged += count
        after = last_id or after
        OUTBOX_PURGED.inc(count)
    log.info("published messages purged", rows=purged)
    return purged


# Raw SQL: one statement, so that what it reads and what it deletes are from one snapshot.
_PURGE = """
    WITH batch AS MATERIALIZED (
        SELECT id, created_at, published_at FROM outbox_messages
        WHERE id > %(after)s ORDER BY id LIMIT %(limit)s
    ), purged AS (
        DELETE FROM outbox_messages AS message USING batch
        WHERE message.id = batch.id AND batch.published_at < %(cutoff)s
        RETURNING message.id
    )
    SELECT
        (SELECT count(*) FROM purged),
        max(id),
        count(*) < %(limit)s OR bool_or(created_at >= %(cutoff)s)
    FROM batch
"""
