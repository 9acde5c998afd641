"""A frequent statement that PostgreSQL parses and plans once a connection.

Django's cursors write the values into the statement's text, so PostgreSQL parses and plans every
call. Heartbeats and openings are most of the traffic, each one short statement. libpq's own call
for prepared statements costs the web process at most half as much.
"""

import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from django.db import DEFAULT_DB_ALIAS, connection, connections
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format

_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_NOT_PREPARED = ("26000", "0A000")
"""SQLSTATEs: a pooler without prepared statements has given us another server connection, or a
migration has changed what the statement returns."""


class PreparedStatement:
    """One statement with `%(name)s` placeholders that PostgreSQL can infer the types of.

    Args:
        name: Of the prepared statement, the same in every connection.
        text: The statement; literal percent signs are not for it.
    """

    def __init__(self, name: str, text: str) -> None:
        self.text = text
        self._name = name.encode()
        self.fields = list(dict.fromkeys(_PLACEHOLDER.findall(text)))
        numbered = {field: f"${number}" for number, field in enumerate(self.fields, start=1)}
        self._numbered_text = _PLACEHOLDER.sub(lambda match: numbered[match[1]], text).encode()
        self._formats = [PyFormat.TEXT] * len(self.fields)
        self._is_prepared: WeakKeyDictionary[psycopg.Connection[Any], bool] = WeakKeyDictionary()

    def fetch_one(self, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run the statement on this thread's connection; returns its first row, if any.

        Inside a transaction, or while Django's statements are logged or wrapped, it is an ordinary
        statement of Django's.

        Raises:
            django.db.DatabaseError: as from a cursor.
        """
        django = connections[DEFAULT_DB_ALIAS]  # once; `connection` looks it up at each use
        with django.wrap_database_errors:
            if django.connection is None:  # saves a check for an event loop
                django.ensure_connection()
            database: psycopg.Connection[Any] = django.connection
            if (
                django.in_atomic_block
                or django.queries_logged
                or django.execute_wrappers
                or (is_prepared := self._is_prepared.get(database)) is False
            ):
                return self._fetch_by_cursor(parameters)
            try:
                if not is_prepared:
                    self._prepare(database)
                return self._fetch_prepared(database, parameters)
            except psycopg.Error as exc:
                if exc.sqlstate not in _NOT_PREPARED:
                    raise
                self._is_prepared[database] = False
                return self._fetch_by_cursor(parameters)

    def _fetch_by_cursor(self, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        with connection.cursor() as cursor:
            cursor.execute(self.text, parameters)
            row: tuple[Any, ...] | None = cursor.fetchone()
        return row

    def _prepare(self, database: psycopg.Connection[Any]) -> None:
        server = database.pgconn
        _check(server, server.prepare(self._name, self._numbered_text))
        self._is_prepared[database] = True

    def _fetch_prepared(
        self, database: psycopg.Connection[Any], parameters: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        server = database.pgconn
        adapter = Transformer(database)
        values = adapter.dump_sequence([parameters[field] for field in self.fields], self._formats)
        result = server.exec_prepared(
            self._name,
            values,  # type: ignore[arg-type]  # psycopg's annotation leaves out NULL
            result_format=Format.BINARY,
        )
        _check(server, result)
        if not result.ntuples:
            return None
        adapter.set_pgresult(result)
        return adapter.load_row(0, tuple)


def _check(server: psycopg.pq.abc.PGconn, result: psycopg.pq.abc.PGresult) -> None:
    if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        return
    if server.status == ConnStatus.BAD:
        raise psycopg.OperationalError("the connection is lost")
    raise psycopg.errors.error_from_result(result)
