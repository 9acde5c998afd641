"""Servers start, answer, stop, and find their data again."""

import subprocess
import sys
import time
from pathlib import Path

import clickhouse_connect
import psutil
import psycopg
import pytest
import redis
from kafka import KafkaConsumer, KafkaProducer

from embedded import EmbeddedServerError, EmbeddedStack, attach, private_server
from embedded.stack import SERVERS, find_free_port
from tests.embedded.processes import PROJECT, is_alive


def test_the_whole_stack_answers_its_clients_and_leaves_nothing(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path, throwaway=True, environ={}) as stack:
        environment = stack.environment
        with psycopg.connect(environment["DATABASE_URL"]) as database:
            assert database.execute("SELECT current_database()").fetchone() == ("pinactivity",)
            settings = {
                name: database.execute(f"SHOW {name}").fetchone()
                for name in ("timezone", "log_error_verbosity", "listen_addresses")
            }
            assert settings == {
                "timezone": ("UTC",),
                "log_error_verbosity": ("terse",),
                "listen_addresses": ("127.0.0.1",),
            }
        with redis.Redis.from_url(environment["REDIS_URL"]) as broker:
            assert broker.ping()
        address = environment["KAFKA_BOOTSTRAP_SERVERS"]
        producer = KafkaProducer(bootstrap_servers=address)
        producer.send("greetings", b"hello").get(20)
        producer.close()
        consumer = KafkaConsumer(
            "greetings", bootstrap_servers=address, auto_offset_reset="earliest"
        )
        assert next(iter(consumer)).value == b"hello"
        consumer.close()
        client = clickhouse_connect.get_client(dsn=environment["CLICKHOUSE_URL"])
        assert client.command("SELECT 1") == 1
        client.close()
        pids = [server.pid for server in stack.servers.values() if server.pid is not None]
        assert len(pids) == len(stack.servers)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not Path(environment["EMBEDDED_CONTROL"]).exists()


def test_kept_data_is_found_again(tmp_path: Path) -> None:
    wanted = {"postgres", "clickhouse"}
    with EmbeddedStack(tmp_path, only=wanted, environ={}) as stack:
        with psycopg.connect(stack.environment["DATABASE_URL"]) as database:
            database.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        client = clickhouse_connect.get_client(dsn=stack.environment["CLICKHOUSE_URL"])
        client.command("CREATE TABLE kept (answer Int32) ENGINE = MergeTree ORDER BY answer")
        client.insert("kept", [[42]], column_names=["answer"])
        client.close()
    with EmbeddedStack(tmp_path, only=wanted, environ={}) as stack:
        with psycopg.connect(stack.environment["DATABASE_URL"]) as database:
            assert database.execute("SELECT answer FROM kept").fetchone() == (42,)
        client = clickhouse_connect.get_client(dsn=stack.environment["CLICKHOUSE_URL"])
        assert client.command("SELECT answer FROM kept") == 42
        client.close()


def test_only_throwaway_mode_gives_up_safety(tmp_path: Path) -> None:
    for throwaway, expected in ((False, "on"), (True, "off")):
        stack = EmbeddedStack(
            tmp_path / expected, throwaway=throwaway, only={"postgres"}, environ={}
        )
        with stack, psycopg.connect(stack.environment["DATABASE_URL"]) as database:
            assert database.execute("SHOW fsync").fetchone() == (expected,)


def test_an_address_in_the_environment_replaces_the_server(tmp_path: Path) -> None:
    given = {SERVERS[name].variable: f"given-{name}" for name in ("postgres", "kafka")}
    with EmbeddedStack(
        tmp_path, throwaway=True, only={"postgres", "kafka", "valkey"}, environ=given
    ) as stack:
        assert set(stack.servers) == {"valkey"}
        assert stack.environment["DATABASE_URL"] == "given-postgres"
        assert stack.environment["KAFKA_BOOTSTRAP_SERVERS"] == "given-kafka"


