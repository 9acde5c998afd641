"""Deletes the views of sessions that retention deletes; the statistics keep their totals."""

from views.stats_models import fetch


def delete_views(*, session_ids: str) -> int:
    """Delete the closed views of some sessions, and add their totals to `purged_*`.

    Args:
        session_ids: Locked by this transaction; a PostgreSQL array as text.

    Returns:
        How many views were deleted.
    """
    ((views,),) = fetch(_DELETE, session_ids=session_ids)
    return int(views)


# The statistics keep their totals: `purged_*` is the part of them whose views are deleted. A view
# that the consumer has not counted yet is missing in the totals until rebuild_view_stats adds it.
_DELETE = """
    WITH deleted AS (
        DELETE FROM property_object_views
        WHERE session_id = ANY(%(session_ids)s::uuid[]) AND status = 'Inactive'
        RETURNING property_object_id, created_at, floor(extract(epoch FROM duration)) AS seconds
    ), totals AS (
        INSERT INTO property_object_view_stats AS stats (
            property_object_id, last_viewed_at, purged_views_count, purged_duration_seconds
        )
        SELECT property_object_id, max(created_at), count(*), sum(seconds)
        FROM deleted
        GROUP BY property_object_id
        ORDER BY property_object_id
        ON CONFLICT (property_object_id) DO UPDATE SET
            last_viewed_at = greatest(stats.last_viewed_at, excluded.last_viewed_at),
            purged_views_count = stats.purged_views_count + excluded.purged_views_count,
            purged_duration_seconds
                = stats.purged_duration_seconds + excluded.purged_duration_seconds
    )
    SELECT count(*) FROM deleted
"""
