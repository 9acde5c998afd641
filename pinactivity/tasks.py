"""Celery tasks of the HTTP edge."""

from celery import shared_task

from pinactivity.models import RateLimitWindow


@shared_task(ignore_result=True)
def forget_rate_limits() -> None:
    """Delete the windows of rate limits that have ended; idempotent."""
    RateLimitWindow.objects.forget_ended()
