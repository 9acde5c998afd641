"""Tables of sessions and of closer runs, and the statements on one session (design, section 3)."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from django.db import connection, models
from django.db.models import F, Q

from pinactivity.core.ids import new_id
from pinactivity.postgres.prepared import PreparedStatement
from sessions.device import Device, DeviceType
from sessions.lifecycle import CloseReason, RunOutcome, Status
from sessions.querysets import ActivityQuerySet


def choices(enum: type[Enum]) -> list[tuple[str, str]]:
    """Return the members of a string enum as choices of a field."""
    return [(member.value, member.value) for member in enum]


def status_fields_agree() -> Q:
    """Return the rule that binds a status to its fields: Active if and only if no end is set."""
    return Q(
        status=Status.ACTIVE.value,
        ended_at__isnull=True,
        duration__isnull=True,
        close_reason__isnull=True,
    ) | Q(
        status=Status.INACTIVE.value,
        ended_at__isnull=False,
        duration__isnull=False,
        close_reason__in=[reason.value for reason in CloseReason],
    )


@dataclass(frozen=True, slots=True)
class TouchedSession:
    """An Active session, as returned by the statement that extended or inserted it.

    `moment` is the time of that statement, at least `created_at`, at most `last_activity_at`.
    """

    session_id: UUID
    anonymous_id: UUID
    user_id: UUID | None
    moment: datetime


class SessionQuerySet(ActivityQuerySet["Session"]):
    """Sessions, with the filters and the claim of ActivityQuerySet."""


_SessionManager = models.Manager.from_queryset(SessionQuerySet)


class SessionManager(_SessionManager["Session"]):
    """The statements on one session. They need no queryset, so they are the manager's."""

    def extend(
        self,
        *,
        session_id: UUID,
        anonymous_id: UUID,
        abandoned_after: timedelta,
        now: datetime | None,
    ) -> TouchedSession | None:
        """Move LastActivityAt of the device's Active session forward (INV-SES-003).

        This is one conditional update without a read before it, at the database's time.
        An abandoned session stays as it is.

        Returns:
            The session, or None when no row matched: closed, abandoned, unknown or foreign.
        """
        row = EXTEND.fetch_one(
            {
                "session_id": session_id,
                "anonymous_id": anonymous_id,
                "abandoned_after": abandoned_after,
                "now": now,
            }
        )
        return None if row is None else TouchedSession(*row)

    def start(
        self,
        *,
        anonymous_id: UUID,
        user_id: UUID | None,
        device: Device,
        abandoned_after: timedelta,
        now: datetime | None,
    ) -> tuple[TouchedSession, bool] | None:
        """Insert the device's Active session, or extend the one it has (INV-SES-001).

        This is one statement: parallel first starts wait for each other at the unique index
        instead of violating it. A user links the new session from its beginning.

        Returns:
            The session and whether it is new; None when the device's Active session is
            abandoned, whose row then stays locked until the transaction ends.
        """
        proposed = new_id()
        parameters: dict[str, Any] = {
            "session_id": proposed,
            "anonymous_id": anonymous_id,
            "user_id": user_id,
            "user_agent": device.user_agent,
            "ip_address": device.ip_address,
            "browser": device.browser,
            "os": device.os,
            "device_type": device.device_type.value,
            "abandoned_after": abandoned_after,
            "now": now,
        }
        with connection.cursor() as cursor:
            cursor.execute(_START, parameters)
            row = cursor.fetchone()
        if row is None:
            return None
        touched = TouchedSession(*row)
        return touched, touched.session_id == proposed


