"""The state machine: which calls Hypothesis makes, in any order and at any time."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from sessions.options import ActivityCloserOptions
from tests.acceptance import model
from tests.acceptance.compared_calls import (
    DEVICES,
    EPSILONS,
    HOUR,
    MICROSECOND,
    MINUTE,
    OBJECTS,
    SECOND,
    THRESHOLD,
    UNKNOWN,
    USERS,
    ComparedCalls,
    FrontEnd,
    SignIn,
)
from tests.acceptance.stored_rows import Stored
from views.lifecycle import ViewSource

front_ends = st.sampled_from([0, 1])
users = st.sampled_from(USERS)
maybe_users = st.sampled_from([None, *USERS])
kinds = st.sampled_from(["own", "own", "own", "stale", "foreign", "unknown"])
indexes = st.integers(0, 7)
# The time since the previous step. A negative one is a call that waited, or a clock set back: the
# call is dated before the rows that it meets.
waits = st.sampled_from([timedelta(0), timedelta(0), MICROSECOND, 7.25 * SECOND, MINUTE])
waits_or_stragglers = waits | st.sampled_from([-MICROSECOND, -90 * SECOND])
signed_in = st.sampled_from(
    [
        "now",
        "seconds ago",
        "minutes ago",
        "just before the session's newest sign-in",
        "with the session's newest sign-in",
        "just after the session's newest sign-in",
        "half an hour ahead",
        "an hour ahead",
        "more than an hour ahead",
    ]
)

TOUCHES = ("start", "heartbeat", "link", "sign-in", "open", "view heartbeat", "tick")


class SessionsAndViews(ComparedCalls):
    @initialize(
        starts=st.sampled_from([(0, 1), (0, 1), (0,), ()]),
        user=maybe_users,
        object_ids=st.lists(st.sampled_from(OBJECTS), max_size=3),
    )
    def begin(self, starts: tuple[int, ...], user: UUID | None, object_ids: list[UUID]) -> None:
        """Most runs begin with browsers that are open on some pages."""
        for number in starts:
            browser = self.front_ends[number]
            self._start(browser, user if number else None, self.clock)
            for object_id in object_ids:
                self.database_agrees()
                self._open(browser, browser.session_ids[-1], user, object_id, self.clock)
            self.database_agrees()

    # Time

    @rule(
        step=st.sampled_from(
            [
                *(30 * SECOND, 61 * SECOND, 5 * MINUTE, 5 * MINUTE, 7 * MINUTE, 11 * MINUTE),
                *(THRESHOLD - MICROSECOND, THRESHOLD, THRESHOLD + MICROSECOND, THRESHOLD + MINUTE),
                *(2 * THRESHOLD - MICROSECOND, 2 * THRESHOLD, 2 * THRESHOLD + MICROSECOND),
                *(3 * HOUR, 26 * HOUR),
            ]
        ),
        then_tick=st.booleans(),
    )
    def pass_time(self, step: timedelta, then_tick: bool) -> None:
        self.clock += step
        if then_tick:
            self._tick(ActivityCloserOptions())

    @precondition(lambda self: self._active_rows())
    @rule(
        touch=st.sampled_from([*TOUCHES, "open", "view heartbeat"]),
        is_view=st.booleans(),
        index=indexes,
        is_session_live=st.booleans(),
        times=st.sampled_from([1, 2, 2]),
        epsilon=st.sampled_from([*EPSILONS, MICROSECOND]),
        user=users,
    )
    def touch_at_the_boundary(
        self,
        touch: str,
        is_view: bool,
        index: int,
        is_session_live: bool,
        times: int,
        epsilon: timedelta,
        user: UUID,
    ) -> None:
        """Touch a row when it has been silent for (twice) the threshold, to the microsecond.

        With `is_session_live` a heartbeat keeps the session live, so only its view is silent.
        """
        views = [view for view in self.model.views.values() if view.is_active]
        sessions = [session for session in self.model.sessions.values() if session.is_active]
        view = (
            views[index % len(views)] if views and (is_view or touch == "view heartbeat") else None
        )
        session = self.model.sessions[view.session_id] if view else sessions[index % len(sessions)]
        browser = FrontEnd(session.anonymous_id, DEVICES[0])
        moment = (view or session).last_activity_at + times * THRESHOLD + epsilon
        half_way = moment - times * THRESHOLD / 2
        if view and is_session_live and half_way >= self.clock:
            self.clock = half_way
            self._heartbeat(browser, session.id, None, half_way)
            self.database_agrees()
        if moment < self.clock:
            return
        self.clock = moment
        match touch:
            case "start":
                self._start(browser, None, moment)
            case "heartbeat":
                self._heartbeat(browser, session.id, None, moment)
            case "link":
                self._link(browser, user, moment)
            case "sign-in":
                self._sign_in(SignIn(user, session.anonymous_id, moment))
            case "open":
                object_id = view.property_object_id if view else OBJECTS[0]
                self._open(browser, session.id, None, object_id, moment)
            case "view heartbeat":
                self._extend_view(browser, view.id if view else UNKNOWN, moment)
            case "tick":
                self._tick(ActivityCloserOptions())
        self.reached[f"{touch} at {times} x threshold"] += 1

    @precondition(lambda self: self._active_rows())
    @rule(
        batch_size=st.sampled_from([500, 1, 2]), sessions_per_transaction=st.sampled_from([None, 1])
    )
    def tick(self, batch_size: int, sessions_per_transaction: int | None) -> None:
        self._tick(
            ActivityCloserOptions(
                batch_size=batch_size, sessions_per_transaction=sessions_per_transaction
            )
        )

    # Sessions

    @rule(
        number=front_ends,
        user=maybe_users,
        forgotten=st.sampled_from([False] * 5 + [True]),
        wait=waits_or_stragglers,
    )
    def start(self, number: int, user: UUID | None, forgotten: bool, wait: timedelta) -> None:
        """A browser without its storage gets a new AnonymousId, and leaves its session."""
        self._start(self.front_ends[number], user, self._wait(wait), forgotten=forgotten)

    @rule(number=front_ends, which=kinds, index=indexes, user=maybe_users, wait=waits_or_stragglers)
    def heartbeat(
        self, number: int, which: str, index: int, user: UUID | None, wait: timedelta
    ) -> None:
        browser = self.front_ends[number]
        found, session_id = self._choose_session(browser, which, index)
        outcome = self._heartbeat(browser, session_id, user, self._wait(wait))
        self.reached[f"heartbeat with {found} id: {outcome}"] += 1

    # Users

    @rule(number=front_ends, user=users, wait=waits_or_stragglers)
    def link(self, number: int, user: UUID, wait: timedelta) -> None:
        self._link(self.front_ends[number], user, self._wait(wait))

    @rule(
        number=front_ends,
        user=users,
        when=signed_in,
        has_device=st.sampled_from([True] * 5 + [False]),
        arrives=st.booleans(),
        wait=waits,
    )
    def sign_in_at_identity(
        self,
        number: int,
        user: UUID,
        when: str,
        has_device: bool,
        arrives: bool,
        wait: timedelta,
    ) -> None:
        """Identity's event arrives at once, or is kept for `sign_in_arrives`."""
        now = self._wait(wait)
        anonymous_id = self.front_ends[number].anonymous_id
        session = self.model.find_active(anonymous_id)
        newest_sign_in = session.newest_sign_in if session else now
        signed_in_at = {
            "now": now,
            "seconds ago": now - 20 * SECOND,
            "minutes ago": now - 5 * MINUTE,
            "just before the session's newest sign-in": newest_sign_in - MICROSECOND,
            "with the session's newest sign-in": newest_sign_in,
            "just after the session's newest sign-in": newest_sign_in + MICROSECOND,
            "half an hour ahead": now + HOUR / 2,
            "an hour ahead": now + HOUR,
            "more than an hour ahead": now + HOUR + MICROSECOND,
        }[when]
        sign_in = SignIn(user, anonymous_id if has_device else None, signed_in_at)
        self.sign_ins.append(sign_in)
        if arrives:
            self._sign_in(sign_in)

    @precondition(lambda self: self.sign_ins)
    @rule(index=indexes, wait=waits)
    def sign_in_arrives(self, index: int, wait: timedelta) -> None:
        """An event that was kept arrives, or an earlier one arrives again."""
        self._wait(wait)
        self._sign_in(self.sign_ins[-1 - index % len(self.sign_ins)])

    @precondition(lambda self: self._active_rows())
    @rule(
        number=front_ends,
        ages=st.lists(
            st.tuples(users, st.integers(0, 1200)),
            min_size=2,
            max_size=3,
            unique_by=lambda pair: pair[1],
        ),
        repeats=st.lists(indexes, max_size=2),
    )
    def storm_of_sign_ins(
        self, number: int, ages: list[tuple[UUID, int]], repeats: list[int]
    ) -> None:
        """In any order and number, sign-ins leave the state of the newest."""
        anonymous_id = self.front_ends[number].anonymous_id
        session = self.model.find_active(anonymous_id)
        if session is None or self.model.is_abandoned(session, self.clock):
            return
        newest, age = min(ages, key=lambda pair: pair[1])
        is_newer = self.clock - age * SECOND > session.newest_sign_in
        expected = newest if is_newer else session.user_id
        sign_ins = [SignIn(user, anonymous_id, self.clock - age * SECOND) for user, age in ages]
        for sign_in in sign_ins + [sign_ins[index % len(sign_ins)] for index in repeats]:
            self._sign_in(sign_in)
            self.database_agrees()
        (user,) = (
            row["user_id"]
            for row in self.stored.sessions.values()
            if row["status"] == "Active" and row["anonymous_id"] == anonymous_id
        )
        assert user == expected
        self.reached[f"storm: {'ended with the newest' if is_newer else 'nothing newer'}"] += 1

    # Views

    @rule(
        number=front_ends,
        which=kinds,
        index=indexes,
        user=maybe_users,
        object_id=st.sampled_from(OBJECTS),
        source=st.sampled_from([ViewSource.CATALOG, ViewSource.MAP]),
        snapshot=st.sampled_from([None, {"Rooms": [1, 2], "Город": None}]),
        wait=waits_or_stragglers,
    )
    def open(
        self,
        number: int,
        which: str,
        index: int,
        user: UUID | None,
        object_id: UUID,
        source: ViewSource,
        snapshot: dict[str, Any] | None,
        wait: timedelta,
    ) -> None:
        browser = self.front_ends[number]
        _, session_id = self._choose_session(browser, which, index)
        now = self._wait(wait)
        self._open(browser, session_id, user, object_id, now, source=source, snapshot=snapshot)

    @precondition(lambda self: self.model.views)
    @rule(number=front_ends, which=kinds, index=indexes, wait=waits_or_stragglers)
    def extend_view(self, number: int, which: str, index: int, wait: timedelta) -> None:
        browser = self.front_ends[number]
        found, view_id = self._choose_view(browser, which, index)
        now = self._wait(wait)
        before = self.stored
        accepted = self._extend_view(browser, view_id, now)
        self.reached[f"view heartbeat: {'accepted' if accepted else f'refused {found}'}"] += 1
        if not accepted and view_id in self.model.views:
            # INV-LV-003: nothing is written, unless this closed an abandoned view.
            row = self.model.views[view_id]
            was_closed_now = not row.is_active and before.views[view_id]["status"] == "Active"
            assert was_closed_now or Stored.read() == before

    # Choosing

    def _wait(self, wait: timedelta) -> datetime:
        """Let time pass. A negative wait leaves the clock, and returns a time before it."""
        self.clock += max(wait, timedelta(0))
        if wait < timedelta(0) and any(
            row.last_activity_at > self.clock + wait for row in self._active_rows()
        ):
            self.reached["straggler: a call dated before the last activity"] += 1
        return self.clock + min(wait, timedelta(0))

    def _active_rows(self) -> list[model.Session | model.View]:
        """Return the Active sessions, then the Active views."""
        rows: list[model.Session | model.View] = [*self.model.sessions.values()]
        rows += self.model.views.values()
        return [row for row in rows if row.is_active]

    def _choose_session(self, browser: FrontEnd, which: str, index: int) -> tuple[str, UUID]:
        (other,) = (each for each in self.front_ends if each is not browser)
        own = browser.session_ids
        ids = {"own": own[-1:], "stale": own[:-1], "foreign": other.session_ids[-1:]}
        return _choose(ids, which, index)

    def _choose_view(self, browser: FrontEnd, which: str, index: int) -> tuple[str, UUID]:
        ids: dict[str, list[UUID]] = {"own": [], "stale": [], "foreign": []}
        for view in self.model.views.values():
            is_own = self.model.sessions[view.session_id].anonymous_id == browser.anonymous_id
            if is_own or view.is_active:
                kind = ("own" if view.is_active else "stale") if is_own else "foreign"
                ids[kind].append(view.id)
        return _choose(ids, which, index)


def _choose(ids: dict[str, list[UUID]], which: str, index: int) -> tuple[str, UUID]:
    """Choose an id of a kind, the newest for 0; without any, of the first kind that has one."""
    if which == "unknown" or not any(ids.values()):
        return "unknown", UNKNOWN
    found = which if ids[which] else next(kind for kind in ids if ids[kind])
    return found, ids[found][-1 - index % len(ids[found])]
