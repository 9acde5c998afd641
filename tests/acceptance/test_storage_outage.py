"""PostgreSQL goes away under load and comes back: the web answers 503, then serves as before.

A PostgreSQL of this module's own, a real web server on it, and clients in threads.
"""

import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
import pytest
from django.conf import settings

from embedded.postgres import Postgres
from embedded.stack import find_free_port, private_server
from pinactivity.core.ids import new_id
from tests.api import HEARTBEAT, OPEN, START, view_heartbeat
from tests.conftest import USER_AGENT
from tests.processes import GRANIAN, environment, running, wait_until

pytestmark = pytest.mark.timeout(300)

THREADS = 8
BOUND = 15.0
"""Seconds that no answer may take: PostgreSQL's connect time-out is 5, its lock time-out 5."""


@dataclass(frozen=True)
class Answer:
    begun: float
    status: int
    """0 when none came within BOUND."""
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def is_served(self) -> bool:
        return self.status in {200, 201}


class Browser:
    """One device, on a connection of its own that it keeps."""

    def __init__(self, port: int) -> None:
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND)
        self._headers = {
            "User-Agent": USER_AGENT,
            "X-Anonymous-Id": str(new_id()),
            "Content-Type": "application/json",
        }
        self.session_id = self.view_id = str(new_id())

    def start(self) -> Answer:
        return self._send("POST", START)

    def send_heartbeat(self) -> Answer:
        return self._send("POST", HEARTBEAT, {"SessionId": self.session_id})

    def open(self) -> Answer:
        body = {
            "SessionId": self.session_id,
            "PropertyObjectId": str(new_id()),
            "ViewSource": "Map",
        }
        return self._send("POST", OPEN, body)

    def extend_view(self) -> Answer:
        return self._send("PUT", view_heartbeat(self.view_id))

    def get(self, path: str) -> int:
        return self._send("GET", path).status

    def _send(self, method: str, path: str, body: dict[str, str] | None = None) -> Answer:
        begun = time.monotonic()
        try:
            raw = None if body is None else json.dumps(body).encode()
            self._link.request(method, path, raw, self._headers)
            response = self._link.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(begun, response.status, headers, json.loads(response.read()))
        except (OSError, http.client.HTTPException):
            self._link.close()
            return Answer(begun, 0, {}, {})
        if answer.is_served:
            self.session_id = answer.body.get("SessionId", self.session_id)
            self.view_id = answer.body.get("PropertyObjectViewId", self.view_id)
        return answer

    def close(self) -> None:
        self._link.close()