class Session(models.Model):
    """One device's visit: at most one is Active per AnonymousId (INV-SES-001)."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    anonymous_id = models.UUIDField()
    user_id = models.UUIDField(null=True, blank=True)
    linked_at = models.DateTimeField(null=True, blank=True)
    signed_in_at = models.DateTimeField(
        null=True, blank=True, help_text="The sign-in that the link rests on."
    )
    status = models.TextField(choices=choices(Status), db_default=Status.ACTIVE.value)
    created_at = models.DateTimeField()
    last_activity_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    duration = models.DurationField(null=True, blank=True)
    close_reason = models.TextField(choices=choices(CloseReason), null=True, blank=True)
    version = models.IntegerField(
        db_default=1, help_text="Grows by one on link and on close; beats leave it."
    )
    ip_address = models.GenericIPAddressField(null=True, blank=True)
    user_agent = models.CharField(max_length=1024)
    browser = models.TextField(blank=True)
    os = models.TextField(blank=True)
    device_type = models.TextField(choices=choices(DeviceType))

    objects = SessionManager()

    DEVICE_COLUMNS = ("ip_address", "user_agent", "browser", "os", "device_type")

    class Meta:
        db_table = "sessions"
        indexes = (
            models.Index(
                fields=["last_activity_at"],
                name="ix_sessions_active_last_activity",
                condition=Q(status=Status.ACTIVE.value),
            ),
            models.Index(fields=["anonymous_id", "-created_at"], name="ix_sessions_anonymous"),
            models.Index(
                fields=["user_id", "-created_at"],
                # views/selectors.py reads these columns of all sessions of a user.
                include=["last_activity_at", "id"],
                name="ix_sessions_user",
                condition=Q(user_id__isnull=False),
            ),
            models.Index(
                fields=["ended_at"],
                name="ix_sessions_inactive_ended_at",
                condition=Q(status=Status.INACTIVE.value),
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["anonymous_id"],
                name="ux_sessions_active_anonymous",
                condition=Q(status=Status.ACTIVE.value),
            ),
            models.CheckConstraint(
                name="chk_sessions_duration_nonneg",
                condition=Q(duration__gte=timedelta(0)),
            ),
            models.CheckConstraint(
                name="chk_sessions_activity_order",
                condition=Q(last_activity_at__gte=F("created_at")),
            ),
            models.CheckConstraint(
                name="chk_sessions_status_fields", condition=status_fields_agree()
            ),
            models.CheckConstraint(
                name="chk_sessions_linked",
                condition=Q(user_id__isnull=True, linked_at__isnull=True)
                | Q(user_id__isnull=False, linked_at__isnull=False),
            ),
        )
        permissions = (
            ("view_device_address", "Can see addresses and User-Agents"),
            ("close_now", "Can close sessions and views now"),
        )

    def __str__(self) -> str:
        return str(self.id)


class ActivityCloserRun(models.Model):
    """One run of the ActivityCloserJob, kept 30 days; the id is its jobRunId."""

    id = models.UUIDField(primary_key=True, editable=False)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    cutoff = models.DateTimeField()
    closed_sessions = models.IntegerField(db_default=0)
    closed_views = models.IntegerField(db_default=0)
    failures = models.IntegerField(db_default=0)
    backlog_remaining = models.IntegerField(null=True, blank=True)
    active_sessions = models.BigIntegerField(
        null=True, blank=True, help_text="At the end of the run, counted to 1,000,000."
    )
    outcome = models.TextField(choices=choices(RunOutcome))

    class Meta:
        db_table = "activity_closer_runs"
        indexes = (models.Index(fields=["started_at"], name="ix_activity_closer_runs_started_at"),)
        constraints = (
            models.CheckConstraint(
                name="chk_activity_closer_runs_finished",
                condition=Q(outcome=RunOutcome.RUNNING.value, finished_at__isnull=True)
                | (~Q(outcome=RunOutcome.RUNNING.value) & Q(finished_at__isnull=False)),
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


# Raw SQL: Django has neither UPDATE .. RETURNING nor ON CONFLICT .. DO UPDATE .. WHERE.
# A read before the write would be a race (INV-SES-001, INV-SES-003).
_NOW = "coalesce(%(now)s, statement_timestamp())"
_ALIVE = f"sessions.last_activity_at >= {_NOW} - %(abandoned_after)s::interval"
_FORWARD = f"greatest(sessions.last_activity_at, {_NOW})"
_RETURNING = (
    "RETURNING sessions.id, sessions.anonymous_id, sessions.user_id,"
    f" greatest({_NOW}, sessions.created_at)"
)

EXTEND = PreparedStatement(
    "extend_session",
    f"""
    UPDATE sessions SET last_activity_at = {_FORWARD}
    WHERE id = %(session_id)s AND anonymous_id = %(anonymous_id)s
      AND status = 'Active' AND {_ALIVE}
    {_RETURNING}
    """,
)

_START = f"""
    INSERT INTO sessions (
        id, anonymous_id, user_id, linked_at, signed_in_at, created_at, last_activity_at,
        user_agent, ip_address, browser, os, device_type
    )
    SELECT %(session_id)s, %(anonymous_id)s, %(user_id)s::uuid,
           CASE WHEN %(user_id)s IS NOT NULL THEN moment END,
           CASE WHEN %(user_id)s IS NOT NULL THEN moment END,
           moment, moment,
           %(user_agent)s, %(ip_address)s::inet, %(browser)s, %(os)s, %(device_type)s
    FROM (SELECT {_NOW} AS moment) AS clock
    ON CONFLICT (anonymous_id) WHERE status = 'Active'
    DO UPDATE SET last_activity_at = {_FORWARD} WHERE {_ALIVE}
    {_RETURNING}
"""
