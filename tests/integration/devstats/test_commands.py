"""Commands that write facts: owners from a file, enrichment, backfill, replay."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client
from django.core.management import CommandError, call_command

from devstats.ownership import owner_at
from devstats.property_objects import find_versions
from outbox.models import OutboxMessage
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from sessions.closer import ActivityCloser
from sessions.models import Session
from sessions.options import ActivityCloserOptions
from tests.consuming import MemoryBroker
from tests.dev_stats import (
    CREATED_AT,
    SESSIONS,
    VIEWS,
    Ingest,
    clear_tables,
    count_rows,
    ended_view,
    merge,
    read_sessions,
    rows_of,
    stop_merges,
)
from tests.factories import make_due_sessions, make_session, silent_session

HEADING = "PropertyObjectId,DeveloperId,BrandId,UpdatedAt"


def run(name: str, *arguments: str) -> str:
    output = StringIO()
    call_command(name, *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def views(clickhouse: Client) -> Iterator[Ingest]:
    ingest = Ingest(MemoryBroker(), VIEWS)
    yield ingest
    ingest.close()


# -- load_property_objects -----------------------------------------------------------------


def write(path: Path, *lines: str, heading: str = HEADING) -> str:
    file = path / "objects.csv"
    file.write_text("\n".join([heading, *lines, ""]), encoding="utf-8")
    return str(file)


def test_file_of_objects_is_loaded_and_what_is_known_is_left_out(
    clickhouse: Client, tmp_path: Path
) -> None:
    flat, house, developer, brand = new_id(), new_id(), new_id(), new_id()
    file = write(
        tmp_path,
        f"{flat},{developer},{brand},2026-03-01T12:00:00.123456Z",
        f"{{{str(house).upper()}}},{developer},,",
    )
    before = datetime.now(UTC)

    assert run("load_property_objects", file) == "2 loaded, 0 known already\n"
    assert run("load_property_objects", file) == "0 loaded, 2 known already\n"

    rows = {row["PropertyObjectId"]: row for row in rows_of(clickhouse, "property_objects")}
    assert rows[flat] == {
        "PropertyObjectId": flat,
        "DeveloperId": developer,
        "BrandId": brand,
        "UpdatedAt": CREATED_AT,
        "Revision": 0,
    }
    assert rows[house]["BrandId"] is None
    assert before <= rows[house]["UpdatedAt"] <= datetime.now(UTC)


def test_change_of_an_owner_is_another_version(clickhouse: Client, tmp_path: Path) -> None:
    flat = new_id()
    run("load_property_objects", write(tmp_path, f"{flat},{new_id()},,"))
    run("load_property_objects", write(tmp_path, f"{flat},{new_id()},,"))
    assert count_rows(clickhouse, "property_objects") == 2


@pytest.mark.parametrize(
    ("first", "then", "owners"),
    [
        # Owned by 1 from the start, which is not known until the change before is reported too.
        ("2022 1", ["2020 1", "2021 2"], {2020: 1, 2021: 2, 2022: 1}),
        # Owned by 1 again: a report from before the change proves nothing about after it.
        ("2019 1", ["2021 1", "2020 2"], {2019: 1, 2020: 2, 2021: 1}),
        ("2019 1", [" 1", "2020 2"], {2019: 1, 2020: 2, 2999: 1}),
    ],
)
def test_no_change_of_an_owner_is_taken_for_known(
    clickhouse: Client, tmp_path: Path, first: str, then: list[str], owners: dict[int, int]
) -> None:
    flat = new_id()

    def line(version: str) -> str:
        year, owner = version.split(" ")
        moment = year and f"{year}-01-01T00:00:00Z"
        return f"{flat},{UUID(int=int(owner))},,{moment}"

    run("load_property_objects", write(tmp_path, line(first)))
    run("load_property_objects", write(tmp_path, *map(line, then)))

    known = find_versions(clickhouse, [flat])[flat]
    for year, owner in owners.items():
        found = owner_at(known, datetime(year, 6, 1, tzinfo=UTC))
        assert found is not None
        assert found.developer_id == UUID(int=owner)


def test_of_two_owners_from_the_same_moment_on_the_later_load_decides(
    clickhouse: Client, tmp_path: Path
) -> None:
    flat = new_id()
    owners = [new_id() for _ in range(10)]
    for owner in [*owners, owners[0]]:  # either order of their ids, and back to the first
        line = f"{flat},{owner},,2026-03-01T00:00:00Z"
        assert run("load_property_objects", write(tmp_path, line)) == (
            "1 loaded, 0 known already\n"
        )
        assert run("load_property_objects", write(tmp_path, line)) == (
            "0 loaded, 1 known already\n"
        )
        (version,) = find_versions(clickhouse, [flat])[flat]
        assert version.developer_id == owner
    merge(clickhouse)
    (version,) = find_versions(clickhouse, [flat])[flat]
    assert version.developer_id == owners[0]


def test_repeated_line_is_one_and_another_owner_of_its_moment_an_error(
    clickhouse: Client, tmp_path: Path
) -> None:
    flat, developer = new_id(), new_id()
    line = f"{flat},{developer},,2026-03-01T00:00:00Z"
    assert run("load_property_objects", write(tmp_path, line, line)) == (
        "1 loaded, 0 known already\n"
    )
    other = f"{flat},{new_id()},,2026-03-01T01:00:00+01:00"
    with pytest.raises(CommandError, match="line 3: a line before names another owner"):
        run("load_property_objects", write(tmp_path, line, other))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{new_id()},{UUID(int=0)},,", "line 3: Must not be the nil UUID"),
        (f"{new_id()},,,", "line 3: Must be a UUID"),
        (f"{new_id()},{new_id()},brand,", "line 3: Must be a UUID"),
        (f"{new_id()},{new_id()},,yesterday", "line 3: Must be an ISO 8601 time"),
        (f"{new_id()},{new_id()},,0001-01-01T00:00:00Z", "line 3: UpdatedAt must be from 1970"),
        (f"{new_id()},{new_id()},,2999-01-01T00:00:00Z", "line 3: UpdatedAt must be from 1970"),
        (f"{new_id()},{new_id()}", "line 3: not as many fields"),
        (f"{new_id()},{new_id()},,,5", "line 3: not as many fields"),
        ('"', "is not CSV"),
    ],
)
def test_nothing_is_loaded_of_a_file_with_an_error_and_its_line_is_reported(
    clickhouse: Client, tmp_path: Path, line: str, reason: str
) -> None:
    file = write(tmp_path, f"{new_id()},{new_id()},,", line)
    with pytest.raises(CommandError, match=reason):
        run("load_property_objects", file)
    assert count_rows(clickhouse, "property_objects") == 0


@pytest.mark.parametrize("heading", ["", "DeveloperId", f"{HEADING},Price", f"{HEADING},BrandId"])
def test_file_with_another_heading_is_refused(tmp_path: Path, heading: str) -> None:
    with pytest.raises(CommandError, match="the first line must name the columns"):
        run("load_property_objects", write(tmp_path, heading=heading))


def test_file_that_is_missing_or_not_text_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read: FileNotFoundError"):
        run("load_property_objects", str(tmp_path / "none.csv"))
    (tmp_path / "objects.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommandError, match="is not CSV"):
        run("load_property_objects", str(tmp_path / "objects.csv"))


# -- enrich_view_facts ---------------------------------------------------------------------


def test_views_get_the_owner_that_a_file_names(
    views: Ingest, clickhouse: Client, tmp_path: Path
) -> None:
    flat, developer = new_id(), new_id()
    views.send(*(ended_view(PropertyObjectId=str(flat)) for _ in range(3)), ended_view())
    views.run()
    assert run("enrich_view_facts") == "0 views have got their owner\n"

    run("load_property_objects", write(tmp_path, f"{flat},{developer},,"))

    assert run("enrich_view_facts") == "3 views have got their owner\n"
    assert run("enrich_view_facts") == "0 views have got their owner\n"
    rows = rows_of(clickhouse, "property_object_view_facts")
    assert sum(row["DeveloperId"] == developer for row in rows) == 3


# -- backfill_session_facts ----------------------------------------------------------------


def close_inactive() -> None:
    ActivityCloser(ActivityCloserOptions()).run()


def backfill() -> str:
    now = datetime.now(UTC)
    bounds = [iso_utc(now - timedelta(days=1)), iso_utc(now + timedelta(days=1))]
    return run("backfill_session_facts", "--from", bounds[0], "--to", bounds[1])


@pytest.mark.django_db(transaction=True)
def test_backfilled_session_is_the_row_of_postgresql(clickhouse: Client) -> None:
    user = new_id()
    ended = silent_session(minutes=13, user_id=user, lasted=timedelta(seconds=61.9))
    make_session()
    close_inactive()

    assert backfill() == "1 sessions added\n"

    (row,) = rows_of(clickhouse, "session_facts")
    del row["IngestionTime"]
    assert row == {
        "FactId": f"backfill:{ended.id}",
        "SessionId": ended.id,
        "AnonymousId": ended.anonymous_id,
        "UserId": user,
        "StartedAt": ended.created_at,
        "EventTime": ended.created_at,
        "LastActivityAt": ended.last_activity_at,
        "DurationSeconds": 61,
        "TenantId": str(UUID(int=0)),
        "BrandId": None,
        "DeveloperId": None,
        "ViewerKind": "User",
    }


@pytest.mark.django_db(transaction=True)
def test_backfill_over_what_was_consumed_is_invisible_to_readers_c56(clickhouse: Client) -> None:
    stop_merges(clickhouse)
    make_due_sessions(30)
    close_inactive()
    ingest = Ingest(MemoryBroker(), SESSIONS)
    for event in OutboxMessage.objects.order_by("id")[:20]:
        ingest.send(event.payload.encode(), headers={"MessageId": str(event.message_id)})
    ingest.run()
    ingest.close()
    assert read_sessions(clickhouse) == (20, 20 * 300)

    assert backfill() == "30 sessions added\n"
    assert backfill() == "30 sessions added\n"

    assert count_rows(clickhouse) == 80
    assert read_sessions(clickhouse) == (30, 30 * 300)


@pytest.mark.django_db(transaction=True)
def test_backfill_fills_an_emptied_table(clickhouse: Client) -> None:
    make_due_sessions(5)
    close_inactive()
    backfill()
    clear_tables(clickhouse)
    backfill()
    assert read_sessions(clickhouse) == (5, 1500)


@pytest.mark.django_db(transaction=True)
def test_backfill_takes_what_ended_in_a_half_open_period_in_chunks(
    clickhouse: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_due_sessions(2500)
    close_inactive()
    ends: list[Any] = sorted(Session.objects.values_list("ended_at", flat=True))
    first, last = ends[0], ends[-1]

    printed = run("backfill_session_facts", "--from", iso_utc(first), "--to", iso_utc(last))

    before_the_last = sum(end != last for end in ends)
    assert printed == f"{before_the_last} sessions added\n"
    assert 0 < before_the_last < 2500
    assert read_sessions(clickhouse)[0] == before_the_last
    run("backfill_session_facts", "--from", iso_utc(last), "--to", "2999-01-01")
    assert read_sessions(clickhouse) == (2500, 2500 * 300)


@pytest.mark.parametrize(
    "bounds",
    [["2026-03-02", "2026-03-01"], ["2026-03-01", "2026-03-01"], ["2026-03-01T00:00:00", "x"]],
)
def test_backfill_of_no_period_is_refused(bounds: list[str]) -> None:
    with pytest.raises(CommandError):
        run("backfill_session_facts", "--from", bounds[0], "--to", bounds[1])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["enrich_view_facts", "backfill_session_facts"])
def test_command_reports_that_clickhouse_is_unreachable(name: str, settings: Any) -> None:
    settings.CLICKHOUSE_URL = "http://default:hunter2@127.0.0.1:1/"
    silent_session(minutes=13)
    close_inactive()
    with pytest.raises(CommandError, match="ClickHouse is away") as raised:
        backfill() if name.startswith("backfill") else run(name)
    assert "hunter2" not in str(raised.value)
