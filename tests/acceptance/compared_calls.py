"""Calls of the services and of the model, and the comparison of their answers and rows."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from unittest import mock
from uuid import UUID

from django.db import connection
from hypothesis.stateful import RuleBasedStateMachine, invariant

from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Poison
from pinactivity.kafka.testing import record
from pinactivity.kafka.topics import USER_SIGNED_IN
from sessions import consumers
from sessions.closer import ActivityCloser
from sessions.device import Device, DeviceType
from sessions.errors import SessionNotFound
from sessions.lifecycle import RunOutcome
from sessions.options import ActivityCloserOptions
from sessions.services import LinkedSession, link_session, record_heartbeat, start_session
from tests.acceptance import model
from tests.acceptance.stored_rows import (
    DEVICE_COLUMNS,
    Stored,
    check_changes,
    check_events,
    check_nothing_due,
    check_rows,
    event_of,
    session_of,
    view_of,
)
from views.lifecycle import ViewSource
from views.services import extend_view, open_view

THRESHOLD = timedelta(minutes=12)
MICROSECOND, SECOND, MINUTE = timedelta(microseconds=1), timedelta(seconds=1), timedelta(minutes=1)
HOUR = 60 * MINUTE
EPSILONS = (-MICROSECOND, timedelta(0), MICROSECOND)
BEGINNING = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)

USERS = (UUID(int=0xA), UUID(int=0xB), UUID(int=0xC))
OBJECTS = (UUID(int=0x01), UUID(int=0x02), UUID(int=0x03))
UNKNOWN = UUID(int=0xDEAD)
DEVICES = (
    Device("Mozilla/5.0 (one)", "203.0.113.7", "Firefox 120", "Linux", DeviceType.DESKTOP),
    Device("Mozilla/5.0 (two)", None, "Safari 17", "iOS", DeviceType.MOBILE),
)


@dataclass(slots=True)
class FrontEnd:
    """A browser and all ids that it has received, the newest last."""

    anonymous_id: UUID
    device: Device
    session_ids: list[UUID] = field(default_factory=list)

    @property
    def device_columns(self) -> tuple[str, ...]:
        return tuple(getattr(self.device, name) or "" for name in DEVICE_COLUMNS)

    def keep(self, session_id: UUID) -> None:
        if self.session_ids[-1:] != [session_id]:
            self.session_ids.append(session_id)


@dataclass(frozen=True, slots=True)
class SignIn:
    """Identity's event. Without an AnonymousId it concerns no device."""

    user_id: UUID
    anonymous_id: UUID | None
    signed_in_at: datetime


