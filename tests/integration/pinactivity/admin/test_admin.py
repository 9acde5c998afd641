"""The admin (design, section 14): it shows, it finds, it changes nothing, it hides devices.

What may be changed after all: here, and in test_close_now.py."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.urls import reverse

from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from sessions.closer import ActivityCloser
from sessions.models import ActivityCloserRun, Session
from sessions.options import ActivityCloserOptions
from tests.factories import MINUTE, make_session, make_stats, make_view, silent_session
from views.models import PropertyObjectView, PropertyObjectViewStats

pytestmark = pytest.mark.django_db

MODELS: list[type[Model]] = [
    Session,
    PropertyObjectView,
    PropertyObjectViewStats,
    OutboxMessage,
    ActivityCloserRun,
]
ADDRESS = "203.0.113.77"
USER_AGENT = "SecretBrowser/7.7"
MARKS = (ADDRESS, "SecretBrowser")


def url(model: type[Model], page: str, *arguments: object) -> str:
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
    return reverse(name, args=arguments)


def change_page(row: Model) -> str:
    return url(type(row), "change", row.pk)


def rows_of(response: Any) -> set[str]:
    """The primary keys that a changelist shows."""
    assert response.status_code == 200
    return {str(row.pk) for row in response.context["cl"].result_list}


@pytest.fixture
def superuser() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


@pytest.fixture
def support() -> Client:
    """Support staff: may view every table, and has no other permission."""
    user = User.objects.create_user("support", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label__in={model._meta.app_label for model in MODELS},
            codename__in=[f"view_{model._meta.model_name}" for model in MODELS],
        )
    )
    assert user.user_permissions.count() == len(MODELS)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def closed() -> Session:
    """A session that the job has closed, with two views, their figures, events and the run."""
    session = silent_session(
        minutes=13, views=2, user_id=new_id(), ip_address=ADDRESS, user_agent=USER_AGENT
    )
    ActivityCloser(ActivityCloserOptions()).run()
    for view in session.views.all():
        make_stats(property_object_id=view.property_object_id)
    session.refresh_from_db()
    assert session.status == "Inactive"
    return session


def every_page() -> list[str]:
    pages = [reverse("admin:index")]
    for model in MODELS:
        pages.append(url(model, "changelist"))
        for row in model._default_manager.all():
            pages += [change_page(row), url(model, "history", row.pk)]
    return pages


# -- it shows ------------------------------------------------------------------------------


def test_every_page_renders_for_a_superuser(superuser: Client, closed: Session) -> None:
    make_session(user_agent="<script>alert(1)</script>")
    pages = every_page()

    answers = {page: superuser.get(page) for page in pages}

    assert len(pages) == 1 + len(MODELS) + 2 * (2 + 2 + 2 + 3 + 1)
    assert {page for page, answer in answers.items() if answer.status_code != 200} == set()
    assert [page for page, answer in answers.items() if b"<script>alert" in answer.content] == []


def test_every_page_renders_for_support_staff(support: Client, closed: Session) -> None:
    assert {page for page in every_page() if support.get(page).status_code != 200} == set()


def test_index_lists_every_table_of_the_service(support: Client) -> None:
    content = support.get(reverse("admin:index")).content.decode()
    assert [model for model in MODELS if url(model, "changelist") not in content] == []


def test_session_page_shows_its_views_in_the_order_of_opening(superuser: Client) -> None:
    session = make_session(lasted=30 * MINUTE)
    late, early = (make_view(session=session, lasted=minutes * MINUTE) for minutes in (5, 20))
    foreign = make_view()

    content = superuser.get(change_page(session)).content.decode()

    assert content.index(str(early.property_object_id)) < content.index(
        str(late.property_object_id)
    )
    assert str(foreign.property_object_id) not in content
    assert change_page(early) in content


def test_session_page_shows_the_events_of_session_and_views_with_their_delivery(
    superuser: Client, closed: Session
) -> None:
    ended = OutboxMessage.objects.get(key=str(closed.id))
    published, parked = OutboxMessage.objects.exclude(id=ended.id)
    OutboxMessage.objects.filter(id=published.id).update(published_at=statement_time())
    OutboxMessage.objects.filter(id=parked.id).update(
        parked_at=statement_time(), last_error="MessageSizeTooLargeError"
    )
    silent_session(minutes=60)  # whose event is another session's
    ActivityCloser(ActivityCloserOptions()).run()

    content = superuser.get(change_page(closed)).content.decode()

    rows = [row for row in re.findall("<tr>.*?</tr>", content, re.DOTALL) if ".v1" in row]
    shown = {
        str(message.pk): row
        for row in rows
        for message in OutboxMessage.objects.all()
        if change_page(message) in row
    }
    assert set(shown) == {str(message.pk) for message in (ended, published, parked)}
    assert "Pending" in shown[str(ended.pk)]
    assert "Published" in shown[str(published.pk)]
    assert "Parked (MessageSizeTooLargeError)" in shown[str(parked.pk)]


def test_outbox_page_shows_headers_and_payload_readably(superuser: Client, closed: Session) -> None:
    message = OutboxMessage.objects.get(key=str(closed.id))
    content = superuser.get(change_page(message)).content.decode().replace("&quot;", '"')
    payload = json.loads(message.payload)
    assert f'"DurationSeconds": {payload["DurationSeconds"]}' in content
    assert '"EventType": "SessionEndedKafkaEvent"' in content


def test_session_of_30_days_is_shown_c22(superuser: Client) -> None:
    session = silent_session(minutes=13, lasted=timedelta(days=30))
    ActivityCloser(ActivityCloserOptions()).run()
    assert "30 days" in superuser.get(change_page(session)).content.decode()
    assert "30 days" in superuser.get(url(Session, "changelist")).content.decode()


def test_unknown_or_impossible_id_leads_back_with_a_message(superuser: Client) -> None:
    for model in MODELS:
        for pk in (new_id(), "undefined", "_00"):
            response = superuser.get(url(model, "change", pk))
            assert (response.status_code, response.headers["Location"]) == (302, "/admin/")


# -- it finds ------------------------------------------------------------------------------

SPELLINGS: list[Callable[[str], str]] = [
    str,
    str.upper,
    lambda text: text.replace("-", ""),
    lambda text: f"{{{text}}}",
    lambda text: f"urn:uuid:{text}",
    lambda text: f"  {text}\t",
]


def found(client: Client, model: type[Model], wanted: object) -> set[str]:
    """Search a table for an id; the same rows must come in every spelling of it."""
    terms = [spell(str(wanted)) for spell in SPELLINGS]
    results = [rows_of(client.get(url(model, "changelist"), {"q": term})) for term in terms]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture
def crowd(closed: Session) -> Session:
    """Others beside the closed session, for a search to leave out."""
    for _ in range(3):
        make_view()
    silent_session(minutes=60, views=1)
    ActivityCloser(ActivityCloserOptions()).run()
    return closed


@pytest.mark.parametrize("field", ["id", "anonymous_id", "user_id"])
def test_session_is_found_by_each_id_in_any_spelling(
    superuser: Client, crowd: Session, field: str
) -> None:
    assert found(superuser, Session, getattr(crowd, field)) == {str(crowd.id)}


@pytest.mark.parametrize("field", ["id", "property_object_id", "session_id"])
def test_view_is_found_by_each_id_in_any_spelling(
    superuser: Client, crowd: Session, field: str
) -> None:
    view = crowd.views.earliest("id")
    expected = (
        {str(view.id)}
        if field in {"id", "property_object_id"}
        else {str(each.id) for each in crowd.views.all()}
    )
    assert found(superuser, PropertyObjectView, getattr(view, field)) == expected


def test_figures_are_found_by_their_object_in_any_spelling(
    superuser: Client, crowd: Session
) -> None:
    object_id = crowd.views.earliest("id").property_object_id
    assert found(superuser, PropertyObjectViewStats, object_id) == {str(object_id)}


@pytest.mark.parametrize("field", ["message_id", "key"])
def test_message_is_found_by_its_id_and_its_aggregate_in_any_spelling(
    superuser: Client, crowd: Session, field: str
) -> None:
    message = OutboxMessage.objects.get(key=str(crowd.id))
    assert found(superuser, OutboxMessage, getattr(message, field)) == {str(message.pk)}


def test_run_is_found_by_its_id_in_any_spelling(superuser: Client, crowd: Session) -> None:
    run = ActivityCloserRun.objects.earliest("id")
    assert found(superuser, ActivityCloserRun, run.id) == {str(run.id)}


@pytest.mark.parametrize("model", MODELS)
def test_search_for_anything_else_finds_nothing(
    superuser: Client, closed: Session, model: type[Model]
) -> None:
    for term in ("undefined", str(UUID(int=0)), "%", "' OR 1=1 --", "Firefox", "9" * 5_000):
        assert rows_of(superuser.get(url(model, "changelist"), {"q": term})) == set()


@pytest.mark.parametrize("model", MODELS)
def test_blank_search_shows_everything(
    superuser: Client, closed: Session, model: type[Model]
) -> None:
    everything = {str(row.pk) for row in model._default_manager.all()}
    assert rows_of(superuser.get(url(model, "changelist"), {"q": " "})) == everything


@pytest.mark.parametrize(
    ("model", "parameter", "value", "matches"),
    [
        (Session, "status__exact", "Active", {"status": "Active"}),
        (Session, "status__exact", "Inactive", {"status": "Inactive"}),
        (PropertyObjectView, "status__exact", "Active", {"status": "Active"}),
        (OutboxMessage, "delivery", "pending", {"published_at": None, "parked_at": None}),
        (OutboxMessage, "delivery", "published", {"published_at__isnull": False}),
        (OutboxMessage, "delivery", "parked", {"parked_at__isnull": False}),
        (
            OutboxMessage,
            "delivery",
            "retrying",
            {"published_at": None, "parked_at": None, "next_attempt_at__isnull": False},
        ),
        (
            OutboxMessage,
            "topic",
            "pin.user-activity.session-ended.v1",
            {"topic": "pin.user-activity.session-ended.v1"},
        ),
        (ActivityCloserRun, "outcome__exact", "Succeeded", {"outcome": "Succeeded"}),
        (ActivityCloserRun, "outcome__exact", "Failed", {"outcome": "Failed"}),
    ],
)
def test_filter_shows_its_rows_and_is_offered(
    superuser: Client,
    crowd: Session,
    model: type[Model],
    parameter: str,
    value: str,
    matches: dict[str, Any],
) -> None:
    make_session(device_type="Mobile")
    make_view(view_source="Map")
    published, parked, waiting, *_ = OutboxMessage.objects.all()
    OutboxMessage.objects.filter(id=published.id).update(published_at=statement_time())
    OutboxMessage.objects.filter(id=parked.id).update(parked_at=statement_time())
    OutboxMessage.objects.filter(id=waiting.id).update(next_attempt_at=statement_time())

    response = superuser.get(url(model, "changelist"), {parameter: value})

    expected = {str(row.pk) for row in model._default_manager.filter(**matches)}
    assert rows_of(response) == expected
    plain = superuser.get(url(model, "changelist")).content.decode()
    assert f"?{parameter}={value}" in plain


@pytest.mark.parametrize("model", MODELS)
def test_strange_query_does_not_make_the_service_fail(
    superuser: Client, model: type[Model]
) -> None:
    for query in ("status__exact=%00", "q=%00", "id=undefined", "p=999999", "o=1.2", "no=1", "e=1"):
        response = superuser.get(f"{url(model, 'changelist')}?{query}")
        assert response.status_code in {200, 302, 400}


# -- it changes nothing --------------------------------------------------------------------


def contents() -> list[Any]:
    return [list(model._default_manager.order_by("pk").values()) for model in MODELS]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_can_be_added_changed_or_deleted_even_by_a_superuser(
    superuser: Client, closed: Session, model: type[Model]
) -> None:
    row = model._default_manager.all()[0]
    before = contents()
    fields = {field.name: "1" for field in model._meta.fields}

    answers = [
        superuser.get(url(model, "add")),
        superuser.post(url(model, "add"), fields),
        superuser.post(url(model, "change", row.pk), fields),
        superuser.get(url(model, "delete", row.pk)),
        superuser.post(url(model, "delete", row.pk), {"post": "yes"}),
    ]
    superuser.post(
        url(model, "changelist"),
        {"action": "delete_selected", "_selected_action": [str(row.pk)], "post": "yes"},
    )

    assert [answer.status_code for answer in answers] == [403] * 5
    assert contents() == before


@pytest.mark.parametrize("model", MODELS)
def test_pages_offer_no_change(superuser: Client, closed: Session, model: type[Model]) -> None:
    row = model._default_manager.all()[0]
    page = superuser.get(change_page(row)).content.decode()
    changelist = superuser.get(url(model, "changelist")).content.decode()

    assert not re.search(r'<input type="submit"[^>]*name="_save', page)
    assert url(model, "delete", row.pk) not in page
    assert url(model, "add") not in changelist
    assert "delete_selected" not in changelist


def test_pages_are_for_staff_only(closed: Session) -> None:
    visitor, user = Client(), Client()
    user.force_login(User.objects.create_user("anybody"))
    pages = every_page()

    for client in (visitor, user):
        answers = [client.get(page) for page in pages]
        assert {answer.status_code for answer in answers} == {302}
        assert {answer.headers["Location"].split("?")[0] for answer in answers} == {"/admin/login/"}


def test_staff_without_permissions_see_no_table(closed: Session) -> None:
    client = Client()
    client.force_login(User.objects.create_user("newcomer", is_staff=True))
    assert {client.get(page).status_code for page in every_page()[1:]} == {403}


# -- what may be done ----------------------------------------------------------------------


def redrive_all(client: Client) -> Any:
    return client.post(
        url(OutboxMessage, "changelist"),
        {
            "action": "redrive",
            "_selected_action": [str(message.pk) for message in OutboxMessage.objects.all()],
        },
        follow=True,
    )


def test_parked_events_are_sent_again_from_the_admin_by_whom_the_permission_was_given(
    support: Client, closed: Session
) -> None:
    parked, _, published = OutboxMessage.objects.order_by("id")
    moment = statement_time()
    OutboxMessage.objects.filter(id=parked.id).update(parked_at=moment, last_error="TooLarge")
    OutboxMessage.objects.filter(id=published.id).update(published_at=moment)
    changelist = support.get(url(OutboxMessage, "changelist")).content.decode()
    assert "1 pending, 1 parked" in changelist
    assert "redrive" not in changelist
    assert "Parked (TooLarge)" in changelist

    redrive_all(support)
    assert OutboxMessage.objects.parked().exists(), "without the permission"

    user = User.objects.get(username="support")
    user.user_permissions.add(Permission.objects.get(codename="redrive_outboxmessage"))
    content = redrive_all(support).content.decode()

    assert "1 on their way" in content
    assert "2 pending, 0 parked" in content
    assert [message.delivery for message in OutboxMessage.objects.order_by("id")] == [
        "Retrying (TooLarge)",
        "Pending",
        "Published",
    ]
    (entry,) = LogEntry.objects.all()
    assert (entry.user, entry.object_id) == (user, str(parked.id))


# -- it hides devices ----------------------------------------------------------------------


def test_address_and_user_agent_are_shown_to_whom_the_permission_was_given(
    support: Client, closed: Session
) -> None:
    user = User.objects.get(username="support")
    user.user_permissions.add(Permission.objects.get(codename="view_device_address"))
    content = support.get(change_page(closed)).content.decode()
    assert [mark for mark in MARKS if mark not in content] == []


def test_address_and_user_agent_are_on_no_page_without_the_permission(
    support: Client, closed: Session
) -> None:
    leaking = [
        (page, mark)
        for page in every_page()
        for mark in MARKS
        if mark in support.get(page).content.decode()
    ]
    assert leaking == []


@pytest.mark.parametrize("term", MARKS)
def test_search_by_address_or_user_agent_finds_nothing(
    support: Client, closed: Session, term: str
) -> None:
    assert rows_of(support.get(url(Session, "changelist"), {"q": term})) == set()


@pytest.mark.parametrize(
    ("model", "lookup", "value"),
    [
        (Session, "ip_address", ADDRESS),
        (Session, "ip_address__exact", ADDRESS),
        (Session, "ip_address__startswith", "203"),
        (Session, "ip_address__isnull", "False"),
        (Session, "user_agent", USER_AGENT),
        (Session, "user_agent__contains", "Secret"),
        (Session, "user_agent__regex", "^S"),
        (Session, "views__session__ip_address", ADDRESS),
        (PropertyObjectView, "session__ip_address", ADDRESS),
        (PropertyObjectView, "session__user_agent__startswith", "S"),
    ],
)
def test_address_and_user_agent_cannot_be_guessed_by_filtering(
    support: Client, closed: Session, model: type[Model], lookup: str, value: str
) -> None:
    response = support.get(url(model, "changelist"), {lookup: value})
    assert response.status_code == 400


# -- it stays fast on huge tables ----------------------------------------------------------


def statements_of(client: Client, page: str, count_statements: Callable[[], Any]) -> list[str]:
    client.get(page)  # sessions, permissions and content types are read once
    with count_statements() as statements:
        assert client.get(page).status_code == 200
    return [statement["sql"] for statement in statements]


@pytest.mark.parametrize("model", MODELS)
def test_changelist_takes_as_many_statements_for_many_rows_as_for_few(
    superuser: Client, closed: Session, model: type[Model], count_statements: Callable[[], Any]
) -> None:
    few = statements_of(superuser, url(model, "changelist"), count_statements)
    for _ in range(5):
        silent_session(minutes=30, views=3)
        make_stats()
        ActivityCloser(ActivityCloserOptions()).run()
    many = statements_of(superuser, url(model, "changelist"), count_statements)

    assert len(many) == len(few)


def test_session_page_takes_as_many_statements_for_many_views_as_for_few(
    superuser: Client, count_statements: Callable[[], Any]
) -> None:
    few, many = silent_session(minutes=13, views=1), silent_session(minutes=13, views=40)
    ActivityCloser(ActivityCloserOptions()).run()

    assert len(statements_of(superuser, change_page(few), count_statements)) == len(
        statements_of(superuser, change_page(many), count_statements)
    )


def test_session_page_shows_a_bounded_number_of_views_and_events(superuser: Client) -> None:
    session = silent_session(minutes=13, views=250)
    ActivityCloser(ActivityCloserOptions()).run()
    content = superuser.get(change_page(session)).content.decode()
    assert len(re.findall("/propertyobjectview/[^/]+/change/", content)) == 200
    assert 200 <= len(re.findall("/outboxmessage/[^/]+/change/", content)) <= 201
    assert change_page(OutboxMessage.objects.get(key=str(session.id))) in content


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("query", ["", "?all=", "?p=2", "?_facets=True"])
def test_no_statement_of_a_changelist_counts_a_whole_table(
    superuser: Client,
    closed: Session,
    model: type[Model],
    query: str,
    count_statements: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent_session(minutes=30, views=3)
    ActivityCloser(ActivityCloserOptions()).run()
    monkeypatch.setattr(admin.site.get_model_admin(model), "list_per_page", 1)
    monkeypatch.setattr(admin.site.get_model_admin(model), "list_max_show_all", 1)

    statements = statements_of(superuser, url(model, "changelist") + query, count_statements)

    ours = [statement for statement in statements if f'FROM "{model._meta.db_table}"' in statement]
    counts = [
        statement for statement in ours if "COUNT(" in statement and "date_bin(" not in statement
    ]
    assert ours
    assert counts
    # The run history reads a day by its index: sessions/test_run_history.py.
    unbounded = [statement for statement in ours if "LIMIT" not in statement]
    assert [statement for statement in unbounded if "date_bin(" not in statement] == []
    assert [count for count in counts if not re.search(r"LIMIT \d+\) \S+$", count)] == []


@pytest.mark.parametrize("model", MODELS)
def test_changelist_reads_in_the_order_of_an_index(
    superuser: Client, closed: Session, model: type[Model], count_statements: Callable[[], Any]
) -> None:
    """Sorting a table of millions for its first 50 rows would take seconds."""
    statements = statements_of(superuser, url(model, "changelist"), count_statements)
    (listing,) = [
        statement
        for statement in statements
        if "ORDER BY" in statement and f'FROM "{model._meta.db_table}"' in statement
    ]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_sort = off")
        cursor.execute(f"EXPLAIN {listing}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Index" in plan
    assert "Sort" not in plan


@pytest.mark.parametrize("field", ["id", "anonymous_id", "user_id"])
def test_search_looks_ids_up_in_indexes(
    superuser: Client, closed: Session, field: str, count_statements: Callable[[], Any]
) -> None:
    page = f"{url(Session, 'changelist')}?q={getattr(closed, field)}"
    statements = statements_of(superuser, page, count_statements)
    (listing,) = [
        statement
        for statement in statements
        if "ORDER BY" in statement and 'FROM "sessions"' in statement
    ]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {listing}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Seq Scan" not in plan
