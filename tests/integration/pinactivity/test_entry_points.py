"""Every way into the service as a real process: it starts, stops, or says why it does not."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import psycopg
import pytest
from django.db import connection

from embedded.stack import find_free_port
from sessions.models import Session
from tests.factories import silent_session

PROJECT = Path(__file__).resolve().parents[3]
SERVERS = ("DATABASE_URL", "REDIS_URL", "KAFKA_BOOTSTRAP_SERVERS", "CLICKHOUSE_URL")
CELERY = (sys.executable, "-m", "celery", "-A", "pinactivity.celery")
ENTRY_POINTS = ("manage.py", "worker", "beat", "web")
PATIENCE = 60.0


def command(name: str, *, folder: Path, port: int) -> list[str]:
    """Build an entry point's command line; what it writes goes into `folder`."""
    return {
        "manage.py": [
            *(sys.executable, "manage.py", "replay_visits"),
            *("data/web-visits-1995-08-01.csv", "--if-new"),
        ],
        "worker": [*CELERY, "worker", "--pool", "threads", "--concurrency", "2"],
        "beat": [*CELERY, "beat", "--schedule", str(folder / "schedule"), "--pidfile="],
        "web": [
            *(sys.executable, "-m", "granian", "--interface", "wsgi", "--no-ws"),
            *("--host", "127.0.0.1", "--port", str(port), "--blocking-threads", "2"),
            "pinactivity.wsgi:application",
        ],
    }[name]


def environment(**changes: str) -> dict[str, str]:
    """Build a sound development environment from scratch, with changes."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", *SERVERS) if name in os.environ}
    return {**kept, "PINACTIVITY_DEVELOPMENT": "true", "LC_ALL": "C.UTF-8", **changes}


@dataclass
class Running:
    """A process whose output goes to a file, and everything that it has started."""

    process: "subprocess.Popen[bytes]"
    output_file: Path
    port: int

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fail with the output when the process ends or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end; hold it to leaving no process behind."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        return code

    def get(self, path: str) -> tuple[int, str]:
        """Ask by HTTP; (0, "") while nobody answers."""
        status, body, _ = self.request(
            b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()
        )
        return status, body

    def request(self, raw: bytes) -> tuple[int, str, Mapping[str, str]]:
        """Send the bytes of a request and read the answer."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            link.connect()
            link.send(raw)
            answer = http.client.HTTPResponse(link.sock)
            answer.begin()
            return answer.status, answer.read().decode(), dict(answer.headers)
        except (OSError, http.client.HTTPException):
            return 0, "", {}
        finally:
            link.close()


