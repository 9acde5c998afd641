"""Identity's sign-ins: they link a device's session, as the front end's call does (A4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.payload import Payload
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.spec import ConsumerSpec, register
from pinactivity.kafka.topics import USER_SIGNED_IN
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry.metrics import SIGN_INS
from sessions.errors import SessionNotFound
from sessions.services import link_session

_SOURCE = "event"
_FUTURE_TOLERANCE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class SignIn:
    user_id: UUID
    anonymous_id: UUID
    signed_in_at: datetime


class SignedInHandler:
    """Handles `{UserId, AnonymousId?, SignedInAt}`, one transaction a message."""

    def decode(self, record: Record) -> SignIn | None:
        """Read a sign-in; None without an AnonymousId, which names the device.

        Raises:
            Poison: UserId or SignedInAt is missing; an id is nil or invalid; SignedInAt is no time.
        """
        payload = Payload(record)
        user_id, signed_in_at = payload.id("UserId"), payload.time("SignedInAt")
        if not payload.has("AnonymousId"):
            SIGN_INS.labels(_SOURCE, "NoDevice").inc()
            return None
        return SignIn(user_id, payload.id("AnonymousId"), signed_in_at)

    def flush(self, entries: Sequence[Entry[SignIn]], while_waiting: Callable[[], None]) -> None:
        """Link sessions; count and skip late events and devices without an Active session.

        Raises:
            Poison: SignedInAt is more than an hour ahead of the database's clock.
        """
        for entry in entries:
            sign_in = entry.row
            if sign_in.signed_in_at > statement_time() + _FUTURE_TOLERANCE:
                raise Poison("signed-in-at-in-the-future")
            try:
                outcome = link_session(
                    anonymous_id=sign_in.anonymous_id,
                    user_id=sign_in.user_id,
                    signed_in_at=sign_in.signed_in_at,
                ).outcome.value
            except SessionNotFound:
                outcome = "NoSession"
            SIGN_INS.labels(_SOURCE, outcome).inc()

    def close(self) -> None:
        """Do nothing: the handler has no resources."""


register(
    ConsumerSpec(
        name="signed-in",
        topics=(USER_SIGNED_IN,),
        group="user-activity-identity-signed-in",
        handler=SignedInHandler,
        limits=lambda: BatchLimits(rows=100, age=timedelta(0)),
        one_by_one=True,
    )
)
