"""A user's own sessions (design, section 5): GET me/sessions, page by page."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client

from pinactivity.core.times import iso_utc
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from sessions.services import link_session
from tests.api import API, HEARTBEAT, OWN_SESSIONS, assert_invalid, assert_unavailable, problem
from tests.bad_input import BAD_CURSORS, BAD_LIMITS, ROW, encode_cursor
from tests.concurrency import COMMITTED
from tests.conftest import USER_AGENT
from tests.factories import MINUTE, make_session, silent_session
from tests.outages import postgres_away
from tests.plans import index_scans
from tests.tokens import SECRET, bearer, development_token

pytestmark = pytest.mark.django_db

A, B = UUID(int=0xA), UUID(int=0xB)


@pytest.fixture(autouse=True)
def _development_secret(settings: Any) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET


def get(user_id: UUID = A, **query: Any) -> Any:
    return Client().get(OWN_SESSIONS, query, headers=bearer(development_token(user_id)))


def page(**query: Any) -> tuple[list[str], str | None]:
    """Return the ids of a page, and the cursor of the next."""
    response = get(**query)
    assert response.status_code == 200
    body = response.json()
    return [item["SessionId"] for item in body["Items"]], body["NextCursor"]


def pages(limit: int) -> list[list[str]]:
    """Read all pages, following the cursors."""
    ids, cursor = page(Limit=limit)
    found = [ids]
    while cursor is not None:
        ids, cursor = page(Limit=limit, Cursor=cursor)
        found.append(ids)
    return found


def make_own(count: int, *, created_at: datetime | None = None, **fields: Any) -> list[str]:
    """Make sessions of A, each on its own device; return their ids, the newest first."""
    if created_at is not None:
        fields |= {"created_at": created_at, "last_activity_at": created_at + MINUTE}
    made = [make_session(user_id=A, **fields) for _ in range(count)]
    made.sort(key=lambda row: (row.created_at, row.id), reverse=True)
    return [str(row.id) for row in made]


# -- the content of an answer --------------------------------------------------------------


def test_active_session_is_shown_exactly_so() -> None:
    session = make_session(user_id=A, browser="Firefox 120", os="Linux", device_type="Desktop")

    response = get()

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {
        "Items": [
            {
                "SessionId": str(session.id),
                "Status": "Active",
                "CreatedAt": iso_utc(session.created_at),
                "LastActivityAt": iso_utc(session.last_activity_at),
                "EndedAt": None,
                "DurationSeconds": None,
                "Browser": "Firefox 120",
                "Os": "Linux",
                "DeviceType": "Desktop",
            }
        ],
        "NextCursor": None,
    }


def test_closed_session_is_shown_with_its_end_and_duration_rounded_down() -> None:
    session = silent_session(minutes=13, user_id=A, lasted=timedelta(seconds=90, milliseconds=900))
    ActivityCloser(ActivityCloserOptions()).run()
    closed = Session.objects.get(id=session.id)
    assert closed.ended_at is not None

    (item,) = get().json()["Items"]

    assert item["Status"] == "Inactive"
    assert item["DurationSeconds"] == 90
    assert item["EndedAt"] == iso_utc(closed.ended_at)
    assert item["LastActivityAt"] == iso_utc(session.last_activity_at)


def test_times_are_utc_with_six_digits_even_on_a_whole_second() -> None:
    make_own(1, created_at=datetime(2026, 3, 1, 12, tzinfo=UTC))
    (item,) = get().json()["Items"]
    assert item["CreatedAt"] == "2026-03-01T12:00:00.000000Z"


def test_no_address_nor_user_agent_nor_device_id_is_shown() -> None:
    make_session(user_id=A, ip_address="203.0.113.77", user_agent="UnmistakableAgent/1.0")
    response = get()
    text = response.content.decode() + str(response.headers)
    anonymous_id = str(Session.objects.get().anonymous_id)
    for secret in ("203.0.113.77", "UnmistakableAgent", anonymous_id, str(A)):
        assert secret not in text


def test_session_whose_device_was_blanked_is_shown() -> None:
    session = silent_session(minutes=13, user_id=A)
    ActivityCloser(ActivityCloserOptions()).run()
    Session.objects.filter(id=session.id).update(
        ip_address=None, user_agent="", browser="", os="", device_type="Unknown"
    )
    (item,) = get().json()["Items"]
    assert (item["Browser"], item["Os"], item["DeviceType"]) == ("", "", "Unknown")


def test_user_without_sessions_has_an_empty_page() -> None:
    make_session(user_id=B)
    make_session()
    assert get().json() == {"Items": [], "NextCursor": None}


# -- whose ---------------------------------------------------------------------------------


def test_only_own_sessions_are_shown_of_all_devices() -> None:
    own = make_own(2)
    shared = make_session(user_id=B)
    make_session(user_id=B)
    make_session()
    # Another user now signs in on the device: each user sees their own part.
    switched = link_session(anonymous_id=shared.anonymous_id, user_id=A).session_id

    assert page()[0] == [str(switched), *own]
    assert str(shared.id) in [item["SessionId"] for item in get(B).json()["Items"]]
    assert str(switched) not in get(B).content.decode()


def test_what_a_guest_did_before_the_sign_in_is_in_the_users_history_ac7() -> None:
    guest = silent_session(minutes=3)
    assert page() == ([], None)

    link_session(anonymous_id=guest.anonymous_id, user_id=A)

    (item,) = get().json()["Items"]
    assert item["SessionId"] == str(guest.id)
    assert item["CreatedAt"] == iso_utc(guest.created_at)


def test_guests_own_earlier_session_on_the_device_stays_nobodys() -> None:
    """Only the session that is linked becomes the user's, not the device's past."""
    earlier = silent_session(minutes=13)
    ActivityCloser(ActivityCloserOptions()).run()
    session = make_session(anonymous_id=earlier.anonymous_id)
    link_session(anonymous_id=earlier.anonymous_id, user_id=A)
    assert page()[0] == [str(session.id)]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer a.b.c"}])
def test_call_without_a_valid_token_is_unauthorized_whatever_it_asks(
    headers: dict[str, str], count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = Client().get(OWN_SESSIONS, {"Limit": "x", "Cursor": "x"}, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHORIZED")
    assert len(statements) == 0


def test_parameters_of_other_names_change_nothing() -> None:
    make_session(user_id=B)
    own = make_own(1)
    ids, _ = page(UserId=str(B), AnonymousId=str(B), limit="0", cursor="x", format="xml")
    assert ids == own


# -- pages ---------------------------------------------------------------------------------


def test_newest_comes_first() -> None:
    start = statement_time() - timedelta(days=3)
    made = {day: make_own(1, created_at=start + timedelta(days=day))[0] for day in (1, 0, 2)}
    assert page()[0] == [made[2], made[1], made[0]]


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 200])
def test_pages_show_every_session_once_even_with_equal_creation_times(limit: int) -> None:
    start = statement_time() - timedelta(hours=1)
    own = make_own(1, created_at=start + MINUTE) + make_own(4, created_at=start)
    own += make_own(2, created_at=start - timedelta(microseconds=1))

    found = pages(limit)

    assert [session_id for ids in found for session_id in ids] == own
    assert all(len(ids) == limit for ids in found[:-1])
    assert 1 <= len(found[-1]) <= limit


def test_session_that_begins_between_pages_moves_no_page() -> None:
    own = make_own(4, created_at=statement_time() - timedelta(hours=1))
    first, cursor = page(Limit=2)
    make_own(3)
    rest, end = page(Limit=2, Cursor=cursor)
    assert (first + rest, end) == (own, None)


def test_cursor_stays_good_when_its_session_is_gone() -> None:
    own = make_own(4, created_at=statement_time() - timedelta(hours=1))
    first, cursor = page(Limit=2)
    Session.objects.filter(id__in=first).delete()
    assert page(Limit=2, Cursor=cursor) == (own[2:], None)


def test_cursor_of_another_user_shows_nothing_of_his() -> None:
    make_own(3, created_at=statement_time() - timedelta(hours=1))
    _, cursor = page(Limit=1)
    theirs = make_session(user_id=B, created_at=statement_time() - timedelta(days=1))
    body = get(B, Cursor=cursor).json()
    assert [item["SessionId"] for item in body["Items"]] == [str(theirs.id)]


def test_a_page_has_50_sessions_by_default_and_200_at_most() -> None:
    make_own(201)
    assert len(page()[0]) == 50
    ids, cursor = page(Limit=200)
    assert len(ids) == 200
    assert len(page(Limit=200, Cursor=cursor)[0]) == 1
    assert [len(ids) for ids in pages(67)] == [67, 67, 67]


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [*BAD_LIMITS, "1" * 400])
def test_limit_out_of_1_to_200_is_named_before_any_sql(
    limit: str, count_statements: Callable[[], Any]
) -> None:
    with count_statements() as statements:
        response = get(Limit=limit)
    assert_invalid(response, "Limit")
    assert len(statements) == 0


@pytest.mark.parametrize("cursor", BAD_CURSORS.values(), ids=BAD_CURSORS.keys())
def test_cursor_that_we_did_not_write_is_named_before_any_sql(
    cursor: str, count_statements: Callable[[], Any]
) -> None:
    make_own(1)
    with count_statements() as statements:
        response = get(Cursor=cursor)
    assert_invalid(response, "Cursor")
    assert len(statements) == 0


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z"])
def test_cursor_at_the_end_of_time_is_served(moment: str) -> None:
    own = make_own(1)
    ids, _ = page(Cursor=encode_cursor([moment, ROW]))
    assert ids == (own if moment.startswith("9") else [])


def test_broken_query_strings_never_make_the_service_fail() -> None:
    for query in ("Cursor=%ff", "Cursor", "Limit=%00", "&&=&", "Cursor=a&Cursor=b", "Limit[]=1"):
        response = Client().get(f"{OWN_SESSIONS}?{query}", headers=bearer(development_token(A)))
        assert response.status_code in {200, 400}


LISTS = [OWN_SESSIONS, f"{API}/me/property-object-views"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_wrong_method_is_refused_with_the_right_one(method: str, path: str) -> None:
    response = Client().generic(method, path)
    assert (response.status_code, problem(response)["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert "GET" in response.headers["Allow"].split(", ")


@COMMITTED
@pytest.mark.parametrize("path", LISTS)
def test_own_lists_answer_503_while_postgresql_is_away(path: str) -> None:
    def ask() -> Any:
        return Client().get(path, headers=bearer(development_token(A)))

    with postgres_away():
        away = ask()
    assert_unavailable(away)
    assert ask().status_code == 200


# -- what it costs -------------------------------------------------------------------------


def test_page_costs_one_statement_however_many_sessions_there_are(
    count_statements: Callable[[], Any],
) -> None:
    make_own(60)
    for query in ({"Limit": 1}, {"Limit": 200}, {"Cursor": page(Limit=10)[1]}):
        with count_statements() as statements:
            assert get(**query).status_code == 200
        assert len(statements) == 1


@COMMITTED
def test_page_is_read_by_the_index_of_users_among_many_rows(
    count_statements: Callable[[], Any],
) -> None:
    make_many(rows=20_000, users=200)
    with connection.cursor() as cursor:
        cursor.execute("SELECT user_id FROM sessions WHERE user_id IS NOT NULL LIMIT 1")
        (user_id,) = cursor.fetchone()
        cursor.execute("ANALYZE sessions")
    first = get(user_id, Limit=10).json()["NextCursor"]

    for query in ({}, {"Limit": 10, "Cursor": first}):
        with count_statements() as statements:
            assert get(user_id, **query).json()["Items"]
        (statement,) = [row["sql"] for row in statements]
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}")
            (plan,) = cursor.fetchone()
        assert index_scans(plan[0]["Plan"]) == ["ix_sessions_user"]


def make_many(*, rows: int, users: int) -> None:
    """Insert closed sessions, half of them of guests."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO sessions (id, anonymous_id, user_id, linked_at, status, created_at,
                                  last_activity_at, ended_at, duration, close_reason, user_agent,
                                  browser, os, device_type)
            SELECT gen_random_uuid(), gen_random_uuid(), owner,
                   CASE WHEN owner IS NOT NULL THEN moment END,
                   'Inactive', moment, moment + interval '1 min', moment + interval '13 min',
                   interval '1 min', 'Inactivity', 'test', '', '', 'Unknown'
            FROM (SELECT statement_timestamp() - n * interval '1 min' AS moment,
                         CASE WHEN n %% 2 = 0
                              THEN lpad(to_hex(n %% %s), 32, 'a')::uuid END AS owner
                  FROM generate_series(1, %s) AS n) AS made
            """,
            [users, rows],
        )


def test_heartbeat_shows_in_the_list() -> None:
    session = silent_session(minutes=3, user_id=A)
    Client().post(
        HEARTBEAT,
        {"SessionId": str(session.id)},
        content_type="application/json",
        headers={"User-Agent": USER_AGENT, "X-Anonymous-Id": str(session.anonymous_id)},
    )
    (item,) = get().json()["Items"]
    assert item["LastActivityAt"] > iso_utc(session.last_activity_at)
