"""ClickHouse's migrations: forward, numbered, recorded, idempotent, also side by side."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from django.core.management import CommandError, call_command

from devstats.clickhouse import DATABASE, connect_reader, connect_writer
from devstats.clickhouse_migrations import (
    _RECORDS,
    FOLDER,
    MigrationsDiffer,
    migrate,
    read_migrations,
    render,
)
from devstats.options import DevStatsOptions
from devstats.ownership import PropertyObject
from devstats.property_objects import find_versions, store_objects
from devstats.tables import PROPERTY_OBJECTS, SESSION_FACTS, VIEW_FACTS
from devstats.writer import FactWriter
from embedded.server import Server
from embedded.stack import private_server
from pinactivity.core.ids import new_id

TABLES = {
    "property_object_view_facts",
    "property_objects",
    "schema_migrations",
    "session_facts",
}
HARMLESS_TWICE = re.compile(
    r"CREATE (TABLE|DATABASE|VIEW) IF NOT EXISTS "
    r"|ALTER TABLE \S+\s+(ON CLUSTER '\w+'\s+)?(ADD|DROP|MATERIALIZE) \w+ IF (NOT )?EXISTS "
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with private_server("clickhouse") as clickhouse:
        yield clickhouse


@pytest.fixture
def client(server: Server, settings: Any) -> Iterator[Client]:
    """A connection to a ClickHouse that has none of the tables."""
    settings.CLICKHOUSE_URL = server.address
    client = connect_writer(database=None)
    client.command(f"DROP DATABASE IF EXISTS {DATABASE} SYNC")
    yield client
    client.close()


def run_command() -> str:
    output = StringIO()
    call_command("migrate_clickhouse", stdout=output)
    return output.getvalue()


def tables(client: Client) -> set[str]:
    return {name for (name,) in client.query(f"SHOW TABLES FROM {DATABASE}").result_rows}


def test_command_makes_the_tables_once(client: Client) -> None:
    count = len(read_migrations())
    applied = "".join(f"applied {each.name}\n" for each in read_migrations())
    assert run_command() == f"{applied}{count} migrations applied\n"
    assert tables(client) == TABLES
    assert run_command() == "0 migrations applied\n"
    recorded = client.query(
        f"SELECT Number, Name FROM {DATABASE}.schema_migrations ORDER BY Number"
    ).result_rows
    assert recorded == [(each.number, each.name) for each in read_migrations()]


def test_columns_are_those_that_the_writer_fills(client: Client) -> None:
    run_command()
    for table in (SESSION_FACTS, VIEW_FACTS, PROPERTY_OBJECTS):
        rows = client.query(
            "SELECT name, type FROM system.columns WHERE database = {database:String}"
            " AND table = {table:String} AND default_kind = '' ORDER BY position",
            parameters={"database": DATABASE, "table": table.name},
        ).result_rows
        assert [tuple(row) for row in rows] == list(table.columns.items())


@pytest.mark.parametrize(
    ("table", "partition", "order"),
    [
        ("session_facts", "toYYYYMM(EventTime)", "TenantId, SessionId, FactId"),
        (
            "property_object_view_facts",
            "toYYYYMM(EventTime)",
            "DeveloperId, PropertyObjectViewId, FactId",
        ),
        ("property_objects", "", "PropertyObjectId, UpdatedAt, Revision"),
    ],
)
def test_tables_replace_by_their_keys_and_remember_inserts(
    client: Client, table: str, partition: str, order: str
) -> None:
    run_command()
    ((engine, by, key, text),) = client.query(
        "SELECT engine, partition_key, sorting_key, create_table_query FROM system.tables"
        " WHERE database = {database:String} AND name = {name:String}",
        parameters={"database": DATABASE, "name": table},
    ).result_rows
    assert (engine, by, key) == ("ReplacingMergeTree", partition, order)
    assert "non_replicated_deduplication_window = 1000" in text


def test_four_at_once_come_to_the_same_tables(client: Client) -> None:
    barrier = threading.Barrier(4)
    raised: list[Exception] = []

    def work() -> None:
        mine = connect_writer(database=None)
        barrier.wait(20)
        try:
            list(migrate(mine, cluster=""))
        except Exception as exc:
            raised.append(exc)
        mine.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert tables(client) == TABLES


def test_one_that_died_between_two_statements_is_finished_and_keeps_what_is_there(
    client: Client,
) -> None:
    client.command(f"CREATE DATABASE {DATABASE}")
    client.command(render(read_migrations()[0].text, "")[0])
    client.command(f"INSERT INTO {DATABASE}.session_facts (FactId) VALUES ('kept')")
    run_command()
    assert tables(client) == TABLES
    assert client.query(f"SELECT FactId FROM {DATABASE}.session_facts").result_rows == [("kept",)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the migrations."""
    return Path(shutil.copytree(FOLDER, tmp_path / "schema"))


def test_new_migration_is_applied_alone(client: Client, folder: Path) -> None:
    run_command()
    number = len(read_migrations()) + 1
    statement = "ALTER TABLE $database.session_facts ADD COLUMN IF NOT EXISTS Extra String;\n"
    (folder / f"{number:04}_extra.sql").write_text(statement)
    applied = list(migrate(client, cluster="", folder=folder))
    assert [migration.number for migration in applied] == [number]
    assert client.query(f"SELECT Extra FROM {DATABASE}.session_facts").result_rows == []


