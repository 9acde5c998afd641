"""ClickHouse's tables, migrated forward by numbered files (`schema/0001_*.sql`).

A file is a template of statements, for one node and for a replicated cluster. Each statement is
idempotent and safe in parallel (IF NOT EXISTS), so nothing has to be locked. Two processes, or one
that died between two statements, arrive at the same tables.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import Template

from clickhouse_connect.driver.client import Client

from devstats.clickhouse import DATABASE, translated_errors

FOLDER = Path(__file__).with_name("schema")

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_CLUSTER_ONLY = re.compile(r"^-- cluster only\b", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)

_PATH = "'/clickhouse/tables/{shard}/{database}/{table}', '{replica}', "
_PATH_EVERYWHERE = "'/clickhouse/tables/all/{database}/{table}', '{shard}-{replica}', "
"""Of a table that every node holds whole: all of them are replicas of one."""


class MigrationsDiffer(Exception):
    """What was applied is not what this version of the service has."""


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    text: str

    @property
    def digest(self) -> str:
        """What a file is recognised by: what was applied must not change afterwards."""
        return sha256(self.text.encode()).hexdigest()

    def statements(self, cluster: str) -> list[str]:
        """Render for a cluster, or for one node when it is empty."""
        return render(self.text, cluster)


def read_migrations(folder: Path = FOLDER) -> list[Migration]:
    """Read the files, in order.

    Raises:
        ValueError: their numbers are not 1, 2, 3 ..
    """
    found = sorted(folder.glob("*.sql"))
    migrations = []
    for number, path in enumerate(found, start=1):
        match = _FILE.fullmatch(path.name)
        if match is None or int(match[1]) != number:
            raise ValueError(f"{path.name} should be number {number:04}.")
        migrations.append(Migration(number, path.stem, path.read_text(encoding="utf-8")))
    return migrations


def render(text: str, cluster: str) -> list[str]:
    """Make statements of a template: split at `;` at the end of a line, fill in the names.

    A statement under `-- cluster only` is left out for one node.
    """
    names = {
        "database": DATABASE,
        "cluster": cluster,
        "on_cluster": f"ON CLUSTER '{cluster}'" if cluster else "",
        "local": "_local" if cluster else "",
        "replicated": "Replicated" if cluster else "",
        "path": _PATH if cluster else "",
        "path_everywhere": _PATH_EVERYWHERE if cluster else "",
        "window": f"{'' if cluster else 'non_'}replicated_deduplication_window",
    }
    return [
        Template(statement).substitute(names)
        for part in text.split(";\n")
        if (cluster or not _CLUSTER_ONLY.search(part))
        and (statement := _COMMENT.sub("", part).strip())
    ]


_RECORDS = """
CREATE DATABASE IF NOT EXISTS $database $on_cluster;

CREATE TABLE IF NOT EXISTS $database.schema_migrations $on_cluster
(
    Number UInt32,
    Name String,
    Digest String,
    AppliedAt DateTime64(6, 'UTC') DEFAULT now64(6, 'UTC')
)
ENGINE = ${replicated}ReplacingMergeTree(${path_everywhere}AppliedAt)
ORDER BY Number;
"""


def migrate(client: Client, *, cluster: str, folder: Path = FOLDER) -> Iterator[Migration]:
    """Apply what is not recorded yet; yield each migration as it is done.

    Args:
        client: Of a writer, outside of any database.
        cluster: Name of a replicated cluster, or empty for one node.
        folder: Of the files.

    Raises:
        MigrationsDiffer: ClickHouse has one that this version does not, or another of that number.
        StorageUnavailable: ClickHouse is away, or refuses; what was done stays, and is not done
            again.
    """
    migrations = read_migrations(folder)
    for statement in render(_RECORDS, cluster):
        _run(client, statement)
    applied = _applied(client)
    known = {migration.number: migration.digest for migration in migrations}
    for number, digest in applied.items():
        if known.get(number) != digest:
            raise MigrationsDiffer(
                f"Number {number:04} was applied by another version of the service, or its file"
                " was changed afterwards."
            )
    for migration in migrations:
        if migration.number in applied:
            continue
        for statement in migration.statements(cluster):
            _run(client, statement)
        with translated_errors():
            client.insert(
                f"{DATABASE}.schema_migrations",
                [[migration.number, migration.name, migration.digest]],
                column_names=["Number", "Name", "Digest"],
                column_type_names=["UInt32", "String", "String"],
            )
        yield migration


def _applied(client: Client) -> dict[int, str]:
    with translated_errors():
        rows = client.query(
            "SELECT Number, argMax(Digest, AppliedAt)"
            f" FROM {DATABASE}.schema_migrations GROUP BY Number ORDER BY Number"
        ).result_rows
    return {number: digest for number, digest in rows}  # noqa: C416 - rows are sequences, to mypy


def _run(client: Client, statement: str) -> None:
    with translated_errors():
        client.command(statement)
