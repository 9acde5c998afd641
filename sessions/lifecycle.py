"""The lifecycle of sessions and views: plain decisions, `now` is an argument."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID


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


class LinkOutcome(StrEnum):
    """What a sign-in does to the device's Active session (INV-SES-002)."""

    LINKED = "Linked"
    """It had no user."""
    ALREADY_LINKED = "AlreadyLinked"
    """It is this user's: nothing happens, and there is no event."""
    SWITCHED = "Switched"
    """It is another user's: it closes, and a new one is born linked."""
    STALE = "Stale"
    """A late sign-in event, older than what the session rests on: skipped."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """What of an Active session decides over a sign-in."""

    user_id: UUID | None
    created_at: datetime
    signed_in_at: datetime | None


CLOCK_TOLERANCE = timedelta(minutes=1)
"""How far before a session's start a sign-in may lie and still be about it (identity's clock)."""


def decide_link(
    state: LinkState, *, user_id: UUID, signed_in_at: datetime, may_be_late: bool
) -> LinkOutcome:
    """Decide what a sign-in of `user_id` at `signed_in_at` does (design, section 5).

    A late event must not undo a newer truth: in any order and with any duplication, sign-in
    events end in the state of the newest.

    Args:
        state: Of the device's Active session, read under its lock.
        user_id: Who signed in.
        signed_in_at: When, by identity for an event, by the database's clock for the API.
        may_be_late: True for events; a call of the API is about now.
    """
    if state.user_id == user_id:
        return LinkOutcome.ALREADY_LINKED
    newest = state.signed_in_at or state.created_at - CLOCK_TOLERANCE
    if may_be_late and signed_in_at <= newest:
        return LinkOutcome.STALE
    return LinkOutcome.LINKED if state.user_id is None else LinkOutcome.SWITCHED