@dataclass
class Load:
    """Devices that call without a pause, each in a thread, until the end of the block."""

    port: int
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def _run(self, seed: int) -> None:
        choose = random.Random(seed)
        with contextlib.closing(Browser(self.port)) as browser:
            while not self._stop.is_set():
                name = choose.choice(
                    ["start", "send_heartbeat", "send_heartbeat", "open", "extend_view"]
                )
                self.answers.append((name, getattr(browser, name)()))

    def count(self, *statuses: int, since: float = 0.0) -> Counter[str]:
        """Count the answers with one of the statuses by call, for requests since `since`."""
        return Counter(
            name
            for name, answer in list(self.answers)
            if answer.status in statuses and answer.begun >= since
        )

    def wait_for(self, each: int, *statuses: int, since: float = 0.0) -> None:
        """Wait until each of the four calls has `each` answers with one of the statuses."""

        def enough() -> bool:
            counts = self.count(*statuses, since=since)
            return len(counts) == 4 and min(counts.values()) >= each

        wait_until(enough, what=f"{each} answers {statuses} of each call")

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(THREADS)
        self._futures = [self._pool.submit(self._run, seed) for seed in range(THREADS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)
        for future in self._futures:
            future.result()


@dataclass(frozen=True)
class Service:
    postgres: Postgres
    web: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def processes(self) -> set[int]:
        """Return the web server's process and those that it has started."""
        parent = psutil.Process(self.web.pid)
        return {self.web.pid, *(child.pid for child in parent.children(recursive=True))}

    def browser(self) -> "contextlib.closing[Browser]":
        return contextlib.closing(Browser(self.port))

    def stored_sessions(self) -> set[str]:
        with psycopg.connect(self.postgres.address) as connection:
            rows = connection.execute("SELECT id FROM user_activity.sessions").fetchall()
        return {str(row[0]) for row in rows}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The web server on a PostgreSQL that this module may stop, without rate limits."""
    log = tmp_path_factory.mktemp("web") / "log"
    port = find_free_port()
    argv = [
        *(*GRANIAN, "--interface", "wsgi", "--host", "127.0.0.1"),
        *("--port", str(port), "--blocking-threads", str(THREADS)),
        *("--blocking-threads-idle-timeout", "600", "pinactivity.wsgi:application"),
    ]
    with private_server("postgres") as postgres:
        assert isinstance(postgres, Postgres)
        variables = {
            "DATABASE_URL": postgres.address,
            "RATE_LIMIT_START_PER_ADDRESS": "0",
            "RATE_LIMIT_PER_ANONYMOUS_ID": "0",
            "RATE_LIMIT_PER_ADDRESS": "0",
            "RATE_LIMIT_HEARTBEATS": "0",
        }
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=settings.BASE_DIR,
            env=environment(**variables),
            check=True,
        )
        with running(argv, log, **variables) as web:
            found = Service(postgres, web, port, log)
            wait_until(lambda: is_ready(found), what="the start of the web")
            yield found
            stop_web(web)


def stop_web(web: "subprocess.Popen[bytes]") -> None:
    """Stop the web server by SIGTERM: a kill would leave its worker running."""
    web.send_signal(signal.SIGTERM)
    assert web.wait(30) == 0


def is_ready(service: Service) -> bool:
    with service.browser() as browser:
        return browser.get("/health/ready") == 200


def assert_served_or_asked_to_retry(load: Load) -> None:
    for name, answer in load.answers:
        assert answer.status in {200, 201, 503}, (name, answer)
        if answer.status == 503:
            assert answer.headers["content-type"] == "application/problem+json"
            assert int(answer.headers["retry-after"]) > 0
            assert answer.body["code"] == "USER_ACTIVITY_STORAGE_UNAVAILABLE"


STOPS: dict[str, Callable[[Postgres], None]] = {
    "an orderly stop": lambda postgres: postgres.stop(),
    "a crash": lambda postgres: postgres.kill(),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_calls_are_served_or_asked_to_retry_and_served_again_within_5_seconds_of_the_return(
    service: Service, stop: Callable[[Postgres], None]
) -> None:
    processes = service.processes()
    with Load(service.port) as load:
        load.wait_for(20, 200, 201)

        stop(service.postgres)
        gone = time.monotonic()
        try:
            load.wait_for(20, 503, since=gone)
            with service.browser() as browser:
                assert browser.get("/health/ready") == 503
                assert browser.get("/health/live") == 200
            assert not load.count(200, 201, since=gone)
        finally:
            service.postgres.start()

        back = time.monotonic() + 5
        load.wait_for(50, 200, 201, since=back)

    assert not load.count(503, since=back)
    assert_served_or_asked_to_retry(load)
    assert is_ready(service)
    assert service.processes() == processes
    answered = {
        answer.body["SessionId"] for _, answer in load.answers if "SessionId" in answer.body
    }
    assert len(answered) >= THREADS
    assert answered <= service.stored_sessions()
    assert "Traceback" not in service.log.read_text()


def test_restart_at_once_under_load_is_served_or_asked_to_retry(service: Service) -> None:
    processes = service.processes()
    with Load(service.port) as load:
        for _ in range(3):
            since = time.monotonic()
            load.wait_for(5, 200, 201, since=since)
            service.postgres.restart(immediate=True)
        back = time.monotonic() + 5
        load.wait_for(50, 200, 201, since=back)

    assert not load.count(503, since=back)
    assert_served_or_asked_to_retry(load)
    assert service.processes() == processes


def test_restart_that_nobody_noticed_fails_no_call(service: Service) -> None:
    """The restart closes the connection of each thread of the web process."""
    with Load(service.port) as load:
        load.wait_for(50, 200, 201)

    service.postgres.restart()

    with Load(service.port) as load:
        load.wait_for(20, 200, 201)
    assert {answer.status for _, answer in load.answers} <= {200, 201}


def test_web_that_starts_while_postgresql_is_away_serves_once_it_is_there(
    service: Service, tmp_path: Path
) -> None:
    port = find_free_port()
    argv = [
        *(*GRANIAN, "--interface", "wsgi", "--host", "127.0.0.1"),
        *("--port", str(port), "--blocking-threads", "2", "pinactivity.wsgi:application"),
    ]
    address = service.postgres.address
    service.postgres.stop()
    try:
        with running(argv, tmp_path / "log", DATABASE_URL=address) as web:
            late = Service(service.postgres, web, port, tmp_path / "log")
            with late.browser() as browser:
                wait_until(lambda: browser.get("/health/live") == 200, what="the start of the web")
                assert browser.start().status == 503
                service.postgres.start()
                assert browser.start().status == 201
                assert browser.get("/health/ready") == 200
            stop_web(web)
    finally:
        service.postgres.start()
