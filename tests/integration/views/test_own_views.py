"""A user's own views (design, sections 5 and 6): GET me/property-object-views, page by page."""

import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import link_session, start_session
from tests.api import OWN_VIEWS, assert_invalid, problem
from tests.bad_input import BAD_CURSORS, BAD_LIMITS
from tests.concurrency import COMMITTED
from tests.factories import DEVICE, MINUTE, make_session, make_view, silent_session
from tests.plans import index_scans
from tests.tokens import SECRET, bearer, development_token
from views.events import PropertyObjectViewEnded
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db

A, B = UUID(int=0xA), UUID(int=0xB)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _development_secret(settings: Any) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET


def get(user_id: UUID = A, **query: Any) -> Any:
    return Client().get(OWN_VIEWS, query, headers=bearer(development_token(user_id)))


def items(user_id: UUID = A, **query: Any) -> list[dict[str, Any]]:
    """Return the only page."""
    response = get(user_id, **query)
    assert response.status_code == 200, response.content
    body = response.json()
    assert body["NextCursor"] is None
    found: list[dict[str, Any]] = body["Items"]
    return found


def ids(user_id: UUID = A, **query: Any) -> list[str]:
    return [item["PropertyObjectViewId"] for item in items(user_id, **query)]


def pages(user_id: UUID = A, **query: Any) -> Iterator[list[str]]:
    """Read all pages, following the cursors."""
    cursor: dict[str, str] = {}
    while True:
        body = get(user_id, **query, **cursor).json()
        yield [item["PropertyObjectViewId"] for item in body["Items"]]
        if body["NextCursor"] is None:
            return
        cursor = {"Cursor": body["NextCursor"]}


def open_at(moment: datetime, *, session: Session | None = None, **fields: Any) -> str:
    """Make a view of A that was opened at a moment, in a session of its own unless given."""
    session = session or make_session(user_id=A, created_at=moment, last_activity_at=moment)
    view = make_view(session=session, created_at=moment, last_activity_at=moment, **fields)
    return str(view.id)


# -- the content of an answer --------------------------------------------------------------


def test_active_view_is_shown_exactly_so() -> None:
    view = make_view(session=make_session(user_id=A), filter_snapshot={"Rooms": [1, 2]})

    response = get()

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {
        "Items": [
            {
                "PropertyObjectViewId": str(view.id),
                "PropertyObjectId": str(view.property_object_id),
                "SessionId": str(view.session_id),
                "AnonymousId": str(view.session.anonymous_id),
                "UserId": str(A),
                "ViewSource": "Catalog",
                "Status": "Active",
                "ViewedAt": iso_utc(view.created_at),
                "LastActivityAt": iso_utc(view.last_activity_at),
                "DurationSeconds": None,
                "FilterSnapshot": {"Rooms": [1, 2]},
            }
        ],
        "NextCursor": None,
    }


def test_closed_view_is_shown_as_in_its_event_and_with_its_status() -> None:
    session = silent_session(minutes=13, user_id=A)
    make_view(session=session, lasted=timedelta(seconds=90, milliseconds=900))
    ActivityCloser(ActivityCloserOptions()).run()
    event = OutboxMessage.objects.get(topic=PropertyObjectViewEnded.TOPIC)

    (item,) = items()

    assert item == json.loads(event.payload) | {"Status": "Inactive"}
    assert item["DurationSeconds"] == 90


def test_no_address_nor_user_agent_is_shown() -> None:
    session = make_session(user_id=A, ip_address="203.0.113.77", user_agent="UnmistakableAgent/1")
    make_view(session=session)
    text = get().content.decode()
    for secret in ("203.0.113.77", "UnmistakableAgent"):
        assert secret not in text


def test_user_without_views_has_an_empty_page() -> None:
    make_view(session=make_session(user_id=B))
    make_session(user_id=A)
    assert get().json() == {"Items": [], "NextCursor": None}


# -- whose: the reading rule ---------------------------------------------------------------


def test_what_a_guest_viewed_before_the_sign_in_is_in_the_users_history_ac7() -> None:
    guest = silent_session(minutes=3)
    ended = make_view(session=guest, silent=14 * MINUTE)
    ActivityCloser(ActivityCloserOptions()).run()
    live = make_view(session=guest)
    before = list(PropertyObjectView.objects.order_by("id").values())
    assert items() == []

    link_session(anonymous_id=guest.anonymous_id, user_id=A)

    assert ids() == [str(live.id), str(ended.id)]
    assert {item["UserId"] for item in items()} == {str(A)}
    # The rows are unchanged: the views still have no user.
    assert list(PropertyObjectView.objects.order_by("id").values()) == before
    assert {row["user_id"] for row in before} == {None}


