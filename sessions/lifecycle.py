"""The lifecycle of sessions and views: pure decisions, with `now` as an argument."""

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
    """Silent for more than twice the threshold, and touched before the closer closed it."""
    MANUAL = "Manual"
    """Support staff closed it."""


def duration_seconds(created_at: datetime, last_activity_at: datetime) -> int:
    """Return the whole seconds of a Duration (INV-SES-005), rounded down."""
    return (last_activity_at - created_at) // timedelta(seconds=1)


class RunOutcome(StrEnum):
    """How a run of the closer or of retention ended."""

    RUNNING = "Running"
    """Not ended yet, or its process died."""
    SUCCEEDED = "Succeeded"
    CANCELLED = "Cancelled"
    """The worker shut down; the next tick does the rest."""
    OUT_OF_TIME = "OutOfTime"
    """The run reached MaxRunDuration; the next tick does the rest."""
    FAILED = "Failed"
    """The database was lost, or nothing could be claimed."""
    SKIPPED = "Skipped"
    """Another run has the SINGLE_INSTANCE lock, or a replay is running."""


class LinkOutcome(StrEnum):
    """What a sign-in does to the device's Active session (INV-SES-002)."""

    LINKED = "Linked"
    """It had no user."""
    ALREADY_LINKED = "AlreadyLinked"
    """It is this user's: the row stays, and there is no event."""
    SWITCHED = "Switched"
    """It is another user's: it closes, and a new linked session starts."""
    STALE = "Stale"
    """A late event, older than the sign-in that the link is based on: skipped."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """The fields of an Active session that decide what a sign-in does."""

    user_id: UUID | None
    created_at: datetime
    signed_in_at: datetime | None


CLOCK_TOLERANCE = timedelta(minutes=1)
"""How far before a session's start a sign-in may be and still link it: clocks differ."""


def decide_link(
    state: LinkState, *, user_id: UUID, signed_in_at: datetime, may_be_late: bool
) -> LinkOutcome:
    """Decide what a sign-in of `user_id` at `signed_in_at` does (design, section 5).

    A late event never undoes a newer one: in any order and with any duplication, sign-in events
    leave the state of the newest.

    Args:
        state: The device's Active session, read under its lock.
        user_id: Who signed in.
        signed_in_at: By identity's clock for an event, by the database's clock for the API.
        may_be_late: True for events; a call of the API happens now.
    """
    if state.user_id == user_id:
        return LinkOutcome.ALREADY_LINKED
    newest = state.signed_in_at or state.created_at - CLOCK_TOLERANCE
    if may_be_late and signed_in_at <= newest:
        return LinkOutcome.STALE
    return LinkOutcome.LINKED if state.user_id is None else LinkOutcome.SWITCHED
