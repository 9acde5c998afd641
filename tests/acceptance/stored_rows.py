"""The stored sessions, views and events, and the invariants that they satisfy by themselves."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection

from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED, SESSION_ENDED, SESSION_LINKED
from tests.acceptance import model

DEVICE_COLUMNS = ("user_agent", "ip_address", "browser", "os", "device_type")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """All columns of the three tables at one moment."""

    sessions: dict[UUID, Row] = field(default_factory=dict)
    views: dict[UUID, Row] = field(default_factory=dict)
    messages: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls) -> "Stored":
        return cls(
            {row["id"]: row for row in _select("SELECT * FROM sessions")},
            {row["id"]: row for row in _select("SELECT * FROM property_object_views")},
            list(_select("SELECT * FROM outbox_messages ORDER BY id")),
        )

    def keys(self, topic: str) -> list[str]:
        return [message["key"] for message in self.messages if message["topic"] == topic]


def _select(statement: str) -> Iterator[Row]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        names = [column.name for column in cursor.description]
        for values in cursor.fetchall():
            yield dict(zip(names, values, strict=True))


def session_of(row: Row) -> model.Session:
    known = {each.name for each in fields(model.Session)} - {"device"}
    device = tuple(row[name] or "" for name in DEVICE_COLUMNS)
    return model.Session(device=device, **{name: row[name] for name in known})


def view_of(row: Row) -> model.View:
    known = {name: row[name] for name in (each.name for each in fields(model.View))}
    snapshot = row["filter_snapshot"]
    known["filter_snapshot"] = None if snapshot is None else json.loads(snapshot)
    return model.View(**known)


def event_of(row: Row) -> model.Event:
    headers = json.loads(row["headers"])
    assert headers["AggregateId"] == row["key"]
    assert headers["ContractVersion"] == "1"
    return model.Event(
        topic=row["topic"],
        event_type=headers["EventType"],
        aggregate_type=headers["AggregateType"],
        key=row["key"],
        version=int(headers["Version"]),
        payload=json.loads(row["payload"]),
    )


def check_rows(stored: Stored) -> None:
    """Check the invariants of the rows."""
    active = [row["anonymous_id"] for row in stored.sessions.values() if row["status"] == "Active"]
    assert len(active) == len(set(active)), "INV-SES-001"
    open_views = [
        (row["session_id"], row["property_object_id"])
        for row in stored.views.values()
        if row["status"] == "Active"
    ]
    assert len(open_views) == len(set(open_views)), "an object is open once in a session"
    for row in (*stored.sessions.values(), *stored.views.values()):
        assert row["created_at"] <= row["last_activity_at"], "INV-SES-004"
        if row["status"] == "Active":
            assert row["ended_at"] is row["duration"] is row["close_reason"] is None
        else:
            assert row["ended_at"] >= row["last_activity_at"], "INV-SES-005"
            assert row["duration"] == row["last_activity_at"] - row["created_at"], "INV-SES-005"
    for row in stored.sessions.values():
        linked = [row[name] is not None for name in ("user_id", "linked_at", "signed_in_at")]
        assert len(set(linked)) == 1, "INV-SES-002"
    for view in stored.views.values():
        session = stored.sessions[view["session_id"]]
        assert view["status"] == "Inactive" or session["status"] == "Active", "INV-LV-007"
        assert view["last_activity_at"] <= session["last_activity_at"], "a session trails its view"
        assert view["created_at"] >= session["created_at"]
        if view["user_id"] is not None:
            assert view["user_id"] == session["user_id"], "INV-SES-002"


def check_events(stored: Stored) -> None:
    """Check that each closed row has one event, and no other row has any."""
    for topic, rows in (
        (SESSION_ENDED, stored.sessions),
        (PROPERTY_OBJECT_VIEW_ENDED, stored.views),
    ):
        closed = [str(id_) for id_, row in rows.items() if row["status"] == "Inactive"]
        assert sorted(stored.keys(topic)) == sorted(closed), "INV-SES-006, INV-LV-008"
    linked = stored.keys(SESSION_LINKED)
    assert len(linked) == len(set(linked)), "INV-SES-002"


def check_changes(before: Stored, after: Stored) -> None:
    """Check what may happen to a row, and to the outbox, from one step to the next."""
    for old_rows, new_rows in ((before.sessions, after.sessions), (before.views, after.views)):
        for id_, old in old_rows.items():
            new = new_rows[id_]
            assert new["last_activity_at"] >= old["last_activity_at"]
            assert new["created_at"] == old["created_at"], "INV-SES-004"
            assert new["version"] >= old["version"]
            if old["status"] == "Inactive":
                assert new == old, "INV-SES-006"
    is_reported: dict[str, bool] = {}
    for id_, session in after.sessions.items():
        user = before.sessions[id_]["user_id"] if id_ in before.sessions else None
        assert user in (None, session["user_id"]), "INV-SES-002"
        if user is None and session["user_id"] is not None:
            is_reported[str(id_)] = id_ in before.sessions or _is_switched(session, before, after)
    reported = after.keys(SESSION_LINKED)[len(before.keys(SESSION_LINKED)) :]
    assert set(reported) == {key for key, expected in is_reported.items() if expected}, (
        "INV-SES-002, A5"
    )


def _is_switched(session: Row, before: Stored, after: Stored) -> bool:
    """Return whether a new session replaces one that this step closed as Switched."""
    return any(
        row["anonymous_id"] == session["anonymous_id"]
        and row["close_reason"] == "Switched"
        and before.sessions.get(id_, {}).get("status") != "Inactive"
        for id_, row in after.sessions.items()
    )


def check_nothing_due(stored: Stored, cutoff: datetime) -> None:
    """Check that the closer left no row Active that was silent for longer (INV-LV-004)."""
    for row in (*stored.sessions.values(), *stored.views.values()):
        assert row["status"] == "Inactive" or row["last_activity_at"] >= cutoff
