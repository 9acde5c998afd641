"""The tables as PostgreSQL has them (design, section 3): every name, type, rule and trigger."""

import os
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from pinactivity.core.error_info import constraint
from pinactivity.core.ids import new_id
from tests.factories import make_session, make_view

pytestmark = pytest.mark.django_db

SCHEMA = "user_activity"
TABLES = [
    "activity_closer_runs",
    "developer_access",
    "outbox_messages",
    "property_object_view_stats",
    "property_object_view_stats_seen",
    "property_object_views",
    "sessions",
]
DJANGO_TABLES = {
    "auth_group",
    "auth_group_permissions",
    "auth_permission",
    "auth_user",
    "auth_user_groups",
    "auth_user_user_permissions",
    "django_admin_log",
    "django_content_type",
    "django_migrations",
    "django_session",
}


def query(statement: str, *parameters: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def value(statement: str, *parameters: str) -> Any:
    ((single,),) = query(statement, *parameters)
    return single


COLUMNS = {
    "sessions": {
        "id": "uuid NOT NULL",
        "anonymous_id": "uuid NOT NULL",
        "user_id": "uuid",
        "linked_at": "timestamp with time zone",
        "signed_in_at": "timestamp with time zone",
        "status": "text NOT NULL DEFAULT 'Active'::text",
        "created_at": "timestamp with time zone NOT NULL",
        "last_activity_at": "timestamp with time zone NOT NULL",
        "ended_at": "timestamp with time zone",
        "duration": "interval",
        "close_reason": "text",
        "version": "integer NOT NULL DEFAULT 1",
        "ip_address": "inet",
        "user_agent": "character varying(1024) NOT NULL",
        "browser": "text NOT NULL",
        "os": "text NOT NULL",
        "device_type": "text NOT NULL",
    },
    "property_object_views": {
        "id": "uuid NOT NULL",
        "session_id": "uuid NOT NULL",
        "property_object_id": "uuid NOT NULL",
        "user_id": "uuid",
        "view_source": "text NOT NULL",
        "filter_snapshot": "jsonb",
        "status": "text NOT NULL DEFAULT 'Active'::text",
        "created_at": "timestamp with time zone NOT NULL",
        "last_activity_at": "timestamp with time zone NOT NULL",
        "ended_at": "timestamp with time zone",
        "duration": "interval",
        "close_reason": "text",
        "version": "integer NOT NULL DEFAULT 1",
    },
    "property_object_view_stats": {
        "property_object_id": "uuid NOT NULL",
        "views_count": "bigint NOT NULL DEFAULT 0",
        "total_duration_seconds": "bigint NOT NULL DEFAULT 0",
        "last_viewed_at": "timestamp with time zone",
        "purged_views_count": "bigint NOT NULL DEFAULT 0",
        "purged_duration_seconds": "bigint NOT NULL DEFAULT 0",
    },
    "property_object_view_stats_seen": {
        "property_object_view_id": "uuid NOT NULL",
        "seen_at": "timestamp with time zone NOT NULL",
    },
    "outbox_messages": {
        "id": "bigint NOT NULL IDENTITY",
        "message_id": "uuid NOT NULL",
        "shard": "smallint NOT NULL DEFAULT 0",
        "topic": "text NOT NULL",
        "key": "text NOT NULL",
        "headers": "text NOT NULL",
        "payload": "text NOT NULL",
        "created_at": "timestamp with time zone NOT NULL DEFAULT statement_timestamp()",
        "published_at": "timestamp with time zone",
        "attempts": "integer NOT NULL DEFAULT 0",
        "next_attempt_at": "timestamp with time zone",
        "parked_at": "timestamp with time zone",
        "last_error": "text NOT NULL DEFAULT ''::text",
    },
    "activity_closer_runs": {
        "id": "uuid NOT NULL",
        "started_at": "timestamp with time zone NOT NULL",
        "finished_at": "timestamp with time zone",
        "cutoff": "timestamp with time zone NOT NULL",
        "closed_sessions": "integer NOT NULL DEFAULT 0",
        "closed_views": "integer NOT NULL DEFAULT 0",
        "failures": "integer NOT NULL DEFAULT 0",
        "backlog_remaining": "integer",
        "active_sessions": "bigint",
        "outcome": "text NOT NULL",
    },
    "developer_access": {
        "id": "bigint NOT NULL IDENTITY",
        "user_id": "integer NOT NULL",
        "developer_id": "uuid NOT NULL",
    },
}
# As pg_get_indexdef returns it: what is indexed, and of which rows.
INDEXES = {
    "sessions": {
        "sessions_pkey": "UNIQUE (id)",
        "ux_sessions_active_anonymous": "UNIQUE (anonymous_id) WHERE (status = 'Active'::text)",
        "ix_sessions_active_last_activity": "(last_activity_at) WHERE (status = 'Active'::text)",
        "ix_sessions_anonymous": "(anonymous_id, created_at DESC)",
        "ix_sessions_user": (
            "(user_id, created_at DESC) INCLUDE (last_activity_at, id) WHERE (user_id IS NOT NULL)"
        ),
        "ix_sessions_inactive_ended_at": "(ended_at) WHERE (status = 'Inactive'::text)",
    },
    "property_object_views": {
        "property_object_views_pkey": "UNIQUE (id)",
        "ux_property_object_views_active": (
            "UNIQUE (session_id, property_object_id) WHERE (status = 'Active'::text)"
        ),
        "ix_property_object_views_active_last_activity": (
            "(last_activity_at) WHERE (status = 'Active'::text)"
        ),
        "ix_property_object_views_session": (
            "(session_id, created_at) INCLUDE (property_object_id, id)"
        ),
        "ix_property_object_views_object": "(property_object_id, created_at)",
    },
    "outbox_messages": {
        "outbox_messages_pkey": "UNIQUE (id)",
        "ux_outbox_messages_message_id": "UNIQUE (message_id)",
        "ix_outbox_messages_pending": (
            "(shard, id) WHERE ((parked_at IS NULL) AND (published_at IS NULL))"
        ),
        "ix_outbox_messages_key": "(key)",
        "ix_outbox_messages_parked": "(parked_at) WHERE (parked_at IS NOT NULL)",
        "ix_outbox_messages_waiting": (
            "(shard, id) WHERE ((next_attempt_at IS NOT NULL) AND (parked_at IS NULL)"
            " AND (published_at IS NULL))"
        ),
    },
    "property_object_view_stats": {
        "property_object_view_stats_pkey": "UNIQUE (property_object_id)"
    },
    "property_object_view_stats_seen": {
        "property_object_view_stats_seen_pkey": "UNIQUE (property_object_view_id)",
        "ix_property_object_view_stats_seen_seen_at": "(seen_at)",
    },
    "activity_closer_runs": {
        "activity_closer_runs_pkey": "UNIQUE (id)",
        "ix_activity_closer_runs_started_at": "(started_at)",
    },
    "developer_access": {
        "developer_access_pkey": "UNIQUE (id)",
        "ux_developer_access_user_developer": "UNIQUE (user_id, developer_id)",
    },
}
CONSTRAINTS = {
    "sessions": {
        "sessions_pkey": "p",
        "chk_sessions_duration_nonneg": "c",
        "chk_sessions_activity_order": "c",
        "chk_sessions_status_fields": "c",
        "chk_sessions_linked": "c",
    },
    "property_object_views": {
        "property_object_views_pkey": "p",
        "fk_property_object_views_session": "f",
        "chk_property_object_views_duration_nonneg": "c",
        "chk_property_object_views_activity_order": "c",
        "chk_property_object_views_status_fields": "c",
    },
    "outbox_messages": {
        "outbox_messages_pkey": "p",
        "ux_outbox_messages_message_id": "u",
        "chk_outbox_messages_published_or_parked": "c",
    },
    "property_object_view_stats": {
        "property_object_view_stats_pkey": "p",
        "chk_property_object_view_stats_nonneg": "c",
    },
    "property_object_view_stats_seen": {"property_object_view_stats_seen_pkey": "p"},
    "activity_closer_runs": {
        "activity_closer_runs_pkey": "p",
        "chk_activity_closer_runs_finished": "c",
    },
    "developer_access": {
        "developer_access_pkey": "p",
        "fk_developer_access_user": "f",
        "ux_developer_access_user_developer": "u",
        "chk_developer_access_developer_not_nil": "c",
    },
}


def test_every_table_is_in_our_schema() -> None:
    tables = {
        (schema, table)
        for schema, table in query(
            "SELECT schemaname, tablename FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        )
    }
    assert {table for schema, table in tables if schema == SCHEMA} >= DJANGO_TABLES | set(TABLES)
    assert {schema for schema, _ in tables} == {SCHEMA}


@pytest.mark.parametrize("table", TABLES)
def test_columns_have_their_types(table: str) -> None:
    columns = query(
        "SELECT attname, concat(format_type(atttypid, atttypmod),"
        "   CASE WHEN attnotnull THEN ' NOT NULL' END,"
        "   CASE WHEN attidentity <> '' THEN ' IDENTITY' END,"
        "   ' DEFAULT ' || pg_get_expr(adbin, adrelid))"
        " FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
        " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
        f"{SCHEMA}.{table}",
    )
    assert dict(columns) == COLUMNS[table]


@pytest.mark.parametrize("table", TABLES)
def test_indexes_have_our_names_and_conditions(table: str) -> None:
    indexes = query(
        "SELECT relname, concat(CASE WHEN indisunique THEN 'UNIQUE ' END,"
        "   substring(pg_get_indexdef(indexrelid) FROM 'USING btree (.*)'))"
        " FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
        " WHERE indrelid = %s::regclass AND indisvalid",
        f"{SCHEMA}.{table}",
    )
    assert dict(indexes) == INDEXES[table]


@pytest.mark.parametrize("table", TABLES)
def test_constraints_have_our_names_and_are_in_force(table: str) -> None:
    # From PostgreSQL 18 on, NOT NULL has a row here too (contype n), named by PostgreSQL.
    constraints = query(
        "SELECT conname, contype::text, convalidated, condeferrable FROM pg_constraint"
        " WHERE conrelid = %s::regclass AND contype <> 'n'",
        f"{SCHEMA}.{table}",
    )
    assert {name: kind for name, kind, _, _ in constraints} == CONSTRAINTS[table]
    assert all(validated for _, _, validated, _ in constraints)
    assert not any(deferrable for _, _, _, deferrable in constraints)


def test_a_view_refers_to_its_session_and_restricts_its_deletion() -> None:
    assert value(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE conname = 'fk_property_object_views_session'"
    ) == ("FOREIGN KEY (session_id) REFERENCES sessions(id) ON DELETE RESTRICT")


@pytest.mark.parametrize("table", ["sessions", "property_object_views"])
def test_closed_rows_are_guarded_by_a_trigger_before_each_update(table: str) -> None:
    ((name, definition, function, enabled),) = query(
        "SELECT tgname, pg_get_triggerdef(pg_trigger.oid), pronamespace::regnamespace || '.' ||"
        "   proname, tgenabled::text"
        " FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid"
        " WHERE tgrelid = %s::regclass AND NOT tgisinternal",
        f"{SCHEMA}.{table}",
    )
    assert name == f"trg_{table}_closed_immutable"
    assert f"BEFORE UPDATE ON {SCHEMA}.{table} FOR EACH ROW WHEN" in definition
    assert function == f"{SCHEMA}.refuse_change_of_closed_row"
    assert enabled == "O"


CLOSED: dict[str, Any] = {
    "status": "Inactive",
    "ended_at": timezone.now(),
    "duration": timedelta(minutes=1),
    "close_reason": "Inactivity",
}
ANOTHER = {
    "uuid": "gen_random_uuid()",
    "timestamp with time zone": "statement_timestamp() - interval '1 year'",
    "interval": "interval '1 day'",
    "integer": "17",
    "text": "'Manual'",
    "jsonb": "'{}'",
}
FROZEN = [
    *(
        ("sessions", column)
        for column in COLUMNS["sessions"]
        if column not in {"ip_address", "user_agent", "browser", "os", "device_type"}
    ),
    *(("property_object_views", column) for column in COLUMNS["property_object_views"]),
]


@pytest.mark.parametrize(("table", "column"), FROZEN)
def test_no_column_of_a_closed_row_changes_inv_ses_006(table: str, column: str) -> None:
    session = make_session(user_id=new_id(), signed_in_at=timezone.now(), **CLOSED)
    make_view(session=session, filter_snapshot={"Price": 1}, **CLOSED)
    kind = COLUMNS[table][column].partition(" NOT NULL")[0]

    with pytest.raises(IntegrityError) as refused, transaction.atomic():
        query(f"UPDATE {table} SET {column} = {ANOTHER[kind]} RETURNING 1")

    assert constraint(refused.value) == f"trg_{table}_closed_immutable"


@pytest.mark.parametrize("column", ["ip_address", "user_agent", "browser", "os", "device_type"])
def test_device_of_a_closed_session_may_be_blanked(column: str) -> None:
    make_session(**CLOSED)
    blank = "NULL" if column == "ip_address" else "''"
    assert query(f"UPDATE sessions SET {column} = {blank} RETURNING 1") == [(1,)]


def test_only_our_functions_are_in_our_schema() -> None:
    functions = query("SELECT proname FROM pg_proc WHERE pronamespace = %s::regnamespace", SCHEMA)
    assert functions == [("refuse_change_of_closed_row",)]


@pytest.mark.parametrize("table", ["sessions", "property_object_views"])
def test_hot_tables_are_vacuumed_by_a_fixed_number_of_dead_rows(table: str) -> None:
    options = value("SELECT reloptions FROM pg_class WHERE oid = %s::regclass", table)
    assert set(options) == {
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=2000",
    }


@pytest.mark.parametrize("table", TABLES)
def test_every_table_survives_a_crash(table: str) -> None:
    assert value("SELECT relpersistence::text FROM pg_class WHERE oid = %s::regclass", table) == "p"


def test_unqualified_names_mean_our_tables() -> None:
    assert value("SHOW search_path") == "user_activity,public"
    assert value("SELECT current_schema()") == SCHEMA


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("lock_timeout", "5s"),
        ("statement_timeout", "30s"),
        ("idle_in_transaction_session_timeout", "1min"),
        ("transaction_isolation", "read committed"),
        ("default_transaction_isolation", "read committed"),
        ("application_name", "pinactivity"),
        ("client_encoding", "UTF8"),
        ("TimeZone", "UTC"),
    ],
)
def test_waits_are_bounded_on_every_connection(setting: str, expected: str) -> None:
    fresh = connection.copy()
    try:
        with fresh.cursor() as cursor:
            cursor.execute(f"SHOW {setting}")
            assert cursor.fetchone() == (expected,)
    finally:
        fresh.close()


