"""What becomes a fact (design, section 11): a message's bytes, a row or a reason."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from devstats import contracts
from devstats.facts import (
    TENANT,
    UNKNOWN_DEVELOPER,
    SessionFact,
    ViewFact,
    decode_session,
    decode_view,
    make_session_fact,
    make_view_fact,
)
from devstats.ownership import PropertyObject, decode_property_object, with_owner
from devstats.tables import PROPERTY_OBJECTS, SESSION_FACTS, VIEW_FACTS
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.event_decoder import Contract, EventDecoder
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.testing import record
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
        owned = with_owner(seen, versions)
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


def test_types_of_columns_follow_from_the_rows_fields() -> None:
    assert VIEW_FACTS.columns == {
        "FactId": "String",
        "PropertyObjectViewId": "UUID",
        "PropertyObjectId": "UUID",
        "SessionId": "UUID",
        "AnonymousId": "UUID",
        "UserId": "Nullable(UUID)",
        "ViewSource": "LowCardinality(String)",
        "EventTime": "DateTime64(6, 'UTC')",
        "LastActivityAt": "DateTime64(6, 'UTC')",
        "DurationSeconds": "UInt32",
        "FilterSnapshot": "String",
        "TenantId": "String",
        "BrandId": "Nullable(UUID)",
        "DeveloperId": "UUID",
        "ViewerKind": "Enum8('Guest' = 1, 'Investor' = 2, 'Agent' = 3)",
    }


def test_field_of_a_type_that_no_contract_has_is_refused() -> None:
    class Unbounded(Contract):
        name: str

    with pytest.raises(TypeError, match=r"Unbounded\.name"):
        EventDecoder(Unbounded)


def test_snapshot_with_ten_thousand_characters_stays_whole() -> None:
    snapshot = {"Text": "é" * 10_000}
    assert json.loads(view(FilterSnapshot=snapshot).filter_snapshot) == snapshot


# -- the fast decoder returns what the full one returns, or nothing ------------------------

ID = "01a229dd-8191-73f3-8d96-7e4192cca6ff"
IDS: list[Any] = [
    *(ID, ID.upper(), ID.replace("-", ""), f"{{{ID}}}", f"urn:uuid:{ID}", f"{ID} ", ID[:-1]),
    *(str(UUID(int=0)), UUID(int=0).hex, str(UUID(int=7)), "01a2-29dd819173f38d967e4192cca6ff"),
    *("01a229dd81-91-73f3-8d96-7e4192cca6ff", "\u0966" * 32, "x" * 46, "", None, 7, ["x"]),
]
TIMES: list[Any] = [
    *("2026-03-01T12:00:00.123456Z", "2026-03-01T12:00:00Z", "2026-03-01T12:00:00.1234567Z"),
    *("2026-03-01T12:00:00.999999999Z", "2026-03-01T15:00:00.123456+03:00", "2026-03-01T12:00Z"),
    *("2026-03-01t12:00:00.123456z", "2026-03-01 12:00:00.123456Z", "2026-03-01T12:00:00,123456Z"),
    *("2026-03-01T12:00:00.123456", "20260301T120000.1234567890Z", "2026-W09-7T12:00:00.123456Z"),
    *("2026-03-01T24:00:00.000000Z", "2026-02-30T12:00:00.123456Z", "0001-01-01T00:00:00.000000Z"),
    *("1969-12-31T23:59:59.999999Z", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"),
    *("2026-03-01T12:00:00.12345ZZ", "", "now", None, 1772366400),
]
NUMBERS: list[Any] = [
    0,
    300,
    2**31 - 1,
    2**31,
    -1,
    True,
    12.0,
    1e300,
    10**400,
    "12",
    None,
    float("nan"),
]
TEXTS: list[Any] = [
    "Map",
    "",
    "x" * 64,
    "x" * 65,
    "Карта",
    "😀" * 64,
    "\x00",
    "\ud83d",
    "\x7f",
    'a"b',
    None,
    1,
]
SNAPSHOTS: list[Any] = [
    *(None, {}, {"Rooms": [1, 2], "Город": "é"}, {"a": {"a": 1}}, {"a": 1e-300}, {"a": 2**64}),
    *({"a": "\x00"}, {"a": 'b"'}, [], "text", 1, True, [[[]]] * 20, {"a": [[[[[]]]]] * 8}),
]
KINDS: dict[str, list[Any]] = {
    **dict.fromkeys(
        ["SessionId", "AnonymousId", "UserId", "PropertyObjectViewId", "PropertyObjectId"], IDS
    ),
    **dict.fromkeys(["CreatedAt", "ViewedAt", "LastActivityAt"], TIMES),
    "DurationSeconds": NUMBERS,
    "ViewSource": TEXTS,
    "FilterSnapshot": SNAPSHOTS,
}
RAW = [
    *(b"12.0", b"1e2", b"-0", b"012", b"+1", b"NaN", b"nul", b"tru", b"'a'", b'"\x00"', b'"\x1f"'),
    *(
        b'{"a":1,"a":2}',
        b'{"a":"\xff"}',
        b'{"a":01}',
        b'{"a":1,}',
        b"{" * 40,
        b'"\\u0000"',
        b" null",
    ),
    *(b'{"a":' * 31 + b"1" + b"}" * 31, b'{"a":' * 32 + b"1" + b"}" * 32, b'"\xed\xa0\xbd"'),
]


@st.composite
def payloads(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """A payload with a few things done to it: values, fields, spelling, bytes."""
    fields = [(json.dumps(name), json.dumps(value)) for name, value in whole.items()]
    raw: dict[int, bytes] = {}
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(fields) - 1))
        name = json.loads(fields[place][0])
        match draw(st.integers(0, 6)):
            case 0 | 1:
                value = draw(st.sampled_from(KINDS.get(name, TEXTS)))
                fields[place] = (
                    fields[place][0],
                    json.dumps(value, ensure_ascii=draw(st.booleans())),
                )
            case 2:
                other = draw(st.sampled_from(fields))[1]
                copy = draw(st.sampled_from([name, name.lower(), f"{name[:-1]}\\u0064"]))
                fields.append(
                    (f'"{copy}"', draw(st.sampled_from([fields[place][1], other, "null"])))
                )
            case 3:
                fields[place] = json.dumps(draw(st.sampled_from([name.upper(), "X"]))), "null"
            case 4 if len(fields) > 1:
                del fields[place]
                raw = {}
            case 5:
                raw[place] = draw(st.sampled_from(RAW))
            case _:
                fields.append((json.dumps(draw(st.text(max_size=3))), '"x"'))
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), ("\n,", " :\t")]))
    value = comma.join(f"{name}{colon}\0{place}\0" for place, (name, _) in enumerate(fields))
    document = f"{{{value}}}".encode("utf-8", "surrogatepass")
    for place, (_, text) in enumerate(fields):
        spelt = raw.get(place, text.encode("utf-8", "surrogatepass"))
        document = document.replace(b"\0%d\0" % place, spelt)
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(document) - 1))
        some = draw(st.binary(max_size=2) | st.sampled_from([b'"', b"\\", b"{", b"}", b",", b" "]))
        document = document[:place] + some + document[place + draw(st.integers(0, 2)) :]
    return document


def decode_session_fully(record: Record) -> SessionFact:
    return make_session_fact(str(record.message_id), contracts.SESSION_ENDED.decode_fully(record))


def decode_session_fast(record: Record) -> SessionFact | None:
    event = contracts.SESSION_ENDED.decode_fast(record.value)
    return None if event is None else make_session_fact(str(record.message_id), event)


def decode_view_fully(record: Record) -> ViewFact:
    return make_view_fact(str(record.message_id), contracts.VIEW_ENDED.decode_fully(record))


def decode_view_fast(record: Record) -> ViewFact | None:
    event = contracts.VIEW_ENDED.decode_fast(record.value)
    return None if event is None else make_view_fact(str(record.message_id), event)


def verdict(decode: Callable[[Record], Any], value: bytes) -> Any:
    """What a decoder makes of a value: a row, or the reason against it."""
    try:
        return decode(record(TOPIC, value, message_id=UUID(ID), created_at=CREATED_AT))
    except Poison as exc:
        return exc.reason


@settings(deadline=None, max_examples=1000)
@given(payloads(ended_session(UserId=ID)))
@example(b'{"SessionId":1,"SessionId":"%b"}' % ID.encode())
def test_session_that_is_decoded_fast_is_the_full_decoders(value: bytes) -> None:
    full = verdict(decode_session_fully, value)
    assert verdict(decode_session, value) == full
    assert verdict(decode_session_fast, value) in (None, full)


@settings(deadline=None, max_examples=1000)
@given(payloads(ended_view(UserId=ID, FilterSnapshot={"Rooms": [1, 2], "a": "b"})))
def test_view_that_is_decoded_fast_is_the_full_decoders(value: bytes) -> None:
    full = verdict(decode_view_fully, value)
    assert verdict(decode_view, value) == full
    assert verdict(decode_view_fast, value) in (None, full)


@pytest.mark.parametrize("user", [None, ID])
@pytest.mark.parametrize("snapshot", [None, {"Rooms": [1, 2], "Город": {"a": "é"}}])
def test_what_we_write_ourselves_is_decoded_fast(user: Any, snapshot: Any) -> None:
    both = ended_session(UserId=user), ended_view(UserId=user, FilterSnapshot=snapshot)
    for ascii_only in (False, True) if snapshot is None else (False,):
        sessions, views = (json.dumps(each, ensure_ascii=ascii_only).encode() for each in both)
        assert decode_session_fast(record(TOPIC, sessions)) is not None
        assert decode_view_fast(record(TOPIC, views)) is not None


@pytest.mark.parametrize("name", ["SessionId", "UserId", "CreatedAt", "DurationSeconds"])
@pytest.mark.parametrize("second", ["null", f'"{ID}"', "300", '"2026-03-01T12:00:00.123456Z"'])
def test_field_that_comes_twice_is_never_decoded_fast(name: str, second: str) -> None:
    for user in (None, ID):
        whole = json.dumps(ended_session(UserId=user))
        for value in (f'{whole[:-1]},"{name}":{second}}}', f'{{"{name}":{second},{whole[1:]}'):
            assert decode_session_fast(record(TOPIC, value.encode())) is None
            assert verdict(decode_session, value.encode()) == "value-not-json"


@pytest.mark.parametrize(
    ("whole", "decode", "decode_fully"),
    [
        (ended_session(UserId=ID), decode_session, decode_session_fully),
        (ended_view(UserId=ID, FilterSnapshot={"a": 1}), decode_view, decode_view_fully),
    ],
)
def test_any_single_oddity_is_judged_as_by_the_full_decoder(
    whole: dict[str, Any], decode: Callable[[Record], Any], decode_fully: Callable[[Record], Any]
) -> None:
    for name in whole:
        values = [json.dumps(value).encode() for value in KINDS[name]]
        values += [
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
            for value in KINDS[name]
        ]
        rest = json.dumps({**whole, name: "@"}, ensure_ascii=False).encode()
        for value in (*values, *RAW, b"", b'"x","X":1', b'"x","%b":null' % name.encode()):
            document = rest.replace(b'"@"', value)
            assert verdict(decode, document) == verdict(decode_fully, document), document
