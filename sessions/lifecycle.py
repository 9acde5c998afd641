"""The lifecycle of sessions and views: plain decisions, `now` is an argument."""

from datetime import datetime, timedelta
from enum import StrEnum


class Status(StrEnum):
    ACTIVE = "Active"
    INACTIVE = "Inactive"


class CloseReason(StrEnum):
    INACTIVITY = "Inactivity"
    """The closer found it silent for longer than the threshold."""
    SWITCHED = "Switched"
    """Another user signed in on the device (INV-SES-002)."""
    ABANDONED = "Abandoned"
    """Silent for more than twice the threshold, and touched before the closer came."""
    MANUAL = "Manual"
    """Support staff closed it."""


def duration_seconds(created_at: datetime, last_activity_at: datetime) -> int:
    """Return the whole seconds of a Duration (INV-SES-005), rounded down."""
    return (last_activity_at - created_at) // timedelta(seconds=1)


class RunOutcome(StrEnum):
    """How a run of the ActivityCloserJob ended."""

    RUNNING = "Running"
    """Not ended yet, or its process died."""
    SUCCEEDED = "Succeeded"
    CANCELLED = "Cancelled"
    """The worker is shutting down; the next tick takes the rest."""
    OUT_OF_TIME = "OutOfTime"
    """MaxRunDuration is over; the next tick takes the rest."""
    FAILED = "Failed"
    """The database was lost, or nothing could be claimed."""
    SKIPPED = "Skipped"
    """Another run holds SINGLE_INSTANCE, or a replay is under way."""