def test_views_of_a_guest_who_never_signed_in_are_nobodys_ac7() -> None:
    """Only the session that is linked becomes the user's, not the device's past."""
    earlier = silent_session(minutes=13, views=1)
    ActivityCloser(ActivityCloserOptions()).run()
    session = make_session(anonymous_id=earlier.anonymous_id)
    view = make_view(session=session)
    link_session(anonymous_id=earlier.anonymous_id, user_id=A)
    assert ids() == [str(view.id)]


def test_switch_leaves_each_user_their_own_views_ac7() -> None:
    first = make_session()
    as_guest = make_view(session=first)
    link_session(anonymous_id=first.anonymous_id, user_id=A)
    link_session(anonymous_id=first.anonymous_id, user_id=B)
    second = Session.objects.get(status="Active")
    of_b = make_view(session=second)

    assert ids(A) == [str(as_guest.id)]
    assert ids(B) == [str(of_b.id)]


def test_views_of_a_session_born_linked_are_the_users() -> None:
    started = start_session(anonymous_id=None, user_id=A, device=DEVICE)
    view = make_view(session=Session.objects.get(id=started.session.session_id))
    assert ids() == [str(view.id)]


def test_views_own_user_does_not_decide_ac7() -> None:
    make_view(session=make_session(user_id=B), user_id=A)
    own = make_view(session=make_session(user_id=A), user_id=B)
    assert ids() == [str(own.id)]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer a.b.c"}])