class ComparedCalls(RuleBasedStateMachine):
    """A state machine without rules: the subclass decides what is called, and when."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM property_object_views; DELETE FROM sessions;"
                " DELETE FROM outbox_messages"
            )
        self.clock = BEGINNING
        self.model = model.Model(THRESHOLD)
        self.front_ends = [
            FrontEnd(UUID(int=0xF0 + number), device) for number, device in enumerate(DEVICES)
        ]
        self.sign_ins: list[SignIn] = []
        self.delivered: list[SignIn] = []
        self.stored = Stored()
        self.compared = 0
        """How many of the model's blocks of events have been compared."""
        self.operation = ""
        """The call of the step to check; empty when it called nothing."""

    def _start(
        self, browser: FrontEnd, user: UUID | None, now: datetime, *, forgotten: bool = False
    ) -> None:
        self.operation = "start"
        answer = start_session(
            anonymous_id=None if forgotten else browser.anonymous_id,
            user_id=user,
            device=browser.device,
            now=now,
        )
        if forgotten:
            known = {session.anonymous_id for session in self.model.sessions.values()}
            browser.anonymous_id = answer.session.anonymous_id
            assert browser.anonymous_id not in known
            self.reached["start: new anonymous id"] += 1
        session_id = answer.session.session_id
        expected = self.model.start(
            anonymous_id=browser.anonymous_id,
            user_id=user,
            device=browser.device_columns,
            now=now,
            new_id=session_id,
        )
        assert model.Started(session_id, answer.is_new) == expected
        assert answer.session.anonymous_id == browser.anonymous_id
        browser.keep(session_id)
        how = "guest" if user is None else "born linked"
        self.reached[f"start: {how if answer.is_new else 'restored'}"] += 1

    def _heartbeat(
        self, browser: FrontEnd, session_id: UUID, user: UUID | None, now: datetime
    ) -> str:
        self.operation = "heartbeat"
        answer = record_heartbeat(
            session_id=session_id,
            anonymous_id=browser.anonymous_id,
            restart_for=lambda: user,
            device=browser.device,
            now=now,
        )
        known = set(self.model.sessions)
        expected = self.model.heartbeat(
            session_id=session_id,
            anonymous_id=browser.anonymous_id,
            user_id=user,
            device=browser.device_columns,
            now=now,
            new_id=answer.session.session_id,
        )
        assert model.Heartbeat(answer.session.session_id, answer.restarted) == expected
        browser.keep(expected.session_id)
        if not answer.restarted:
            return "extended"
        joined = expected.session_id in known
        return "restarted into the active one" if joined else "restarted anew"

    def _link(self, browser: FrontEnd, user: UUID, now: datetime) -> None:
        self.operation = "link"
        answer: LinkedSession | None = None
        try:
            answer = link_session(anonymous_id=browser.anonymous_id, user_id=user, now=now)
        except SessionNotFound:
            had = self.model.find_active(browser.anonymous_id)
            self.reached["link: NotFound, closed" if had else "link: NotFound"] += 1
        expected = self.model.link(
            anonymous_id=browser.anonymous_id,
            user_id=user,
            now=now,
            new_id=answer.session_id if answer else None,
        )
        assert _linked(answer) == expected
        if expected is not None:
            browser.keep(expected.session_id)
            self.reached[f"link: {expected.outcome}"] += 1

    def _sign_in(self, sign_in: SignIn) -> None:
        """Pass an event to the consumer's handler, at the machine's time."""
        self.operation = "sign-in"
        now = self.clock
        if sign_in in self.delivered:
            self.reached["sign-in: repeated"] += 1
        if any(each.signed_in_at > sign_in.signed_in_at for each in self.delivered):
            self.reached["sign-in: out of order"] += 1
        self.delivered.append(sign_in)
        payload = {"UserId": str(sign_in.user_id), "SignedInAt": sign_in.signed_in_at.isoformat()}
        if sign_in.anonymous_id is not None:
            payload["AnonymousId"] = str(sign_in.anonymous_id)
        message = record(USER_SIGNED_IN, payload)
        handler = consumers.SignedInHandler()
        decoded = handler.decode(message)
        if decoded is None:
            assert sign_in.anonymous_id is None
            self.reached["sign-in: NoDevice"] += 1
            return
        assert sign_in.anonymous_id is not None
        answers: list[LinkedSession] = []

        def link(**arguments: Any) -> LinkedSession:
            answers.append(link_session(**arguments, now=now))
            return answers[-1]

        poison = False
        with (
            mock.patch.object(consumers, "link_session", link),
            mock.patch.object(consumers, "statement_time", return_value=now),
        ):
            try:
                handler.flush([Entry(message, decoded)], lambda: None)
            except Poison:
                poison = True
        had = self.model.find_active(sign_in.anonymous_id)
        expected = self.model.sign_in(
            anonymous_id=sign_in.anonymous_id,
            user_id=sign_in.user_id,
            signed_in_at=sign_in.signed_in_at,
            now=now,
            new_id=answers[0].session_id if answers else None,
        )
        assert ("Poison" if poison else _linked(*answers)) == expected
        outcome: str = expected.outcome if isinstance(expected, model.Linked) else expected or ""
        outcome = outcome or ("NoSession, closed" if had else "NoSession")
        self.reached[f"sign-in: {outcome}"] += 1

    def _open(
        self,
        browser: FrontEnd,
        session_id: UUID,
        user: UUID | None,
        object_id: UUID,
        now: datetime,
        *,
        source: ViewSource = ViewSource.DIRECT,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        self.operation = "open"
        answer = open_view(
            session_id=session_id,
            anonymous_id=browser.anonymous_id,
            restart_for=lambda: user,
            device=browser.device,
            property_object_id=object_id,
            view_source=source,
            filter_snapshot=snapshot,
            now=now,
        )
        active = {view.id for view in self.model.views.values() if view.is_active}
        expected = self.model.open_view(
            session_id=session_id,
            anonymous_id=browser.anonymous_id,
            user_id=user,
            device=browser.device_columns,
            property_object_id=object_id,
            view_source=source.value,
            filter_snapshot=snapshot,
            now=now,
            new_session_id=answer.session_id,
            new_view_id=answer.view_id,
        )
        assert expected == model.Opened(
            answer.view_id, answer.session_id, answer.is_new, answer.restarted
        )
        browser.keep(answer.session_id)
        abandoned = any(
            not view.is_active and view.id in active and view.session_id == answer.session_id
            for view in self.model.views.values()
        )
        if not answer.is_new:
            self.reached["open: extended"] += 1
        elif abandoned:
            self.reached["open: new after an abandoned"] += 1
        else:
            how = "new in a restarted session" if answer.restarted else "new"
            self.reached[f"open: {how}"] += 1

    def _extend_view(self, browser: FrontEnd, view_id: UUID, now: datetime) -> bool:
        self.operation = "view heartbeat"
        accepted = extend_view(view_id=view_id, anonymous_id=browser.anonymous_id, now=now)
        events = len(self.model.events)
        expected = self.model.extend_view(
            view_id=view_id, anonymous_id=browser.anonymous_id, now=now
        )
        assert accepted == expected
        if len(self.model.events) > events:
            self.reached["view heartbeat: refused, closed an abandoned view alone"] += 1
        return accepted

    def _tick(self, options: ActivityCloserOptions) -> None:
        self.operation = "tick"
        result = ActivityCloser(options).run(now=self.clock)
        expected = self.model.tick(self.clock)
        assert (result.closed_sessions, result.closed_views) == expected
        assert (result.outcome, result.failures) == (RunOutcome.SUCCEEDED, 0)
        assert result.backlog_remaining == 0
        self.reached["tick: nothing due"] += expected == (0, 0)

    @invariant()
    def database_agrees(self) -> None:
        """Compare the tables with the model, then check the invariants."""
        if not self.operation:
            return
        before, self.stored = self.stored, Stored.read()
        after = self.stored
        self._count_closed(before, after)
        assert {id_: session_of(row) for id_, row in after.sessions.items()} == self.model.sessions
        assert {id_: view_of(row) for id_, row in after.views.items()} == self.model.views
        assert after.messages[: len(before.messages)] == before.messages
        events = [event_of(row) for row in after.messages[len(before.messages) :]]
        blocks = self.model.events[self.compared :]
        self.compared += len(blocks)
        assert len(events) == sum(len(block) for block in blocks)
        rest = iter(events)
        for block in blocks:
            found = sorted((next(rest) for _ in block), key=lambda event: event.key)
            assert found == sorted(block, key=lambda event: event.key)
        check_rows(after)
        check_events(after)
        check_changes(before, after)
        if self.operation == "tick":
            check_nothing_due(after, self.clock - THRESHOLD)
        self.operation = ""

    def _count_closed(self, before: Stored, after: Stored) -> None:
        for kind in ("session", "view"):
            old, new = getattr(before, f"{kind}s"), getattr(after, f"{kind}s")
            for id_, row in new.items():
                was_active = id_ in old and old[id_]["status"] == "Active"
                if was_active and row["status"] == "Inactive":
                    what = f"closed a {kind} {row['close_reason']}"
                    self.reached[f"{self.operation}: {what}"] += 1
                    session = after.sessions.get(row.get("session_id", id_), row)
                    alone = self.operation == "tick" and session["status"] == "Active"
                    self.reached["tick: closed a view alone"] += alone


def _linked(answer: LinkedSession | None = None) -> model.Linked | None:
    return model.Linked(answer.session_id, answer.outcome.value) if answer else None