def test_a_stack_given_every_address_starts_no_server(tmp_path: Path) -> None:
    given = {server.variable: "given" for server in SERVERS.values()}
    with EmbeddedStack(tmp_path, environ=given) as stack:
        assert stack.servers == {}
        assert given.items() <= stack.environment.items()
    assert not (tmp_path / "logs").exists()


def test_a_wanted_port_is_used(tmp_path: Path) -> None:
    port = find_free_port()
    with EmbeddedStack(
        tmp_path, throwaway=True, only={"valkey"}, ports={"valkey": port}, environ={}
    ) as stack:
        assert stack.environment["REDIS_URL"] == f"redis://127.0.0.1:{port}/0"


def test_an_unknown_server_is_named() -> None:
    with pytest.raises(EmbeddedServerError, match="No embedded server is named mysql"):
        EmbeddedStack(None, throwaway=True, only={"mysql"})


def test_postgres_restarts_at_once_on_its_port_and_keeps_commits(tmp_path: Path) -> None:
    with private_server("postgres", tmp_path) as postgres:
        with psycopg.connect(postgres.address) as database:
            database.execute("CREATE TABLE kept AS SELECT 42 AS answer")
            database.commit()
            first = postgres.pid
            postgres.restart(immediate=True)
            with pytest.raises(psycopg.OperationalError):
                database.execute("SELECT 1")
        assert postgres.pid != first
        with psycopg.connect(postgres.address) as database:
            assert database.execute("SELECT answer FROM kept").fetchone() == (42,)
        postgres.kill()
        assert postgres.pid is None
        postgres.start()
        with psycopg.connect(postgres.address) as database:
            assert database.execute("SELECT answer FROM kept").fetchone() == (42,)
        postgres.restart()
        assert "received fast shutdown request" in postgres.log.read_text()


def test_the_postgres_log_shows_errors_without_their_detail(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path, throwaway=True, only={"postgres"}, environ={}) as stack:
        with psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as database:
            database.execute("CREATE TABLE people (address text NOT NULL, age int NOT NULL)")
            with pytest.raises(psycopg.errors.NotNullViolation):
                database.execute("INSERT INTO people VALUES (%s, NULL)", ["secret street"])
        log = Path(stack.environment["EMBEDDED_POSTGRES_LOG"]).read_text()
        assert "ERROR:" in log
        assert "secret street" not in log


def test_a_frozen_broker_goes_on_when_thawed() -> None:
    with private_server("kafka") as broker:
        broker.freeze()
        with pytest.raises(TimeoutError):
            broker.check()
        broker.thaw()
        broker.check()


def test_a_frozen_server_is_stopped_as_well() -> None:
    with private_server("kafka") as broker:
        pid = broker.pid
        assert pid is not None
        broker.freeze()
    assert not psutil.pid_exists(pid)


def test_another_process_can_restart_a_server(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path, throwaway=True, only={"postgres"}, environ={}) as stack:
        control = Path(stack.environment["EMBEDDED_CONTROL"])
        handle = attach("postgres", control)
        assert handle.address == stack.environment["DATABASE_URL"]
        first = handle.pid
        handle.restart(immediate=True)
        assert stack.servers["postgres"].pid == handle.pid != first
        with pytest.raises(EmbeddedServerError, match="No embedded valkey is running"):
            attach("valkey", control)


def test_a_temporary_folder_is_removed() -> None:
    with EmbeddedStack(None, throwaway=True, only={"valkey"}, environ={}) as stack:
        folder = stack.servers["valkey"].data_dir
        assert folder.exists()
    assert not folder.exists()


def test_a_forked_child_does_not_keep_servers_alive(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from embedded import EmbeddedStack\n"
        "stack = EmbeddedStack(Path(sys.argv[1]), throwaway=True, only={'valkey'}, environ={})\n"
        "stack.start()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.closerange(0, 3)\n"
        "    time.sleep(60)\n"
        "print(stack.servers['valkey'].pid, child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    ).stdout
    server, child = (psutil.Process(int(pid)) for pid in printed.split())
    deadline = time.monotonic() + 20
    while is_alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(server)
    child.kill()