def test_half_open_connections_are_noticed() -> None:
    connection.ensure_connection()
    parameters = connection.connection.info.get_parameters()
    assert {
        name: parameters.get(name)
        for name in (
            "connect_timeout",
            "keepalives",
            "keepalives_idle",
            "keepalives_interval",
            "keepalives_count",
            "tcp_user_timeout",
        )
    } == {
        "connect_timeout": "5",
        "keepalives": "1",
        "keepalives_idle": "30",
        "keepalives_interval": "10",
        "keepalives_count": "3",
        "tcp_user_timeout": "60000",
    }


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("tcp_keepalives_idle", "30"),
        ("tcp_keepalives_interval", "10"),
        ("tcp_keepalives_count", "3"),
        ("tcp_user_timeout", "60000"),
    ],
)
def test_postgresql_notices_a_host_that_is_gone(setting: str, expected: str) -> None:
    """It shows the socket's own value. Until then PostgreSQL keeps the locks of a lost host."""
    assert value(f"SHOW {setting}") == expected


def test_embedded_server_never_logs_a_rows_values() -> None:
    if "EMBEDDED_POSTGRES_LOG" not in os.environ:
        pytest.skip("PostgreSQL is not the embedded one: its settings are its operator's")
    assert value("SHOW log_error_verbosity") == "terse"


def test_settings_name_the_schema_that_the_tables_are_in() -> None:
    assert settings.DATABASE_SCHEMA == SCHEMA
