"""What becomes a fact (design, section 11): a message's bytes, a row or a reason."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from devstats.facts import (
    TENANT,
    UNKNOWN_DEVELOPER,
    PropertyObject,
    SessionFact,
    ViewFact,
    decode_property_object,
    decode_session,
    decode_view,
    owned_by,
)
from devstats.writer import PROPERTY_OBJECTS, SESSION_FACTS, VIEW_FACTS
from pinactivity.ids import new_id
from pinactivity.kafka.record import Poison
from pinactivity.kafka.testing import record
from pinactivity.times import iso_utc
from tests.dev_stats import CREATED_AT, changed_object, ended_session, ended_view

TOPIC = "pin.test"
SECRET = "203.0.113.7"


def session(**fields: Any) -> SessionFact:
    return decode_session(record(TOPIC, ended_session(**fields)))


def view(**fields: Any) -> ViewFact:
    return decode_view(record(TOPIC, ended_view(**fields)))


def without(payload: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if name not in names}


def test_ended_session_becomes_its_row_field_by_field() -> None:
    message_id, session_id, anonymous_id = new_id(), new_id(), new_id()
    payload = ended_session(SessionId=str(session_id), AnonymousId=str(anonymous_id))

    fact = decode_session(record(TOPIC, payload, message_id=message_id))

    assert fact == SessionFact(
        fact_id=str(message_id),
        session_id=session_id,
        anonymous_id=anonymous_id,
        user_id=None,
        started_at=CREATED_AT,
        event_time=CREATED_AT,
        last_activity_at=CREATED_AT + timedelta(minutes=5),
        duration_seconds=300,
        tenant_id="00000000-0000-0000-0000-000000000000",
        brand_id=None,
        developer_id=None,
        viewer_kind="Guest",
    )


@pytest.mark.parametrize(("user", "kind"), [(None, "Guest"), (str(UUID(int=7)), "User")])
def test_viewer_kind_of_a_session_is_whether_there_is_a_user(user: Any, kind: str) -> None:
    assert session(UserId=user).viewer_kind == kind


@pytest.mark.parametrize(("user", "kind"), [(None, "Guest"), (str(UUID(int=7)), "Investor")])
def test_viewer_kind_of_a_view_is_never_an_agent(user: Any, kind: str) -> None:
    assert view(UserId=user).viewer_kind == kind


def test_absent_user_is_a_guest() -> None:
    payload = without(ended_session(), "UserId")
    assert decode_session(record(TOPIC, payload)).viewer_kind == "Guest"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"SessionId": None}, "session-id-missing"),
        ({"SessionId": "00000000-0000-0000-0000-000000000000"}, "session-id-invalid"),
        ({"SessionId": "not an id"}, "session-id-invalid"),
        ({"SessionId": 7}, "session-id-invalid"),
        ({"AnonymousId": None}, "anonymous-id-missing"),
        ({"UserId": ""}, "user-id-invalid"),
        ({"CreatedAt": None}, "created-at-missing"),
        ({"CreatedAt": "0001-01-01T00:00:00Z"}, "created-at-default"),
        ({"CreatedAt": "0001-01-01T00:00:00.0000000+00:00"}, "created-at-default"),
        ({"CreatedAt": "1850-01-01T00:00:00Z"}, "created-at-before-1970"),
        ({"CreatedAt": "1969-12-31T23:59:59.999999Z"}, "created-at-before-1970"),
        ({"CreatedAt": "1970-01-01T00:00:00+00:01"}, "created-at-before-1970"),
        ({"CreatedAt": "2026-03-01T12:00:00"}, "created-at-invalid"),
        ({"CreatedAt": "2026-03-01"}, "created-at-invalid"),
        ({"CreatedAt": 1772366400}, "created-at-invalid"),
        ({"LastActivityAt": None}, "last-activity-at-missing"),
        ({"LastActivityAt": "soon"}, "last-activity-at-invalid"),
        ({"DurationSeconds": None}, "duration-seconds-missing"),
        ({"DurationSeconds": -1}, "duration-seconds-invalid"),
        ({"DurationSeconds": True}, "duration-seconds-invalid"),
        ({"DurationSeconds": "12"}, "duration-seconds-invalid"),
        ({"DurationSeconds": 1.5}, "duration-seconds-invalid"),
        ({"DurationSeconds": 12.0}, "duration-seconds-invalid"),
        ({"DurationSeconds": 2**31}, "duration-seconds-invalid"),
        ({"DurationSeconds": float("nan")}, "value-not-json"),
        ({"DurationSeconds": 10**400}, "value-not-json"),
        ({"Extra": "\ud83d"}, "value-not-json"),
    ],
)
def test_session_that_breaks_the_contract_is_poison_with_a_reason(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Poison) as caught:
        session(**fields)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "name", ["SessionId", "AnonymousId", "CreatedAt", "LastActivityAt", "DurationSeconds"]
)
def test_required_field_that_is_absent_does_not_decode(name: str) -> None:
    with pytest.raises(Poison, match="-missing"):
        decode_session(record(TOPIC, without(ended_session(), name)))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff\xfe", "value-not-json"),
        (b"", "value-not-json"),
        (b"[]", "value-not-an-object"),
        (b'{"SessionId": "a", "SessionId": "b"}', "value-not-json"),
        (b'{"SessionId": "a", "sessionid": "b"}', "value-repeats-a-field"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "value-not-json"),
    ],
)
def test_bytes_that_are_no_flat_object_are_poison_c53(value: bytes, reason: str) -> None:
    for decode in (decode_session, decode_view, decode_property_object):
        with pytest.raises(Poison) as caught:
            decode(record(TOPIC, value))
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-03-01T15:00:00.1234567+03:00", CREATED_AT),
        ("2026-03-01T12:00:00.123456Z", CREATED_AT),
        ("2026-03-01T06:30:00.123456-05:30", CREATED_AT),
        ("1970-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_any_offset_is_converted_and_seven_digits_are_accepted(text: str, moment: datetime) -> None:
    fact = session(CreatedAt=text)
    assert (fact.started_at, fact.event_time) == (moment, moment)
    assert fact.started_at.tzinfo is UTC


def test_names_of_fields_are_read_in_any_case() -> None:
    payload = {name.lower(): value for name, value in ended_session(DurationSeconds=7).items()}
    assert decode_session(record(TOPIC, payload)).duration_seconds == 7


def test_thirty_day_session_and_the_longest_there_is_overflow_nothing_c22() -> None:
    month = 30 * 86_400
    fact = session(LastActivityAt=iso_utc(CREATED_AT + timedelta(days=30)), DurationSeconds=month)
    assert (fact.last_activity_at - fact.started_at, fact.duration_seconds) == (
        timedelta(days=30),
        month,
    )
    assert session(DurationSeconds=2**31 - 1).duration_seconds == 2**31 - 1


def test_ended_view_becomes_its_row_field_by_field() -> None:
    message_id, user = new_id(), new_id()
    payload = ended_view(UserId=str(user), FilterSnapshot={"Rooms": [1, 2], "Город": "é"})

    fact = decode_view(record(TOPIC, payload, message_id=message_id))

    assert fact == ViewFact(
        fact_id=str(message_id),
        property_object_view_id=UUID(payload["PropertyObjectViewId"]),
        property_object_id=UUID(payload["PropertyObjectId"]),
        session_id=UUID(payload["SessionId"]),
        anonymous_id=UUID(payload["AnonymousId"]),
        user_id=user,
        view_source="Map",
        event_time=CREATED_AT,
        last_activity_at=CREATED_AT + timedelta(minutes=1),
        duration_seconds=60,
        filter_snapshot='{"Rooms":[1,2],"Город":"é"}',
        tenant_id=TENANT,
        brand_id=None,
        developer_id=UNKNOWN_DEVELOPER,
        viewer_kind="Investor",
    )
    assert view().filter_snapshot == ""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"PropertyObjectViewId": None}, "property-object-view-id-missing"),
        ({"PropertyObjectId": str(UUID(int=0))}, "property-object-id-invalid"),
        ({"SessionId": str(UUID(int=0))}, "session-id-invalid"),
        ({"AnonymousId": None}, "anonymous-id-missing"),
        ({"ViewSource": None}, "view-source-missing"),
        ({"ViewSource": ""}, "view-source-invalid"),
        ({"ViewSource": "x" * 65}, "view-source-invalid"),
        ({"ViewSource": 1}, "view-source-invalid"),
        ({"ViewedAt": "0001-01-01T00:00:00Z"}, "viewed-at-default"),
        ({"ViewedAt": "1969-12-31T00:00:00Z"}, "viewed-at-before-1970"),
        ({"LastActivityAt": None}, "last-activity-at-missing"),
        ({"DurationSeconds": -1}, "duration-seconds-invalid"),
        ({"FilterSnapshot": "text"}, "filter-snapshot-invalid"),
        ({"FilterSnapshot": []}, "filter-snapshot-invalid"),
        ({"FilterSnapshot": {"a": "\x00"}}, "value-not-json"),
    ],
)
def test_view_that_breaks_the_contract_is_poison_with_a_reason(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Poison) as caught:
        view(**fields)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"PropertyObjectId": None}, "property-object-id-missing"),
        ({"DeveloperId": None}, "developer-id-missing"),
        ({"DeveloperId": str(UNKNOWN_DEVELOPER)}, "developer-id-invalid"),
        ({"BrandId": 5}, "brand-id-invalid"),
    ],
)
def test_object_that_breaks_the_contract_is_poison_with_a_reason(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Poison) as caught:
        decode_property_object(record(TOPIC, changed_object(**fields)))
    assert caught.value.reason == reason


def test_object_holds_from_the_messages_own_time_on() -> None:
    brand = new_id()
    payload = changed_object(BrandId=str(brand))
    assert decode_property_object(record(TOPIC, payload, created_at=CREATED_AT)) == PropertyObject(
        UUID(payload["PropertyObjectId"]), UUID(payload["DeveloperId"]), brand, CREATED_AT
    )
    ancient = datetime(1, 1, 1, tzinfo=UTC)
    with pytest.raises(Poison, match="updated-at-before-1970"):
        decode_property_object(record(TOPIC, payload, created_at=ancient))


def test_view_belongs_to_whoever_owned_its_object_then() -> None:
    minute = timedelta(minutes=1)
    seen = view()
    first, second = (
        PropertyObject(seen.property_object_id, new_id(), brand, CREATED_AT + shift * minute)
        for brand, shift in ((new_id(), -2), (None, 2))
    )

    def owner(*versions: PropertyObject) -> tuple[UUID, UUID | None]:
        owned = owned_by(seen, versions)
        return owned.developer_id, owned.brand_id

    assert owner() == (UNKNOWN_DEVELOPER, None)
    assert owner(first, second) == (first.developer_id, first.brand_id)
    assert owner(second) == (second.developer_id, None)  # the first that is known
    assert owner(first, second._replace(updated_at=CREATED_AT)) == (second.developer_id, None)


def test_no_device_field_reaches_a_fact_even_if_it_was_sent() -> None:
    device = {"IpAddress": SECRET, "UserAgent": SECRET, "Device": {"IpAddress": SECRET}}
    for fact in (session(**device), view(**device)):
        assert SECRET not in repr(fact)
    names = [name.lower() for table in (SESSION_FACTS, VIEW_FACTS) for name in table.columns]
    assert not [name for name in names if "address" in name or "agent" in name or "ip" in name]


def test_rows_are_in_the_order_of_their_tables_columns() -> None:
    def snake(name: str) -> str:
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")

    for row, table in (
        (SessionFact, SESSION_FACTS),
        (ViewFact, VIEW_FACTS),
        (PropertyObject, PROPERTY_OBJECTS),
    ):
        assert [snake(name) for name in table.columns] == list(row._fields)


def test_snapshot_with_ten_thousand_characters_stays_whole() -> None:
    snapshot = {"Text": "é" * 10_000}
    assert json.loads(view(FilterSnapshot=snapshot).filter_snapshot) == snapshot
