"""The table of the rate limits (design, section 13)."""

from collections.abc import Iterable
from datetime import timedelta

from django.db import connection, models

from pinactivity.postgres.clock import time_expression

WINDOW = timedelta(minutes=1)


class RateLimitWindowQuerySet(models.QuerySet["RateLimitWindow"]):
    def count_request(self, keys: Iterable[str]) -> tuple[dict[str, int], int]:
        """Count one request against some limits, in one statement.

        Returns:
            The requests of this minute by key, this one included, and the whole seconds until
            the minute ends.
        """
        # Sorted, so that two requests with the same two keys do not deadlock.
        with connection.cursor() as cursor:
            cursor.execute(_COUNT, [sorted(keys)])
            rows = cursor.fetchall()
        return {key: count for key, count, _ in rows}, max((rest for *_, rest in rows), default=0)

    def forget_ended(self) -> int:
        """Delete the windows that have ended, and return their number."""
        return self.filter(window_start__lt=time_expression() - 2 * WINDOW).delete()[0]


class RateLimitWindow(models.Model):
    """Requests of one minute against one limit. The table is UNLOGGED: a crash empties it."""

    pk = models.CompositePrimaryKey("key", "window_start")
    key = models.TextField()
    window_start = models.DateTimeField()
    count = models.IntegerField()

    objects = RateLimitWindowQuerySet.as_manager()

    class Meta:
        db_table = "rate_limit_windows"
        indexes = (
            models.Index(fields=["window_start"], name="ix_rate_limit_windows_window_start"),
        )

    def __str__(self) -> str:
        return self.key


# Raw SQL: one atomic statement counts against all limits, in one round trip.
_COUNT = """
    INSERT INTO rate_limit_windows AS seen (key, window_start, count)
    SELECT key, date_trunc('minute', statement_timestamp()), 1
    FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (key, place)
    ORDER BY place
    ON CONFLICT (key, window_start) DO UPDATE SET count = seen.count + 1
    RETURNING key, count,
        60 - floor(extract(epoch FROM statement_timestamp() - window_start))::integer
"""
