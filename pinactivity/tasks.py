"""Celery's entry to the housekeeping of the edge."""

from celery import shared_task

from pinactivity.models import RateLimitWindow


@shared_task(ignore_result=True)
def forget_rate_limits() -> None:
    """Delete the windows of rate limits that have ended; harmless twice."""
    RateLimitWindow.objects.forget_ended()
