"""The page of dev-stats: who sees whose statistics, and that they are the API's."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlencode
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client as ClickHouse
from django.contrib.auth.models import Permission, User
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import reverse

from devstats.facts import UNKNOWN_DEVELOPER
from devstats.models import DeveloperAccess
from devstats.writer import FactWriter
from pinactivity.core.error_info import constraint
from pinactivity.core.ids import new_id
from tests.dev_stats_api import SESSIONS, read
from tests.facts import NOON, OTHER, OWNER, session_fact, store, view_fact
from tests.page_readers import LOGIN, LOGOUT, PAGE, PASSWORD, make_reader, reader
from tests.tokens import bearer, development_token

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("development_secret")]

MARCH = {"From": "2026-03-01", "Through": "2026-03-31"}


def show(client: Client, status: int = 200, /, **query: Any) -> Any:
    response = client.get(PAGE, query or MARCH)
    assert response.status_code == status, response.content
    assert response.headers["Content-Type"].startswith("text/html")
    return response


def target(response: Any) -> str:
    """Where a redirect leads."""
    assert response.status_code == 302
    location: str = response.url
    return location


def text_of(response: Any) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", response.content.decode()))


def cards(response: Any) -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", response.content.decode())
    return {unescape(title): unescape(value) for title, value in found}


def rows(response: Any, start: str) -> list[list[str]]:
    """The cells of the first table after a text."""
    _, found, rest = response.content.decode().partition(start)
    assert found, start
    body = rest.partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in body.split("</tr>")
        if row
    ]


def store_of(writer: FactWriter, developer: UUID, *seconds: int, **fields: Any) -> None:
    """Store sessions, each with a view of an object of a developer."""
    for each in seconds:
        session = session_fact(each, **fields)
        store(writer, session, view_fact(session, developer_id=developer))


# -- who gets in ---------------------------------------------------------------------------


def test_anonymous_is_sent_to_the_login_and_back_to_what_they_asked_for(
    clickhouse: ClickHouse,
) -> None:
    make_reader(OWNER)
    client = Client()
    wanted = f"{PAGE}?{urlencode(MARCH)}"
    sent = client.get(wanted)
    path, _, query = target(sent).partition("?")
    assert (path, parse_qs(query)) == (LOGIN, {"next": [wanted]})
    form = client.get(target(sent))
    assert f'name="next" value="{wanted}"' in unescape(form.content.decode())

    credentials = {"username": "builder", "password": PASSWORD}
    back = client.post(LOGIN, {**credentials, "next": wanted})
    assert target(back) == wanted
    assert client.get(target(back)).status_code == 200
    assert target(client.post(LOGIN, credentials)) == PAGE


@pytest.mark.parametrize(
    "place",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "\x00/"],
)
def test_login_leads_to_no_other_site(place: str) -> None:
    make_reader(OWNER)
    sent = Client().post(
        f"{LOGIN}?{urlencode({'next': place})}",
        {"username": "builder", "password": PASSWORD, "next": place},
    )
    assert target(sent) == PAGE


def test_wrong_password_is_named_and_lets_nobody_in() -> None:
    make_reader(OWNER)
    client = Client()
    response = client.post(LOGIN, {"username": "builder", "password": "guess"})
    assert "correct username and password" in text_of(response)
    assert client.get(PAGE).status_code == 302


def test_inactive_user_is_out_at_once_and_cannot_come_back() -> None:
    client = reader(OWNER)
    User.objects.update(is_active=False)
    assert target(client.get(PAGE)).startswith(LOGIN)
    client.post(LOGIN, {"username": "builder", "password": PASSWORD})
    assert target(client.get(PAGE)).startswith(LOGIN)


def test_logout_takes_a_post_and_ends_the_session(clickhouse: ClickHouse) -> None:
    client = reader(OWNER)
    assert client.get(LOGOUT).status_code == 405
    show(client)
    sent = client.post(LOGOUT)
    assert target(sent) == LOGIN
    assert client.get(PAGE).status_code == 302


def test_login_and_logout_of_another_site_are_refused() -> None:
    user = make_reader(OWNER)
    client = Client(enforce_csrf_checks=True)
    credentials = {"username": "builder", "password": PASSWORD}
    assert client.post(LOGIN, credentials).status_code == 403
    client.force_login(user)
    assert client.post(LOGOUT).status_code == 403


def test_token_opens_no_page_and_cookie_no_api() -> None:
    token = development_token(new_id(), developer_id=str(OWNER))
    assert Client().get(PAGE, MARCH, headers=bearer(token)).status_code == 302
    assert (
        reader(OWNER).get(SESSIONS, {"From": "2026-03-01", "To": "2026-04-01"}).status_code == 401
    )


def test_page_only_reads() -> None:
    assert reader(OWNER).post(PAGE, MARCH).status_code == 405


# -- whose statistics ----------------------------------------------------------------------


def test_each_of_two_developers_sees_their_own(writer: FactWriter) -> None:
    store_of(writer, OWNER, 60, 120, 180)
    store_of(writer, OTHER, 3_600)
    store_of(writer, UNKNOWN_DEVELOPER, 7_200)
    assert cards(show(reader(OWNER, name="one")))["Sessions"] == "3"
    others = cards(show(reader(OTHER, name="two")))
    assert (others["Sessions"], others["Average duration"]) == ("1", "1 h")


@pytest.mark.parametrize("is_superuser", [False, True])
def test_user_without_access_sees_a_message_and_no_data(
    writer: FactWriter, is_superuser: bool
) -> None:
    store_of(writer, OWNER, 60)
    make_reader(OWNER, name="another")
    client = reader()
    User.objects.filter(username="builder").update(is_superuser=is_superuser, is_staff=is_superuser)
    for query in (MARCH, {**MARCH, "DeveloperId": str(OWNER)}):
        response = show(client, 403, **query)
        assert "may not see the statistics of any developer" in text_of(response)
        assert cards(response) == {}


@pytest.mark.parametrize("name", ["DeveloperId", "developerId", "developer_id", "DEVELOPER-ID"])
@pytest.mark.parametrize("named", [[str(OTHER)], [str(OWNER), str(OTHER)], ["x"], [""]])
def test_anothers_id_gets_403_and_no_data(name: str, named: list[str], writer: FactWriter) -> None:
    store_of(writer, OTHER, 60)
    response = show(reader(OWNER), 403, **MARCH, **{name: named})
    assert cards(response) == {}
    assert "These are not the statistics" in text_of(response)


def test_user_of_several_developers_chooses_among_their_own(writer: FactWriter) -> None:
    store_of(writer, OWNER, 60)
    store_of(writer, OTHER, 120, 120)
    third = UUID(int=0xD3)
    make_reader(third, name="another")
    client = reader(OTHER, OWNER)
    first = show(client)
    options = re.findall(r"<option( selected)?>(.*?)</option>", first.content.decode())
    assert options == [(" selected", str(OWNER)), ("", str(OTHER))]
    assert cards(first)["Sessions"] == "1"
    second = show(client, **MARCH, DeveloperId=str(OTHER).upper())
    assert cards(second)["Sessions"] == "2"
    assert f"DeveloperId={OTHER}" in second.content.decode()  # what the periods lead to
    both = {**MARCH, "DeveloperId": [str(OWNER), str(OTHER)]}
    show(client, 403, **both)
    show(client, 403, **MARCH, DeveloperId=str(third))


def test_access_taken_away_is_gone_at_once(clickhouse: ClickHouse) -> None:
    client = reader(OWNER)
    show(client)
    DeveloperAccess.objects.all().delete()
    show(client, 403)


# -- statistics ----------------------------------------------------------------------------


def test_statistics_are_the_apis(writer: FactWriter) -> None:
    user = new_id()
    known = session_fact(4_000, NOON, user_id=user)
    again = session_fact(260, NOON + timedelta(days=2), user_id=user)
    guest = session_fact(40, NOON + timedelta(days=2))
    most = new_id()
    store(
        writer,
        *(known, again, guest),
        *(view_fact(each, property_object_id=most) for each in (known, again, guest)),
        view_fact(guest, duration_seconds=90),
    )
    response = show(reader(OWNER))
    total = read(SESSIONS)["Total"]
    assert total == {
        "Sessions": 3,
        "AvgDurationSeconds": 1433.3,
        "MedianDurationSeconds": 260.0,
        "P95DurationSeconds": 3626.0,
    }
    assert cards(response) == {
        "Sessions": "3",
        "Unique viewers": "2",
        "Average duration": "23 min 53 s",
        "Median duration": "4 min 20 s",
        "P95 of duration": "1 h",
    }
    assert rows(response, 'id="guests-and-users"') == [
        ["Guests", "1", "33 %", "40 s", "40 s", "40 s"],
        ["Users", "2", "67 %", "35 min 30 s", "35 min 30 s", "1 h 3 min"],
    ]
    objects = rows(response, 'id="objects"')
    assert objects[0] == [str(most), "3", "2", "3 min", "1 min", "33 %"]
    assert [row[1:] for row in objects[1:]] == [["1", "1", "1 min 30 s", "1 min 30 s", "100 %"]]
    fresh = max(
        read(path)["FreshAsOf"]
        for path in (SESSIONS, SESSIONS.replace("sessions", "property-objects"))
    )
    assert f"{fresh[:10]} {fresh[11:19]} UTC" in text_of(response)


def test_every_day_of_the_period_is_listed_without_sessions_too(writer: FactWriter) -> None:
    store_of(writer, OWNER, 60, 180, 180, start=NOON)
    store_of(writer, OWNER, 30, start=NOON + timedelta(days=3))
    response = show(reader(OWNER), From="2026-02-28", Through="2026-03-05")
    assert rows(response, 'id="sessions-by-day"') == [
        ["2026-02-28", "0"],
        ["2026-03-01", "3"],
        ["2026-03-02", "0"],
        ["2026-03-03", "0"],
        ["2026-03-04", "1"],
        ["2026-03-05", "0"],
    ]
    assert rows(response, 'id="duration-by-day"')[1:3] == [
        ["2026-03-01", "3 min", "2 min 20 s"],
        ["2026-03-02", "none", "none"],
    ]
    drawn = response.content.decode().partition('id="sessions-by-day"')[2].partition("</svg>")[0]
    assert re.findall(r'<path class="bar" d="(.*?)"><title>(.*?)</title>', drawn) == [
        ("M11 100v-100.0h8V100z", "2026-03-01: 3 sessions"),
        ("M41 100v-33.3h8V100z", "2026-03-04: 1 session"),
    ]
    assert "4 sessions on 6 days, 3 a day at most." in drawn


def test_last_day_is_included_whole_and_said_half_open_c23(writer: FactWriter) -> None:
    midnight = datetime(2026, 3, 8, tzinfo=UTC)
    for start in (midnight - timedelta(microseconds=1), midnight):
        store_of(writer, OWNER, 60, start=start)
    response = show(reader(OWNER), From="2026-03-07", Through="2026-03-07")
    assert cards(response)["Sessions"] == "1"
    assert "1 session on 1 day, 1 a day at most." in text_of(response)
    assert "from 2026-03-07 00:00 to 2026-03-08 00:00 UTC, the latter not included" in text_of(
        response
    )


def test_without_a_period_it_is_the_last_thirty_days(writer: FactWriter) -> None:
    now = datetime.now(UTC)
    today = now.date()
    store_of(writer, OWNER, 60, start=now - timedelta(days=29))
    store_of(writer, OWNER, 60, start=now - timedelta(days=30))
    client = reader(OWNER)
    page = client.get(PAGE)
    if datetime.now(UTC).date() != today:
        pytest.skip("midnight passed")
    assert cards(page)["Sessions"] == "1"
    links = re.findall(r'href="\?(.*?)">(\d+) days<', unescape(page.content.decode()))
    assert [days for _, days in links] == ["7", "30", "90"]
    counted = [cards(client.get(f"{PAGE}?{query}"))["Sessions"] for query, _ in links]
    assert counted == ["0", "1", "2"]


def test_nothing_is_shown_as_nothing(clickhouse: ClickHouse) -> None:
    response = show(reader(OWNER))
    assert cards(response) == {
        "Sessions": "0",
        "Unique viewers": "0",
        "Average duration": "none",
        "Median duration": "none",
        "P95 of duration": "none",
    }
    assert "None of your objects was viewed in this period" in text_of(response)
    assert "<svg" not in response.content.decode()


def test_view_whose_session_has_not_arrived_is_shown(writer: FactWriter) -> None:
    view = view_fact(session_fact())
    store(writer, view)
    response = show(reader(OWNER))
    assert (cards(response)["Sessions"], cards(response)["Unique viewers"]) == ("0", "1")
    assert rows(response, 'id="objects"')[0][0] == str(view.property_object_id)


@pytest.mark.parametrize("seconds", [0, 1])
def test_sessions_of_no_length_are_drawn(seconds: int, writer: FactWriter) -> None:
    store_of(writer, OWNER, seconds)
    assert cards(show(reader(OWNER)))["Median duration"] == f"{seconds} s"


def test_year_and_a_day_is_drawn_whole(writer: FactWriter) -> None:
    store_of(writer, OWNER, 60)
    response = show(reader(OWNER), From="2025-03-01", Through="2026-03-01")
    assert len(rows(response, 'id="sessions-by-day"')) == 366


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ({"From": "2026-03-01"}, "Through", "This field is required."),
        ({"From": "2026-03-01", "To": "2026-04-01"}, "Through", "This field is required."),
        ({"From": "yesterday", "Through": "2026-03-01"}, "From", "Enter a date, such as"),
        ({"From": "2026-02-30", "Through": "2026-03-01"}, "From", "Enter a date, such as"),
        ({"From": "2026-03-01\x00", "Through": "2026-03-01"}, "From", "Enter a date, such as"),
        ({"From": "2026-03-02", "Through": "2026-03-01"}, "From", "Must not be after"),
        ({"From": "2025-03-01", "Through": "2026-03-02"}, "Through", "366 days at most"),
        ({"From": "0001-01-01", "Through": "1970-01-02"}, "From", "Must be from 1970-01-01"),
        ({"From": "9999-12-31", "Through": "9999-12-31"}, "Through", "Must be from 1970-01-01"),
        ({"From": "2026-03-01' OR 1=1 --", "Through": "2026-03-31"}, "From", "Enter a date"),
    ],
)
def test_invalid_period_is_400_with_a_reason_beside_the_field(
    query: dict[str, str], field: str, message: str
) -> None:
    response = show(reader(OWNER), 400, **query)
    assert any(message in error for error in response.context["form"].errors[field])
    beside = response.content.decode().partition(f'name="{field}"')[2].partition("</div>")[0]
    assert message in beside
    assert 'aria-invalid="true"' in beside
    assert cards(response) == {}


def test_scope_is_checked_before_the_period() -> None:
    show(reader(OWNER), 403, DeveloperId=str(OTHER), From="x")


def test_clickhouse_away_is_a_plain_503_with_retry_after(settings: Any) -> None:
    settings.CLICKHOUSE_URL = "http://default:hunter2@127.0.0.1:1/"
    response = show(reader(OWNER), 503)
    assert int(response.headers["Retry-After"]) > 0
    assert "cannot be read now" in text_of(response)
    assert 'value="2026-03-31"' in response.content.decode()  # the form is there to ask again
    for secret in ("hunter2", "Traceback", "127.0.0.1"):
        assert secret not in response.content.decode()


def test_pages_load_nothing_foreign_run_nothing_and_are_kept_by_nobody(
    writer: FactWriter,
) -> None:
    store_of(writer, OWNER, 60)
    client = reader(OWNER)
    for response in (
        client.get(PAGE, MARCH),
        client.get(PAGE, {"DeveloperId": "x"}),
        Client().get(LOGIN),
    ):
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "no-store" in response.headers["Cache-Control"]
        assert response.headers["X-Frame-Options"] == "DENY"
        text = response.content.decode()
        assert not re.search(r"<script|<style|style=|\son\w+=|https?://|\"//", text)


# -- who gives access -------------------------------------------------------------------


def admin_page(name: str, *arguments: object) -> str:
    return reverse(f"admin:devstats_developeraccess_{name}", args=arguments)


def test_staff_with_the_permissions_give_and_take_access(clickhouse: ClickHouse) -> None:
    staff = User.objects.create_user("support", is_staff=True)
    client = Client()
    client.force_login(staff)
    builder = make_reader()
    fields = {"user": builder.pk, "developer_id": str(OWNER)}
    assert client.post(admin_page("add"), fields).status_code == 403
    assert client.get(admin_page("changelist")).status_code == 403
    staff.user_permissions.set(
        Permission.objects.filter(content_type__app_label="devstats")
        | Permission.objects.filter(codename="view_user")
    )
    assert client.post(admin_page("add"), fields).status_code == 302
    access = DeveloperAccess.objects.get()
    assert (access.user, access.developer_id) == (builder, OWNER)
    assert client.get(admin_page("change", access.pk)).status_code == 200

    browser = Client()
    browser.force_login(builder)
    show(browser)
    fields["developer_id"] = str(OTHER)
    assert client.post(admin_page("change", access.pk), fields).status_code == 302
    show(browser, 403, **MARCH, DeveloperId=str(OWNER))
    assert client.post(admin_page("delete", access.pk), {"post": "yes"}).status_code == 302
    show(browser, 403)


def test_admin_names_what_the_table_refuses() -> None:
    root = Client()
    root.force_login(User.objects.create_superuser("root"))
    builder = make_reader(OWNER)
    for developer, message in (
        (OWNER, "already exists"),
        (UNKNOWN_DEVELOPER, "The nil UUID stands for an unknown developer."),
        ("x", "valid UUID"),
    ):
        response = root.post(
            admin_page("add"), {"user": builder.pk, "developer_id": str(developer)}
        )
        assert response.status_code == 200
        assert message in text_of(response)


def test_access_is_found_by_username_and_by_any_spelling_of_the_id() -> None:
    root = Client()
    root.force_login(User.objects.create_superuser("root"))
    make_reader(OWNER, name="alpha")
    make_reader(OTHER, name="beta")
    for term, found in (
        ("lph", ["alpha"]),
        (str(OTHER), ["beta"]),
        (f" {OTHER.hex.upper()} ", ["beta"]),
        (str(UUID(int=0xD3)), []),
        ("", ["alpha", "beta"]),
    ):
        response = root.get(admin_page("changelist"), {"q": term})
        assert [row.user.username for row in response.context["cl"].result_list] == found


@pytest.mark.parametrize(
    ("developer", "refused_by"),
    [
        (OWNER, "ux_developer_access_user_developer"),
        (UNKNOWN_DEVELOPER, "chk_developer_access_developer_not_nil"),
    ],
)
def test_table_refuses_what_means_nothing(developer: UUID, refused_by: str) -> None:
    user = make_reader(OWNER)
    with pytest.raises(IntegrityError) as refused, transaction.atomic():
        DeveloperAccess.objects.create(user=user, developer_id=developer)
    assert constraint(refused.value) == refused_by


def test_access_goes_with_its_user() -> None:
    make_reader(OWNER).delete()
    assert not DeveloperAccess.objects.exists()