@contextmanager
def started(name: str, *, folder: Path, env: Mapping[str, str]) -> Iterator[Running]:
    """Start an entry point; whatever a failed test leaves of it is killed."""
    port = find_free_port()
    output_file = folder / f"{name}.log"
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            command(name, folder=folder, port=port),
            cwd=PROJECT,
            env={**env, "METRICS_PORT": env.get("METRICS_PORT", str(port))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Running(process, output_file, port)
    finally:
        if process.poll() is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Refusal:
    code: int
    output: str


def refusals(folder: Path, env: Mapping[str, str]) -> dict[str, Refusal]:
    """Start all entry points at once in an environment that none of them may accept."""
    found: dict[str, Refusal] = {}
    processes = {name: started(name, folder=folder, env=env) for name in ENTRY_POINTS}
    entered = {name: process.__enter__() for name, process in processes.items()}
    try:
        for name, running in entered.items():
            found[name] = Refusal(running.process.wait(PATIENCE), running.output)
    finally:
        for process in processes.values():
            process.__exit__(None, None, None)
    return found


# -- a broken environment ------------------------------------------------------------------

SECRETS = ("hunter2-secret-key", "hunter2-password", "hunter2-batch", "hunter2-jwt")
INVALID = {
    "SECRET_KEY_FILE": "/nonexistent/hunter2-secret-key",
    "ALLOWED_HOSTS": None,  # required outside development
    "DATABASE_URL": "mysql://user:hunter2-password@db/name",
    "DATABASE_LOCK_TIMEOUT": "00:00:00",  # which would mean: wait for ever
    "DATABASE_STATEMENT_TIMEOUT": "30.00:00:00",  # more milliseconds than PostgreSQL counts
    "REDIS_URL": "",
    "KAFKA_BOOTSTRAP_SERVERS": "",
    "KAFKA_TOPIC_PARTITIONS": "0",
    "KAFKA_TOPIC_REPLICATION": "11",
    "KAFKA_TOPIC_RETENTION": "29.23:59:59",
    "ACTIVITY_CLOSER_INACTIVITY_THRESHOLD": "00:09:59",
    "ACTIVITY_CLOSER_POLLING_INTERVAL": "often",
    "ACTIVITY_CLOSER_BATCH_SIZE": "hunter2-batch",
    "ACTIVITY_CLOSER_MAX_RUN_DURATION": "00:00:00",
    "ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION": "501",
    "ACTIVITY_CLOSER_SINGLE_INSTANCE": "perhaps",
    "ACTIVITY_RETENTION_AGE": "89.23:59:59",
    "ACTIVITY_RETENTION_MAX_RUN_DURATION": "01:00:01",
    "OUTBOX_BATCH_SIZE": "0",
    "OUTBOX_POLLING_INTERVAL": "00:00:00",
    "OUTBOX_DELIVERY_TIMEOUT": "00:00:16",
    "OUTBOX_SHARDS": "3",
    "OUTBOX_PUBLISHED_KEPT": "00:59:59",
    "VIEW_STATS_SEEN_KEPT": "89.00:00:00",
    "CLICKHOUSE_URL": "tcp://default:hunter2-password@host:9000/",
    "DEV_STATS_BATCH_SIZE": "1001",
    "DEV_STATS_FLUSH_INTERVAL": "00:01:01",
    "DEV_STATS_STORAGE_TIMEOUT": "00:00:00",
    "DEV_STATS_RECONCILED": "00:59:59",
    "DEV_STATS_CLUSTER": "it's",
    "CONSUMER_POISON_LIMIT": "-1",
    "CONSUMER_MAX_POLL_INTERVAL": "00:00:01",
    "CONSUMER_SESSION_TIMEOUT": "00:00:05",
    "RATE_LIMIT_START_PER_ADDRESS": "-1",
    "RATE_LIMIT_PER_ANONYMOUS_ID": "1000001",
    "RATE_LIMIT_PER_ADDRESS": "few",
    "RATE_LIMIT_HEARTBEATS": "-1",
    "JWT_ISSUER": None,  # as is the audience
    "JWT_AUDIENCE": None,
    "JWT_JWKS_URL": "http://identity.example/keys",
    "JWT_DEVELOPMENT_SECRET": "hunter2-jwt",
    "SECURE_SSL_REDIRECT": "perhaps",
    "TRUSTED_PROXY_COUNT": "-1",
    "METRICS_PORT": "70000",
    "LOG_LEVEL": "LOUD",
}


@pytest.fixture(scope="module")
def refused_for_the_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    variables = {name: text for name, text in INVALID.items() if text is not None}
    return refusals(tmp_path_factory.mktemp("broken"), {**kept, **variables})


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_broken_environment_refuses_the_start_and_names_every_variable(
    name: str, refused_for_the_environment: dict[str, Refusal]
) -> None:
    refusal = refused_for_the_environment[name]
    assert refusal.code not in {0, None}
    assert [name for name in INVALID if f"{name}:" not in refusal.output] == []


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_broken_environment_is_reported_without_a_traceback(
    name: str, refused_for_the_environment: dict[str, Refusal]
) -> None:
    assert "Traceback" not in refused_for_the_environment[name].output


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_broken_environment_is_reported_without_its_values(
    name: str, refused_for_the_environment: dict[str, Refusal]
) -> None:
    output = refused_for_the_environment[name].output
    assert [secret for secret in SECRETS if secret in output] == []


# -- failing checks ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serializable_database() -> Iterator[str]:
    """A database whose transactions are not READ COMMITTED by default."""
    url = os.environ["DATABASE_URL"]
    name = f"serializable_{uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
        try:
            server.execute(
                f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'".encode()
            )
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="module")
def refused_for_the_checks(
    tmp_path_factory: pytest.TempPathFactory, serializable_database: str
) -> dict[str, Refusal]:
    return refusals(
        tmp_path_factory.mktemp("checks"),
        environment(DATABASE_URL=serializable_database, CSRF_TRUSTED_ORIGINS="no-scheme.example"),
    )


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_failing_system_check_refuses_the_start(
    name: str, refused_for_the_checks: dict[str, Refusal]
) -> None:
    refusal = refused_for_the_checks[name]
    assert refusal.code not in {0, None}
    assert "4_0.E001" in refusal.output
    assert "Traceback" not in refusal.output


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_isolation_other_than_read_committed_refuses_the_start(
    name: str, refused_for_the_checks: dict[str, Refusal]
) -> None:
    assert "pinactivity.E001" in refused_for_the_checks[name].output


# -- a healthy life ------------------------------------------------------------------------


@pytest.fixture
def sound(transactional_db: None) -> dict[str, str]:
    """An environment on the tests' own database, which is migrated."""
    url = urlsplit(os.environ["DATABASE_URL"])
    return environment(
        DATABASE_URL=url._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    )


