"""A small HTTP front that makes the chDB engine answer like a ClickHouse server.

Run as `python -m embedded.clickhouse_http FOLDER PORT`. It speaks as much of ClickHouse's HTTP
interface as clickhouse-connect's ordinary client uses: no sessions, no users, no external tables.
One engine handle a request, so settings and the current database of one never reach another.
"""

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import chdb
from chdb.state.sqlitelike import Connection

from embedded.http_body import BadBodyError, read_body, read_form

MAX_CONCURRENT_QUERIES: Final = 32
STOP_SECONDS: Final = 4.0
INSERT_PREFIX: Final = "insert-"
WILDCARDS: Final = frozenset("*?{}")
HOST: Final = "127.0.0.1"
MAX_FIELD_BYTES: Final = 128 * 1024
"""Of one parameter, in the address or in a form: http_max_field_value_size, as it comes."""

# Parameters that the HTTP interface itself consumes; every other one is a setting of the engine.
TRANSPORT_PARAMETERS: Final = frozenset(
    (
        "query",
        "database",
        "default_format",
        "query_id",
        "user",
        "password",
        "quota_key",
        "role",
        "buffer_size",
        "compress",
        "decompress",
        "wait_end_of_query",
        "session_id",
        "session_check",
        "session_timeout",
        "stacktrace",
        "client_protocol_version",
        "enable_http_compression",
        "http_zlib_compression_level",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "cancel_http_readonly_queries_on_client_close",
    )
)
SETTING_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# An INSERT whose rows follow in the body. Quoted names and strings are skipped whole; SELECT and
# VALUES mean that the statement carries its rows itself.
INSERT_WITH_DATA: Final = re.compile(
    rb"""(?P<into>\s*INSERT\s+INTO\b
        (?:`[^`]*`|"[^"]*"|'(?:\\.|[^'\\])*'|(?!\b(?:SELECT|VALUES)\b)[^`"'])*?)
        \bFORMAT\s+(?P<format>\w+)[ \t\r;]*(?:\n|\Z)""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
TRAILING_FORMAT: Final = re.compile(rb"\bFORMAT\s+(\w+)[\s;]*\Z", re.IGNORECASE)
ERROR_TEXT: Final = re.compile(r"Code: (?P<code>\d+)\. DB::.*", re.DOTALL)
STATUS_OF_CODE: Final = {
    **dict.fromkeys((60, 81, 218), HTTPStatus.NOT_FOUND),
    **dict.fromkeys((6, 26, 27, 38, 41, 43, 46, 47, 53, 62, 72, 115, 117, 456), 400),
    **dict.fromkeys((192, 193, 194, 516), HTTPStatus.FORBIDDEN),
}
STD_EXCEPTION: Final = 1001


@dataclass(frozen=True)
class Query:
    """A request, read whole: what to run, with what, where."""

    sql: bytes
    database: str
    settings: dict[str, str]
    parameters: dict[str, str]
    query_id: str
    streamed: bool


@dataclass(frozen=True)
class Answer:
    """A result: its format (None for a statement without result), its chunks, the summary."""

    format: str | None
    chunks: Iterator[bytes]
    summary: dict[str, str]


class Front(ThreadingHTTPServer):
    """The HTTP server around the one engine of this process."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: str, port: int) -> None:
        # The port first: a port in use is noticed before the engine touches the data.
        super().__init__((HOST, port), Handler)
        self.folder = folder
        self.slots = threading.BoundedSemaphore(MAX_CONCURRENT_QUERIES)
        # One handle stays open, else the engine would shut down between two requests.
        self.engine = chdb.connect(folder)

    def close_engine(self) -> None:
        """Wait for the running queries, within limits, and close the engine."""
        deadline = time.monotonic() + STOP_SECONDS
        for _ in range(MAX_CONCURRENT_QUERIES):
            self.slots.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self.engine.close()


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, kept alive between requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024
    server: Front

    def do_GET(self) -> None:
        """Answer /ping or run a query that only reads."""
        if urlsplit(self.path).path in ("/ping", "/replicas_status"):
            self._send_whole(HTTPStatus.OK, b"Ok.\n", {})
        else:
            self._serve(read_only=True)

    def do_POST(self) -> None:
        """Run a query or an insert."""
        self._serve(read_only=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it
        """Keep no access log: queries carry people's data."""

    def _serve(self, *, read_only: bool) -> None:
        query_id = ""
        try:
            query = self._read_query(read_only=read_only)
            query_id = query.query_id
            with self.server.slots:
                connection = chdb.connect(self.server.folder)
                try:
                    self._send_answer(query, run(connection, query))
                finally:
                    connection.close()
        except BadBodyError as exc:
            # The rest of the body may still be on its way, so the connection cannot be used again.
            self.close_connection = True
            self._send_whole(exc.status, f"{exc}\n".encode(), {})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as exc:
            code, text = describe(exc)
            status = STATUS_OF_CODE.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
            headers = {
                "X-ClickHouse-Exception-Code": str(code),
                "X-ClickHouse-Query-Id": query_id,
            }
            self._send_whole(status, f"{text}\n".encode(), headers)

    def _read_query(self, *, read_only: bool) -> Query:
        fields = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        body = read_body(self.rfile, self.headers)
        content_type = self.headers.get("Content-Type", "")
        if content_type.startswith("multipart/form-data"):
            fields |= read_form(body, content_type)
            body = b""
        if any(len(text.encode()) > MAX_FIELD_BYTES for text in fields.values()):
            raise ValueError("Code: 1000. DB::Exception: Field value too long. (POCO_EXCEPTION)")
        sql = b"\n".join(part for part in (fields.get("query", "").encode(), body) if part)
        parameters = {name[6:]: text for name, text in fields.items() if name.startswith("param_")}
        settings = {
            name: text
            for name, text in fields.items()
            if name not in TRANSPORT_PARAMETERS and not name.startswith("param_")
        }
        if read_only and settings.get("readonly", "0") == "0":
            # As ClickHouse does: GET never changes anything.
            settings["readonly"] = "2"
        if fields.get("default_format") and not TRAILING_FORMAT.search(sql):
            sql += f"\nFORMAT {fields['default_format']}".encode()
        return Query(
            sql=sql,
            database=fields.get("database") or self.headers.get("X-ClickHouse-Database") or "",
            settings=settings,
            parameters=parameters,
            query_id=fields.get("query_id") or str(uuid.uuid4()),
            streamed=fields.get("wait_end_of_query", "0") == "0",
        )

    def _send_answer(self, query: Query, answer: Answer) -> None:
        headers = {
            "X-ClickHouse-Query-Id": query.query_id,
            "X-ClickHouse-Summary": json.dumps(answer.summary),
            "X-ClickHouse-Timezone": "UTC",
        }
        if answer.format is not None:
            headers["X-ClickHouse-Format"] = answer.format
        if not query.streamed:
            self._send_whole(HTTPStatus.OK, b"".join(answer.chunks), headers)
            return
        # Most failures show with the first chunk, when the status can still tell them.
        first = next(answer.chunks, b"")
        tag = uuid.uuid4().hex[:16]
        self._send_head(
            HTTPStatus.OK,
            headers | {"Transfer-Encoding": "chunked", "X-ClickHouse-Exception-Tag": tag},
        )
        self._send_chunk(first)
        try:
            for chunk in answer.chunks:
                self._send_chunk(chunk)
        except OSError:
            raise
        except Exception as exc:
            _, text = describe(exc)
            self._send_chunk(
                f"__exception__\r\n{tag}\r\n{text}\n{len(text)} {tag}\r\n__exception__\r\n".encode()
            )
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        for name, text in headers.items():
            self.send_header(name, text)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._send_head(status, headers | {"Content-Length": str(len(body))})
        self.wfile.write(body)
        self.wfile.flush()

    def _send_chunk(self, chunk: bytes) -> None:
        # An empty chunk would end the body.
        if chunk:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def run(connection: Connection, query: Query) -> Answer:
    """Run a query on a fresh handle."""
    if not query.sql.strip():
        raise ValueError("Code: 62. DB::Exception: Empty query. (SYNTAX_ERROR)")
    if query.database:
        connection.query(f"USE {quote_name(query.database)}")
    if query.settings:
        # One statement: with readonly among them, a second SET would be refused.
        connection.query(f"SET {', '.join(map(assign, query.settings.items()))}")
    insert = INSERT_WITH_DATA.match(query.sql)
    if insert is not None:
        return run_insert(connection, insert, query.sql)
    trailing = TRAILING_FORMAT.search(query.sql)
    sql = query.sql.decode()
    if query.streamed and trailing is not None and trailing[1].lower() == b"native":
        stream = connection.send_query(sql, "Native", params=query.parameters)
        return Answer("Native", (chunk.bytes() for chunk in stream), {})
    if trailing is not None:
        result = connection.query(sql, "TabSeparated", params=query.parameters)
        return Answer(trailing[1].decode(), iter([result.bytes()]), summary_of(result))
    # A statement with a result prints at least the names, one without prints nothing: the only way
    # to tell them apart, and clients treat them differently.
    result = connection.query(sql, "TabSeparatedWithNames", params=query.parameters)
    names, newline, rows = result.bytes().partition(b"\n")
    return Answer("TabSeparated" if names + newline else None, iter([rows]), summary_of(result))


def run_insert(connection: Connection, insert: re.Match[bytes], sql: bytes) -> Answer:
    """Insert the rows that follow the statement.

    Out of a file: chDB's streaming insert keeps to itself what fails while rows are written, such
    as a violated constraint, and calls the insert done; rows within the statement end at the first
    byte that is a newline.
    """
    with tempfile.NamedTemporaryFile(prefix=INSERT_PREFIX, dir=find_insert_folder()) as file:
        file.write(memoryview(sql)[insert.end() :])
        file.flush()
        into, format_name = insert["into"].decode(), insert["format"].decode()
        name = escape(str(Path(file.name).absolute()))
        statement = f"{into} FROM INFILE '{name}' FORMAT {format_name}"
        result = connection.query(statement, "TabSeparated")
    summary = summary_of(result) | {
        "written_rows": str(result.rows_written()),
        "written_bytes": str(result.bytes_written()),
    }
    return Answer(None, iter([]), summary)


def find_insert_folder() -> str | None:
    """Return where rows wait to be inserted: with the data, since TMPDIR may be small.

    The engine would take a path with wildcards for a pattern; then it is TMPDIR after all.
    """
    return None if WILDCARDS & set(str(Path.cwd())) else "."


def summary_of(result: Any) -> dict[str, str]:
    """Build the summary header's content."""
    return {
        "read_rows": str(result.storage_rows_read()),
        "read_bytes": str(result.storage_bytes_read()),
        "result_rows": str(result.rows_read()),
        "elapsed_ns": str(int(result.elapsed() * 1e9)),
    }


def describe(error: Exception) -> tuple[int, str]:
    """Return the ClickHouse code and text of an error."""
    found = ERROR_TEXT.search(str(error))
    if found is not None:
        return int(found["code"]), found[0].strip()
    return STD_EXCEPTION, f"Code: {STD_EXCEPTION}. DB::Exception: {type(error).__name__}: {error}"


def quote_name(name: str) -> str:
    """Quote an identifier."""
    escaped = name.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{escaped}`"


def assign(setting: tuple[str, str]) -> str:
    """Write `name = 'value'`; quoted numbers are numbers to the engine."""
    name, text = setting
    if not SETTING_NAME.fullmatch(name):
        raise ValueError(f"Code: 115. DB::Exception: Unknown setting {name!r}. (UNKNOWN_SETTING)")
    return f"{name} = '{escape(text)}'"


def escape(text: str) -> str:
    """Write a text so that it can stand between single quotes."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


def main() -> None:
    """Serve until SIGTERM."""
    folder, port = sys.argv[1], int(sys.argv[2])
    # The engine would take an address with a question mark for one with options.
    os.chdir(folder)
    front = Front(".", port)
    for leftover in Path().glob(f"{INSERT_PREFIX}*"):
        leftover.unlink()
    signal.signal(
        signal.SIGTERM,
        # `shutdown` waits for the loop that runs in this very thread.
        lambda *_: threading.Thread(target=front.shutdown).start(),
    )
    front.serve_forever(poll_interval=0.05)
    front.server_close()
    front.close_engine()
    # Threads of idle connections may still wait for a request; there is nothing left to tidy.
    os._exit(0)


if __name__ == "__main__":
    main()
