"""Celery's entry to the housekeeping of the view statistics."""

from celery import shared_task
from django.conf import settings

from views.stats import purge_seen


@shared_task(ignore_result=True)
def purge_seen_views() -> None:
    """Delete old rows of the seen table; idempotent, also late or beside another run."""
    purge_seen(settings.VIEW_STATS)
