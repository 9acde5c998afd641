"""The events' payloads, exactly (design, section 8): they are a contract with other services."""

import inspect
import json
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

import sessions.events
import views.events
from outbox.services import _encode
from pinactivity.core.events import EventFields
from sessions.events import SessionEnded, SessionLinked
from sessions.lifecycle import duration_seconds
from views.events import PropertyObjectViewEnded

CREATED_AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def an_id(number: int) -> UUID:
    return UUID(int=0xABCDEF << 64 | number)


def session_ended(**fields: Any) -> SessionEnded:
    return SessionEnded(
        **{
            "session_id": an_id(1),
            "anonymous_id": an_id(2),
            "user_id": an_id(3),
            "created_at": "2026-03-01T12:00:00.123456Z",
            "last_activity_at": "2026-03-01T12:01:02.023456Z",
            "duration_seconds": 61,
            "version": 3,
            **fields,
        }
    )


def view_ended(**fields: Any) -> PropertyObjectViewEnded:
    return PropertyObjectViewEnded(
        **{
            "property_object_view_id": an_id(4),
            "property_object_id": an_id(5),
            "session_id": an_id(1),
            "anonymous_id": an_id(2),
            "user_id": an_id(3),
            "view_source": "Catalog",
            "created_at": "2026-03-01T12:00:00.123456Z",
            "last_activity_at": "2026-03-01T12:01:02.023456Z",
            "duration_seconds": 61,
            "filter_snapshot": {"Price": {"Max": 1.5}, "Город": None},
            "version": 2,
            **fields,
        }
    )


def written(event: SessionEnded | PropertyObjectViewEnded) -> dict[str, Any]:
    """The payload as it goes to Kafka."""
    payload: dict[str, Any] = json.loads(_encode(event.payload()))
    return payload


def test_session_ended_is_the_contracts_payload() -> None:
    assert written(session_ended()) == {
        "SessionId": "00000000-00ab-cdef-0000-000000000001",
        "AnonymousId": "00000000-00ab-cdef-0000-000000000002",
        "UserId": "00000000-00ab-cdef-0000-000000000003",
        "CreatedAt": "2026-03-01T12:00:00.123456Z",
        "LastActivityAt": "2026-03-01T12:01:02.023456Z",
        "DurationSeconds": 61,
    }


def test_property_object_view_ended_is_the_contracts_payload() -> None:
    assert written(view_ended()) == {
        "PropertyObjectViewId": "00000000-00ab-cdef-0000-000000000004",
        "PropertyObjectId": "00000000-00ab-cdef-0000-000000000005",
        "SessionId": "00000000-00ab-cdef-0000-000000000001",
        "AnonymousId": "00000000-00ab-cdef-0000-000000000002",
        "UserId": "00000000-00ab-cdef-0000-000000000003",
        "ViewSource": "Catalog",
        "ViewedAt": "2026-03-01T12:00:00.123456Z",
        "LastActivityAt": "2026-03-01T12:01:02.023456Z",
        "DurationSeconds": 61,
        "FilterSnapshot": {"Price": {"Max": 1.5}, "Город": None},
    }


def test_optional_fields_are_there_as_null() -> None:
    assert written(session_ended(user_id=None))["UserId"] is None
    payload = written(view_ended(user_id=None, filter_snapshot=None))
    assert (payload["UserId"], payload["FilterSnapshot"]) == (None, None)


def test_session_linked_is_the_contracts_payload() -> None:
    event = SessionLinked(
        session_id=an_id(1),
        anonymous_id=an_id(2),
        user_id=an_id(3),
        linked_at="2026-03-01T12:00:00.000000Z",
        version=2,
    )
    assert _encode(event.payload()) == (
        b'{"SessionId":"00000000-00ab-cdef-0000-000000000001",'
        b'"AnonymousId":"00000000-00ab-cdef-0000-000000000002",'
        b'"UserId":"00000000-00ab-cdef-0000-000000000003","LinkedAt":"2026-03-01T12:00:00.000000Z"}'
    )


def test_fields_are_written_in_the_order_of_their_declaration() -> None:
    assert list(written(view_ended())) == [
        *("PropertyObjectViewId", "PropertyObjectId", "SessionId", "AnonymousId", "UserId"),
        *("ViewSource", "ViewedAt", "LastActivityAt", "DurationSeconds", "FilterSnapshot"),
    ]


def test_topics_types_and_aggregates_are_the_contracts() -> None:
    described = {
        event: (event.TOPIC, event.EVENT_TYPE, event.AGGREGATE_TYPE, event.CONTRACT_VERSION)
        for event in (SessionEnded, PropertyObjectViewEnded)
    }
    assert described == {
        SessionEnded: (
            "pin.user-activity.session-ended.v1",
            "SessionEndedKafkaEvent",
            "Session",
            1,
        ),
        PropertyObjectViewEnded: (
            "pin.user-activity.property-object-view-ended.v1",
            "PropertyObjectViewEndedKafkaEvent",
            "PropertyObjectView",
            1,
        ),
    }


def test_aggregate_is_the_session_or_the_view() -> None:
    assert session_ended().aggregate_id == an_id(1)
    assert view_ended().aggregate_id == an_id(4)


@pytest.mark.parametrize("module", [sessions.events, views.events])
def test_no_event_has_a_field_of_the_device(module: ModuleType) -> None:
    events = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, EventFields) and each is not EventFields
    ]
    assert events
    names = {name for event in events for name in event.__struct_fields__}
    assert not names & {"device", "ip_address", "user_agent", "browser", "os", "device_type"}


@pytest.mark.parametrize(
    ("lasted", "seconds"),
    [
        (timedelta(0), 0),
        (MICROSECOND, 0),
        (timedelta(seconds=1) - MICROSECOND, 0),
        (timedelta(seconds=1), 1),
        (timedelta(seconds=420), 420),
        (timedelta(days=30), 2_592_000),
        (timedelta(days=30) - MICROSECOND, 2_591_999),
        (timedelta(days=36_500), 3_153_600_000),
    ],
)
def test_duration_is_in_whole_seconds_rounded_down_c22(lasted: timedelta, seconds: int) -> None:
    assert duration_seconds(CREATED_AT, CREATED_AT + lasted) == seconds


def test_event_cannot_be_changed_after_the_fact() -> None:
    event = session_ended()
    with pytest.raises(AttributeError):
        event.version = 4  # type: ignore[misc]  # that it is refused is the point