def test_rows_from_before_a_revision_are_kept_and_the_next_owner_of_their_moment_wins(
    client: Client, folder: Path
) -> None:
    first, *later = sorted(folder.glob("*.sql"))
    for file in later:
        file.rename(file.with_suffix(".later"))
    assert [each.name for each in migrate(client, cluster="", folder=folder)] == [first.stem]
    flat, developers = new_id(), [new_id(), new_id()]
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    client.insert(
        f"{DATABASE}.property_objects",
        [[flat, developers[0], None, moment]],
        column_names=["PropertyObjectId", "DeveloperId", "BrandId", "UpdatedAt"],
    )

    run_command()

    with closing(FactWriter()) as writer:
        (before,) = find_versions(writer.client, [flat])[flat]
        assert (before.developer_id, before.revision) == (developers[0], 0)
        assert store_objects(writer, [PropertyObject(flat, developers[1], None, moment)]) == 1
        client.command(f"OPTIMIZE TABLE {DATABASE}.property_objects FINAL")
        (after,) = find_versions(writer.client, [flat])[flat]
        assert (after.developer_id, after.revision) == (developers[1], 1)


def test_change_of_an_applied_file_and_an_older_service_are_refused(
    client: Client, folder: Path
) -> None:
    number = f"{len(read_migrations()) + 1:04}"
    (folder / f"{number}_next.sql").write_text("-- nothing\n")
    list(migrate(client, cluster="", folder=folder))
    with pytest.raises(CommandError, match=f"Number {number} was applied by another version"):
        run_command()
    (folder / "0001_facts.sql").write_text("-- changed\n")
    with pytest.raises(MigrationsDiffer, match="Number 0001"):
        list(migrate(client, cluster="", folder=folder))


@pytest.mark.parametrize("name", ["0009_gap.sql", "two.sql"])
def test_files_that_are_not_numbered_one_after_the_other_are_refused(
    folder: Path, name: str
) -> None:
    (folder / name).touch()
    with pytest.raises(ValueError, match=name):
        read_migrations(folder)


@pytest.mark.parametrize("cluster", ["", "pin"])
def test_every_statement_is_harmless_twice(cluster: str) -> None:
    statements = [statement for each in read_migrations() for statement in each.statements(cluster)]
    assert [each for each in statements if not HARMLESS_TWICE.match(each)] == []
    assert statements


def test_clusters_statements_parse_and_are_replicated_and_distributed(client: Client) -> None:
    """The embedded engine has no cluster to run them on, but it has ClickHouse's parser."""
    statements = render(_RECORDS, "pin")
    for migration in read_migrations():
        statements += migration.statements("pin")
    parsed = [
        client.query("SELECT formatQuery({sql:String})", parameters={"sql": each}).result_rows[0][0]
        for each in statements
    ]
    assert parsed.pop(0) == f"CREATE DATABASE IF NOT EXISTS {DATABASE} ON CLUSTER pin"
    heading = re.compile(rf"CREATE TABLE IF NOT EXISTS {DATABASE}\.(\w+) ON CLUSTER pin\b")
    made = {
        match[1]: re.findall("^ENGINE = (.+)$", statement, re.MULTILINE)[0]
        for statement in parsed
        if (match := heading.match(statement))
    }
    path = "'/clickhouse/tables/{shard}/{database}/{table}', '{replica}'"
    everywhere = "'/clickhouse/tables/all/{database}/{table}', '{shard}-{replica}'"
    changed = [each for each in parsed if each.startswith("ALTER TABLE")]
    assert changed
    assert all(" ON CLUSTER pin\n" in each for each in changed)
    assert len(made) == len(parsed) - len(changed) == 6
    assert made["schema_migrations"] == f"ReplicatedReplacingMergeTree({everywhere}, AppliedAt)"
    assert made["session_facts_local"] == f"ReplicatedReplacingMergeTree({path}, IngestionTime)"
    assert made["property_object_view_facts_local"] == made["session_facts_local"]
    assert made["property_objects"] == f"ReplicatedReplacingMergeTree({everywhere}, UpdatedAt)"
    for table in ("session_facts", "property_object_view_facts"):
        assert made[table] == (
            f"Distributed('pin', '{DATABASE}', '{table}_local', cityHash64(SessionId))"
        )
    facts = [each for each in parsed if "MergeTree" in each and "schema_migrations" not in each]
    assert all("\nSETTINGS replicated_deduplication_window = 1000" in each for each in facts)


def test_unreachable_clickhouse_is_reported_by_class_and_code(settings: Any) -> None:
    settings.CLICKHOUSE_URL = "http://default:hunter2@127.0.0.1:1/"
    with pytest.raises(CommandError, match="ClickHouse is away or refuses") as raised:
        run_command()
    assert "hunter2" not in str(raised.value)


def test_clickhouse_ends_a_read_that_takes_too_long_by_itself(
    client: Client, settings: Any
) -> None:
    run_command()
    settings.DEV_STATS = DevStatsOptions(storage_timeout=timedelta(seconds=1.5))
    reader = connect_reader()
    ((seconds,),) = reader.query("SELECT toFloat64(getSetting('max_execution_time'))").result_rows
    assert seconds == 2
    reader.close()


def test_reader_can_read_and_cannot_write(client: Client) -> None:
    run_command()
    reader = connect_reader()
    assert reader.query("SELECT count() FROM session_facts").result_rows == [(0,)]
    for statement in (
        "INSERT INTO session_facts (FactId) VALUES ('x')",
        "DROP TABLE session_facts",
        "SET readonly = 0",
    ):
        with pytest.raises(Exception, match="returned an error") as raised:
            reader.command(statement)
        assert getattr(raised.value, "code", None) == 164
    reader.close()
