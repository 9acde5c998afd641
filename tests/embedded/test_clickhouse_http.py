"""The ClickHouse front, through clickhouse-connect's ordinary HTTP client."""

import gzip
import http.client
import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError, StreamFailureError

from embedded import private_server
from embedded.http_body import MAX_BODY_BYTES
from embedded.server import Server

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
COLUMNS = ["id", "seen_at", "kind", "viewer", "label", "ingested_at"]
TABLE = """CREATE TABLE {name} (
    id UUID, seen_at DateTime64(6, 'UTC'), kind Enum8('Guest' = 1, 'User' = 2),
    viewer Nullable(UUID), label LowCardinality(String), ingested_at DateTime64(6, 'UTC')
) ENGINE = ReplacingMergeTree(ingested_at) ORDER BY id
SETTINGS non_replicated_deduplication_window = 100"""


def connect(server: Server, **options: Any) -> Client:
    """Open a client as the project's processes do."""
    return clickhouse_connect.get_client(
        dsn=server.address, autogenerate_session_id=False, **options
    )


def make_rows(count: int) -> list[list[Any]]:
    """Make rows with everything that is hard to carry."""
    return [
        [uuid.uuid4(), NOW, "User", uuid.uuid4() if number % 2 else None, "o'\n\0é\\", NOW]
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One ClickHouse for this file."""
    with private_server("clickhouse") as clickhouse:
        connect(clickhouse).command("CREATE DATABASE pin")
        yield clickhouse


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of the database `pin`."""
    client = connect(server, database="pin")
    yield client
    client.close()


@pytest.fixture
def table(client: Client) -> str:
    """A new table."""
    name = f"facts_{uuid.uuid4().hex}"
    client.command(TABLE.format(name=name))
    return name


def insert(client: Client, table: str, rows: list[list[Any]], token: str) -> None:
    """Insert rows under a deduplication token."""
    client.insert(table, rows, column_names=COLUMNS, settings={"insert_deduplication_token": token})


def test_every_type_comes_back_as_it_went_in(client: Client, table: str) -> None:
    rows = make_rows(2)
    insert(client, table, rows, "types")
    found = client.query(f"SELECT * FROM {table} ORDER BY viewer NULLS FIRST", query_tz="UTC")
    values = [list(row) for row in found.result_rows]
    for row in values:
        row[1] = row[1].replace(tzinfo=UTC)
        row[5] = row[5].replace(tzinfo=UTC)
    assert values == rows


def test_ten_thousand_rows_in_ten_inserts_arrive(client: Client, table: str) -> None:
    for number in range(10):
        insert(client, table, make_rows(1000), f"batch-{number}")
    assert client.command(f"SELECT uniqExact(id) FROM {table}") == 10_000


def test_a_second_insert_with_the_same_token_is_dropped(client: Client, table: str) -> None:
    insert(client, table, make_rows(10), "same")
    insert(client, table, make_rows(10), "same")
    assert client.command(f"SELECT count() FROM {table}") == 10
    insert(client, table, make_rows(10), "other")
    assert client.command(f"SELECT count() FROM {table}") == 20


def test_a_replacing_table_keeps_the_newest_row(client: Client, table: str) -> None:
    (old,) = make_rows(1)
    new = [*old[:4], "new", NOW.replace(year=2027)]
    insert(client, table, [old], "old")
    insert(client, table, [new], "new")
    assert client.query(f"SELECT label FROM {table} FINAL").result_rows == [("new",)]


def test_parameters_are_values_never_sql(client: Client, table: str) -> None:
    rows = make_rows(3)
    insert(client, table, rows, "parameters")
    found = client.query(
        f"SELECT count() FROM {table} "
        "WHERE id IN {ids:Array(UUID)} AND seen_at = {at:DateTime64(6)}",
        parameters={"ids": [row[0] for row in rows[:2]], "at": NOW.replace(tzinfo=None)},
    )
    assert found.result_rows == [(2,)]
    hostile = "'; DROP TABLE x\n\t\\é{a:Int8}"
    asked = client.query("SELECT {text:String}", parameters={"text": hostile})
    assert asked.result_rows == [(hostile,)]


def test_long_parameters_sent_as_a_form_arrive(client: Client) -> None:
    ids = [uuid.uuid4() for _ in range(2000)]
    asked = client.query("SELECT {ids:Array(UUID)}", parameters={"ids": ids})
    assert asked.result_rows == [(ids,)]


def test_parameter_longer_than_a_server_takes_is_refused(client: Client) -> None:
    ids = [uuid.uuid4() for _ in range(4000)]
    with pytest.raises(DatabaseError, match="Field value too long"):
        client.query("SELECT {ids:Array(UUID)}", parameters={"ids": ids})


def test_a_large_result_is_streamed(client: Client) -> None:
    with client.query_row_block_stream("SELECT number FROM numbers(1000000)") as blocks:
        assert sum(row[0] for block in blocks for row in block) == 499_999_500_000


def test_an_error_in_the_middle_of_a_stream_is_an_error(client: Client) -> None:
    query = "SELECT throwIf(number = 900000) FROM numbers(1000000)"
    with (
        pytest.raises(StreamFailureError, match="Code: 395"),
        client.query_row_block_stream(query) as blocks,
    ):
        for _ in blocks:
            pass


def test_an_abandoned_stream_harms_nobody(server: Server, client: Client) -> None:
    where = urlsplit(server.address)
    for _ in range(5):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
        connection.request("POST", "/", b"SELECT number FROM numbers(50000000) FORMAT Native")
        connection.getresponse().read(1000)
        connection.close()
    assert client.command("SELECT 1") == 1


@pytest.mark.parametrize(
    ("query", "code", "status"),
    [
        ("SELECT * FROM no_such_table", 60, 404),
        ("SELECT * FROM no_such_database.table", 81, 404),
        ("SELEC 1", 62, 400),
        ("", 62, 400),
        ("SELECT no_such_column", 47, 400),
        ("SELECT {missing:UInt8}", 456, 400),
        ("SELECT throwIf(1)", 395, 500),
    ],
)
def test_an_error_carries_code_and_status(
    server: Server, query: str, code: int, status: int
) -> None:
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request("POST", "/", query.encode())
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == status
    assert response.headers["X-ClickHouse-Exception-Code"] == str(code)
    assert text.startswith(f"Code: {code}. DB::Exception: ")


def test_clients_see_the_code_of_an_error(client: Client, table: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        client.query("SELECT * FROM no_such_table")
    assert caught.value.code == 60
    with pytest.raises(DatabaseError) as caught:
        client.query("SELECT 1", settings={"max_threads": "many"})
    assert caught.value.code == 27
    with pytest.raises(DatabaseError) as caught:
        client.insert("no_such_table", [[1]], column_names=["a"], column_type_names=["UInt8"])
    assert caught.value.code == 60
    with pytest.raises(DatabaseError) as caught:
        client.raw_insert(table, COLUMNS, b"\x01\x01not native", fmt="Native")
    assert caught.value.code is not None
    assert client.command(f"SELECT count() FROM {table}") == 0


def test_an_insert_that_fails_while_its_rows_are_written_is_an_error(client: Client) -> None:
    client.command(
        "CREATE TABLE guarded (id UInt32, CONSTRAINT chk_id CHECK id < 200)"
        " ENGINE = MergeTree PARTITION BY id ORDER BY id"
    )
    for ids, code in (([200], 469), (list(range(101)), 252)):
        with pytest.raises(DatabaseError) as caught:
            client.insert("guarded", [[each] for each in ids], column_names=["id"])
        assert caught.value.code == code
    assert client.command("SELECT count() FROM guarded") == 0


def test_settings_and_database_of_a_request_end_with_it(server: Server, client: Client) -> None:
    assert client.command("SELECT getSetting('max_threads')", settings={"max_threads": 3}) == 3
    assert client.command("SELECT getSetting('max_threads')") != 3
    assert client.command("SELECT currentDatabase()") == "pin"
    assert connect(server).command("SELECT currentDatabase()") == "default"


def test_a_read_only_client_cannot_write(server: Server, table: str) -> None:
    reader = connect(server, database="pin", settings={"readonly": 1})
    assert reader.command(f"SELECT count() FROM {table}") == 0
    with pytest.raises(DatabaseError) as caught:
        reader.command(f"DROP TABLE {table}")
    assert caught.value.code == 164


def test_a_get_request_cannot_write(server: Server, table: str) -> None:
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request("GET", f"/?database=pin&query=DROP%20TABLE%20{table}")
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.headers["X-ClickHouse-Exception-Code"] == "164"


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip"])
def test_inserts_arrive_with_every_compression(
    server: Server, table: str, compress: bool | str
) -> None:
    writer = connect(server, database="pin", compress=compress)
    insert(writer, table, make_rows(1000), "compressed")
    assert writer.command(f"SELECT uniqExact(id) FROM {table}") == 1000


def test_a_command_distinguishes_an_empty_result_from_none(client: Client, table: str) -> None:
    assert client.command(f"SELECT label FROM {table}") == ""
    assert client.command(f"EXISTS TABLE {table}") == 1
    assert client.query(f"SELECT * FROM {table} LIMIT 0").column_names == tuple(COLUMNS)
    assert client.raw_query("SELECT 1 AS a", fmt="JSONEachRow") == b'{"a":1}\n'


def test_an_insert_whose_values_look_like_a_format_is_taken_as_it_is(
    client: Client, table: str
) -> None:
    client.command(
        f"INSERT INTO {table} (id, label) VALUES "
        "(generateUUIDv4(), 'a FORMAT Native\n'), (generateUUIDv4(), 'b')"
    )
    client.raw_insert(table, ["label"], b'{"label": "c"}\n', fmt="JSONEachRow")
    client.command(f"INSERT INTO {table} (id, label) SELECT generateUUIDv4(), 'd FORMAT CSV\n'")
    labels = client.query(f"SELECT label FROM {table} ORDER BY label").result_rows
    assert labels == [("a FORMAT Native\n",), ("b",), ("c",), ("d FORMAT CSV\n",)]


def test_eight_clients_insert_and_read_at_once(server: Server, table: str) -> None:
    start = threading.Barrier(8)
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            mine = connect(server, database="pin")
            start.wait(20)
            for turn in range(10):
                rows = make_rows(100)
                insert(mine, table, rows, f"{number}-{turn}")
                found = mine.query(
                    f"SELECT count() FROM {table} WHERE id IN {{ids:Array(UUID)}}",
                    parameters={"ids": [row[0] for row in rows]},
                )
                assert found.result_rows == [(100,)]
            mine.close()
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    counted = connect(server, database="pin").query(f"SELECT count(), uniqExact(id) FROM {table}")
    assert counted.result_rows == [(8000, 8000)]


def test_a_body_past_the_limit_is_refused(server: Server) -> None:
    where = urlsplit(server.address)
    bomb = gzip.compress(bytes(MAX_BODY_BYTES + 1), compresslevel=1)
    for headers, body in [
        ({"Content-Length": str(MAX_BODY_BYTES + 1)}, b""),
        ({"Content-Encoding": "gzip"}, bomb),
    ]:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        connection.request("POST", "/", body, headers)
        response = connection.getresponse()
        assert response.status == 413
        response.read()
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "many"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "zstd"},
        {"Content-Encoding": "lz4"},
        {"Content-Encoding": "br"},
    ],
)
def test_a_body_that_is_not_what_it_says_is_refused(
    server: Server, headers: dict[str, str]
) -> None:
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request("POST", "/", b"SELECT 1", headers)
    assert connection.getresponse().status == 400
    connection.close()


def test_the_summary_counts_rows(server: Server, client: Client, table: str) -> None:
    summary = client.insert(table, make_rows(5), column_names=COLUMNS)
    assert summary.written_rows == 5
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    counting = b"SELECT count() FROM numbers(1000) WHERE number % 2 = 0"
    connection.request("POST", "/?query_id=mine", counting)
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.headers["X-ClickHouse-Query-Id"] == "mine"
    told = json.loads(response.headers["X-ClickHouse-Summary"])
    assert (told["read_rows"], told["result_rows"]) == ("1000", "1")