def test_worker_and_beat_start_serve_metrics_and_end_on_sigterm(
    tmp_path: Path, sound: dict[str, str]
) -> None:
    with (
        started("worker", folder=tmp_path, env=sound) as worker,
        started("beat", folder=tmp_path, env=sound) as beat,
    ):
        # The worker handles SIGTERM from "ready" on; beat does before it serves metrics.
        worker.wait_until(lambda: "ready" in worker.output)
        for process in (worker, beat):
            process.wait_until(lambda process=process: process.get("/metrics")[0] == 200)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        exported = worker.get("/metrics")[1]
        assert "activity_closer_run_duration_ms" in exported
        # An alert counts its increase, which Prometheus sees only from a value that it has seen.
        assert 'activity_retention_runs_total{outcome="Succeeded"} 0.0' in exported

        assert (worker.stop(), beat.stop()) == (0, 0)
        assert "Traceback" not in worker.output + beat.output


def healthz(process: Running) -> tuple[int, dict[str, Any]]:
    status, body = process.get("/healthz")
    return status, json.loads(body or "{}")


def test_health_of_worker_and_beat_is_their_progress(tmp_path: Path, sound: dict[str, str]) -> None:
    """An idle worker is healthy until rows are overdue; beat is healthy while it sends."""
    env = {**sound, "ACTIVITY_CLOSER_POLLING_INTERVAL": "00:00:01"}
    with started("worker", folder=tmp_path, env=env) as worker:
        worker.wait_until(lambda: healthz(worker)[0] == 200)

        session = silent_session(minutes=13)  # and beat does not run
        worker.wait_until(lambda: healthz(worker)[0] == 503)
        _, body = healthz(worker)
        assert (body["Status"], body["Overdue"]) == ("stuck", ["closer"])

        with started("beat", folder=tmp_path, env=env) as beat:
            closed = Session.objects.filter(id=session.id, status="Inactive")
            worker.wait_until(lambda: closed.exists() and healthz(worker)[0] == 200)
            assert healthz(beat) == (200, {"Status": "live", "SilentSeconds": ANY})


@pytest.mark.parametrize("name", ["worker", "beat"])
def test_port_in_use_refuses_the_start(name: str, tmp_path: Path, sound: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with started(name, folder=tmp_path, env={**sound, "METRICS_PORT": port}) as process:
            assert process.process.wait(PATIENCE) != 0
            assert f"port {port} is not free" in process.output
            assert "Traceback" not in process.output


def beat_request(*, headers: bytes, body: bytes) -> bytes:
    return b"POST /api/user-activity/sessions/heartbeat HTTP/1.1\r\n%s\r\n%s" % (
        b"Host: localhost\r\nContent-Type: application/json\r\n" + headers,
        body,
    )


def test_web_starts_serves_and_ends_on_sigterm(tmp_path: Path, sound: dict[str, str]) -> None:
    identity = f"X-Anonymous-Id: {uuid4()}\r\n".encode()
    document = f'{{"SessionId": "{uuid4()}"}}'.encode()
    length = b"Content-Length: %d\r\n" % len(document)
    # Granian hands over no header that is not ASCII: a User-Agent like that is absent then.
    cases: dict[str, tuple[bytes, set[int]]] = {
        "plain": (
            beat_request(headers=identity + b"User-Agent: x\r\n" + length, body=document),
            {200},
        ),
        "a User-Agent in UTF-8": (
            beat_request(headers=identity + "User-Agent: Ж😀\r\n".encode() + length, body=document),
            {200, 400},
        ),
        "a User-Agent of any bytes": (
            beat_request(
                headers=identity + b"User-Agent: \xff\xfe\x80\r\n" + length, body=document
            ),
            {200, 400},
        ),
        "a device id twice": (
            beat_request(headers=identity * 2 + b"User-Agent: x\r\n" + length, body=document),
            {200, 400},
        ),
        "NUL in a path": (b"GET /api/%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        "bytes in a path": (b"GET /api/%ff HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        "another host": (b"GET /api HTTP/1.1\r\nHost: evil.example\r\n\r\n", {400}),
        "a strange host": (b"GET /api HTTP/1.1\r\nHost: a b\r\n\r\n", {400}),
    }
    with started("web", folder=tmp_path, env=sound) as web:
        web.wait_until(lambda: web.get("/health/ready")[0] == 200)
        answers = {name: web.request(raw) for name, (raw, _) in cases.items()}
        live, metrics = web.get("/health/live"), web.get("/metrics")

        assert web.stop() == 0

    assert {
        name: answer[0] for name, answer in answers.items() if answer[0] not in cases[name][1]
    } == {}
    assert live[0] == metrics[0] == 200
    assert "activity_active_sessions 1.0" in metrics[1]
    assert "Traceback" not in web.output


def test_management_command_ends_with_0(tmp_path: Path, sound: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--database", "default", "--fail-level", "WARNING"],
        cwd=PROJECT,
        env=sound,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