def test_call_without_a_valid_token_is_unauthorized_whatever_it_asks(
    headers: dict[str, str], count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = Client().get(OWN_VIEWS, {"Limit": "x", "From": "x"}, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHORIZED")
    assert len(statements) == 0


# -- pages ---------------------------------------------------------------------------------


def make_history(chance: random.Random) -> list[PropertyObjectView]:
    """Make overlapping sessions of all lengths, some empty, many views at equal times."""
    objects = [UUID(int=number) for number in range(1, 4)]
    made = []
    for number in range(14):
        begins = NOON + chance.randrange(60) * MINUTE
        lasted = chance.choice([0, 1, 10, 60]) * MINUTE
        session = make_session(
            user_id=B if number % 7 == 6 else A,
            created_at=begins,
            last_activity_at=begins + lasted,
        )
        for _ in range(chance.choice([0, 1, 3, 9])):
            moment = begins + chance.randrange(lasted // MINUTE + 1) * MINUTE
            made.append(
                make_view(
                    id=new_id(),
                    session=session,
                    created_at=moment,
                    last_activity_at=moment,
                    property_object_id=chance.choice(objects),
                    # An object can then be Active in a session more than once.
                    status="Inactive",
                    ended_at=moment,
                    duration=timedelta(0),
                    close_reason="Inactivity",
                )
            )
    return made


@pytest.mark.parametrize("seed", range(8))
def test_pages_of_any_size_and_filter_show_every_view_once_the_newest_first(seed: int) -> None:
    chance = random.Random(seed)
    history = make_history(chance)
    since = NOON + chance.randrange(60) * MINUTE
    until = since + chance.randrange(1, 60) * MINUTE
    object_id = UUID(int=1)
    filters: list[tuple[dict[str, Any], Callable[[PropertyObjectView], bool]]] = [
        ({}, lambda view: view is not None),
        ({"From": iso_utc(since)}, lambda view: view.created_at >= since),
        ({"To": iso_utc(until)}, lambda view: view.created_at < until),
        (
            {"From": iso_utc(since), "To": iso_utc(until), "PropertyObjectId": str(object_id)},
            lambda view: since <= view.created_at < until and view.property_object_id == object_id,
        ),
        ({"PropertyObjectId": str(object_id)}, lambda view: view.property_object_id == object_id),
    ]
    for query, matches in filters:
        own = [view for view in history if view.session.user_id == A and matches(view)]
        own.sort(key=lambda view: (view.created_at, view.id), reverse=True)
        for limit in (1, 2, 5, 200):
            found = list(pages(**query, Limit=limit))
            assert [view_id for page in found for view_id in page] == [str(v.id) for v in own]
            assert all(len(page) == limit for page in found[:-1])


def test_old_session_that_still_lives_gives_the_newest_view() -> None:
    """One device has a tab that is open for a month, another one many short visits."""
    old = make_session(user_id=A, created_at=NOON - timedelta(days=30), last_activity_at=NOON)
    newest = open_at(NOON, session=old)
    short = [open_at(NOON - number * MINUTE) for number in range(1, 6)]
    assert list(pages(Limit=2)) == [[newest, short[0]], short[1:3], short[3:5]]


def test_view_that_is_opened_between_pages_moves_no_page() -> None:
    own = [open_at(NOON - number * MINUTE) for number in range(4)]
    first = get(Limit=2).json()
    open_at(NOON + MINUTE)
    assert [item["PropertyObjectViewId"] for item in first["Items"]] == own[:2]
    assert ids(Limit=2, Cursor=first["NextCursor"]) == own[2:]


def test_cursor_of_another_user_shows_nothing_of_his() -> None:
    open_at(NOON)
    open_at(NOON - MINUTE)
    cursor = get(Limit=1).json()["NextCursor"]
    session = make_session(user_id=B, created_at=NOON - MINUTE, last_activity_at=NOON)
    theirs = open_at(NOON - MINUTE, session=session, id=UUID(int=1))
    assert ids(B, Cursor=cursor) == [theirs]


# -- filters -------------------------------------------------------------------------------


@pytest.mark.parametrize("spell", [str, str.upper, "{{{}}}".format, "urn:uuid:{}".format])
def test_only_views_of_the_object_are_shown(spell: Callable[[str], str]) -> None:
    session = make_session(user_id=A)
    wanted = make_view(session=session)
    make_view(session=session)
    make_view(session=make_session(user_id=B), property_object_id=wanted.property_object_id)
    assert ids(PropertyObjectId=spell(str(wanted.property_object_id))) == [str(wanted.id)]
    assert ids(PropertyObjectId=str(new_id())) == []


def test_period_is_half_open_by_the_opening_c23() -> None:
    inside = open_at(NOON)
    open_at(NOON - timedelta(microseconds=1))
    open_at(NOON + MINUTE)
    assert ids(From=iso_utc(NOON), To=iso_utc(NOON + MINUTE)) == [inside]


def test_dates_are_utc_midnights_c23() -> None:
    midnight = datetime(2026, 3, 29, tzinfo=UTC)  # clocks change in Europe that night
    last = open_at(midnight + timedelta(days=1) - timedelta(microseconds=1))
    first = open_at(midnight)
    open_at(midnight - timedelta(microseconds=1))
    open_at(midnight + timedelta(days=1))
    assert ids(From="2026-03-29", To="2026-03-30") == [last, first]


@pytest.mark.parametrize(
    "moment",
    ["2026-03-01T12:00:00Z", "2026-03-01T15:00:00+03:00", "2026-03-01T12:00:00.0000000Z"],
)
def test_time_with_any_offset_is_the_same_instant(moment: str) -> None:
    inside = open_at(NOON)
    open_at(NOON - MINUTE)
    assert ids(From=moment) == [inside]


def test_either_end_of_the_period_may_be_left_open() -> None:
    late, early = open_at(NOON), open_at(NOON - MINUTE)
    assert ids(From=iso_utc(NOON)) == [late]
    assert ids(To=iso_utc(NOON)) == [early]
    assert ids(From="0001-01-01", To="9999-12-31T23:59:59.999999Z") == [late, early]


BAD_MOMENTS = {
    "empty": "",
    "a blank": " ",
    "text": "yesterday",
    "no offset": "2026-03-01T12:00:00",
    "an offset whose plus became a blank": "2026-03-01T12:00:00 03:00",
    "seconds since 1970": "1772366400",
    "no such day": "2026-02-30",
    "no such hour": "2026-03-01T25:00:00Z",
    "a month": "2026-03",
    "a date without dashes": "20260301",
    "other digits": "٣-03-01",
    "a line break": "2026-03-01\n",
    "before year 1": "0001-01-01T00:00:00+14:00",
    "after year 9999": "9999-12-31T23:59:59-14:00",
    "infinity": "infinity",
    "NUL": "2026-03-01\x00",
    "SQL": "'; DROP TABLE sessions; --",
    "100 KB": "2" * 100_000,
}


@pytest.mark.parametrize("name", ["From", "To"])
@pytest.mark.parametrize("moment", BAD_MOMENTS.values(), ids=BAD_MOMENTS.keys())
def test_bound_that_is_no_date_nor_time_is_named_before_any_sql(
    name: str, moment: str, count_statements: Callable[[], Any]
) -> None:
    query: dict[str, Any] = {name: moment}
    with count_statements() as statements:
        response = get(**query)
    assert_invalid(response, name)
    assert len(statements) == 0


def test_both_bounds_are_named_when_neither_can_be_read() -> None:
    assert_invalid(get(From="x", To="y"), "From", "To")


@pytest.mark.parametrize("until", ["2026-03-01", "2026-02-28", "2026-03-01T02:59:59+03:00"])
def test_period_that_is_empty_or_backwards_is_refused(until: str) -> None:
    response = get(From="2026-03-01", To=until)
    assert_invalid(response, "From")
    assert problem(response)["errors"] == {"From": ["Must be before To."]}


@pytest.mark.parametrize("object_id", ["", "42", "undefined", str(UUID(int=0)), "\x00", "{}"])
def test_object_that_is_no_id_is_named_before_any_sql(
    object_id: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = get(PropertyObjectId=object_id)
    assert_invalid(response, "PropertyObjectId")
    assert len(statements) == 0


@pytest.mark.parametrize("limit", BAD_LIMITS)
def test_limit_out_of_1_to_200_is_named(limit: str) -> None:
    assert_invalid(get(Limit=limit), "Limit")


@pytest.mark.parametrize("cursor", BAD_CURSORS.values(), ids=BAD_CURSORS.keys())
def test_cursor_that_we_did_not_write_is_named(cursor: str) -> None:
    assert_invalid(get(Cursor=cursor), "Cursor")


# -- what it costs -------------------------------------------------------------------------


def test_page_costs_two_statements_however_many_views_and_sessions_there_are(
    count_statements: Callable[[], Any],
) -> None:
    for number in range(30):
        session = make_session(user_id=A, created_at=NOON - number * MINUTE)
        for _ in range(2):
            make_view(session=session)
    cursor = get(Limit=10).json()["NextCursor"]
    for query in ({"Limit": 1}, {"Limit": 200}, {"Cursor": cursor}, {"From": "2026-01-01"}):
        with count_statements() as statements:
            assert get(**query).json()["Items"]
        assert len(statements) == 2


@COMMITTED
def test_page_is_read_by_indexes_and_in_proportion_to_itself_among_many_rows(
    count_statements: Callable[[], Any],
) -> None:
    """A has 24,000 of 84,000 views; a page reads about as many rows as it has."""
    make_many_views()
    start = statement_time()

    def hours_ago(hours: int) -> str:
        return iso_utc(start - timedelta(hours=hours))

    deep = get(Limit=10, To=hours_ago(300)).json()["NextCursor"]
    object_id = get(Limit=1).json()["Items"][0]["PropertyObjectId"]
    # The first page reads only the sessions with views in it, each twice.
    reads: list[tuple[dict[str, Any], int]] = [
        ({}, 200),
        ({"Limit": 10, "Cursor": deep}, 50),
        ({"From": hours_ago(401), "To": hours_ago(400)}, 100),
        ({"From": hours_ago(500), "To": hours_ago(0)}, 200),
        # The scan skips views of other objects in the index.
        ({"PropertyObjectId": object_id}, 2_500),
    ]
    for query, most in reads:
        with count_statements() as statements:
            assert get(**query).json()["Items"]
        for statement in statements:
            plan = explain(statement["sql"])
            assert set(index_scans(plan)) <= {
                "ix_sessions_user",
                "ix_property_object_views_session",
                "property_object_views_pkey",
                "sessions_pkey",
            }
            assert rows_read(plan, "property_object_views") <= most


def make_many_views() -> None:
    """Insert 600 sessions of A with 40 views each, and 20,000 of others with 3 each."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO sessions (id, anonymous_id, user_id, linked_at, status, created_at,
                                  last_activity_at, ended_at, duration, close_reason, user_agent,
                                  browser, os, device_type)
            SELECT gen_random_uuid(), gen_random_uuid(), owner,
                   CASE WHEN owner IS NOT NULL THEN moment END,
                   'Inactive', moment, moment + interval '40 min', moment + interval '52 min',
                   interval '40 min', 'Inactivity', 'test', '', '', 'Unknown'
            FROM (
                SELECT statement_timestamp() - n * interval '1 hour' AS moment, %(a)s AS owner
                FROM generate_series(1, 600) AS n
                UNION ALL
                SELECT statement_timestamp() - n * interval '2 min',
                       CASE WHEN n %% 2 = 0 THEN md5((n %% 2000)::text)::uuid END
                FROM generate_series(1, 20000) AS n
            ) AS made
            """,
            {"a": A},
        )
        cursor.execute(
            """
            INSERT INTO property_object_views (id, session_id, property_object_id, view_source,
                                               status, created_at, last_activity_at, ended_at,
                                               duration, close_reason)
            SELECT gen_random_uuid(), id, md5((k %% 20)::text)::uuid, 'Map', 'Inactive',
                   created_at + k * interval '1 min', created_at + k * interval '1 min',
                   ended_at, interval '0', 'Inactivity'
            FROM sessions
            CROSS JOIN LATERAL generate_series(
                0, CASE WHEN user_id = %(a)s THEN 39 ELSE 2 END) AS k
            """,
            {"a": A},
        )
        cursor.execute("VACUUM (ANALYZE) sessions, property_object_views")


def explain(statement: str) -> dict[str, Any]:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        (plan,) = cursor.fetchone()
    root: dict[str, Any] = plan[0]["Plan"]
    return root


def rows_read(node: dict[str, Any], table: str) -> float:
    """Count the rows of a table that a plan has read, including those that it filtered out."""
    own = 0.0
    if node.get("Relation Name") == table:
        rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        own = rows * node["Actual Loops"]
    return own + sum(rows_read(part, table) for part in node.get("Plans", []))
