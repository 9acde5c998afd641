"""The heartbeat endpoint against a no-op endpoint on the same server, and the bare statement.

`make bench NAME=heartbeat` starts granian on a database of its own. It measures in turn:

- heartbeats of many sessions;
- requests to a no-op endpoint behind the same middleware, the floor of every endpoint;
- the SQL statement of a heartbeat, sent straight to PostgreSQL.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from django.conf import settings
from django.db import connection

from bench.measure import BenchFailed, conclude, database_url, own_database, say
from sessions.models import EXTEND

HEARTBEAT, NO_OP, STATEMENT = "heartbeat", "no-op", "bare statement"
_USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/120.0 Safari/537.36"


@dataclass(frozen=True, slots=True)
class Round:
    """The measurement of one way for some seconds."""

    per_second: float
    latencies: list[float]
    """Seconds."""

    def percentile(self, rank: int) -> float:
        """Milliseconds."""
        return round(statistics.quantiles(self.latencies, n=100)[rank - 1] * 1000, 2)


def _make_sessions(count: int) -> list[tuple[str, str]]:
    """Insert Active sessions; return (SessionId, AnonymousId) of each."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at, user_agent,"
            " browser, os, device_type)"
            " SELECT gen_random_uuid(), gen_random_uuid(), statement_timestamp(),"
            " statement_timestamp(), 'bench', '', '', 'Unknown' FROM generate_series(1, %s)"
            " RETURNING id::text, anonymous_id::text",
            [count],
        )
        return list(cursor.fetchall())


# -- the server ------------------------------------------------------------------------------


@contextmanager
def _server(cpu: int | None) -> Iterator[int]:
    """Run granian as deploy/web.sh does, without limits on heartbeats; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "granian", "--interface", "wsgi", "--host", "127.0.0.1"),
        *("--port", str(port), "--blocking-threads", "4", "--log-level", "error"),
        "bench.wsgi:application",
    ]
    if cpu is not None:
        command = ["taskset", "--cpu-list", str(cpu), *command]
    environment = {**os.environ, "DATABASE_URL": database_url(), "RATE_LIMIT_HEARTBEATS": "0"}
    process = subprocess.Popen(command, cwd=settings.BASE_DIR, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchFailed("granian did not start.") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


# -- the load --------------------------------------------------------------------------------


def _requests(path: str, sessions: list[tuple[str, str]]) -> list[bytes]:
    """Build the requests beforehand, so that the load costs little beside the server."""
    requests = []
    for session_id, anonymous_id in sessions:
        body = f'{{"SessionId":"{session_id}"}}'
        requests.append(
            (
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: {_USER_AGENT}\r\n"
                f"X-Anonymous-Id: {anonymous_id}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}"
            ).encode()
        )
    return requests


def _http_caller(port: int, requests: list[bytes]) -> Callable[[], Callable[[], None]]:
    """Give each thread a connection and a share of the requests."""
    shares = itertools.count()

    def connect() -> Callable[[], None]:
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = itertools.cycle(requests[next(shares) % 16 :: 16])

        def call() -> None:
            client.sendall(next(own))
            answer = b""
            # Head and body may arrive separately; every answer here ends with its JSON object.
            while not answer.endswith(b"}"):
                answer += client.recv(4096)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise BenchFailed(f"The server answered {answer[:200]!r}.")

        return call

    return connect


def _statement_caller(sessions: list[tuple[str, str]]) -> Callable[[], Callable[[], None]]:
    shares = itertools.count()
    url = database_url()

    def connect() -> Callable[[], None]:
        database = psycopg.connect(url, autocommit=True, options="-c search_path=user_activity")
        own = itertools.cycle(sessions[next(shares) % 16 :: 16])
        after = settings.ACTIVITY_CLOSER.abandoned_after

        def call() -> None:
            session_id, anonymous_id = next(own)
            parameters: dict[str, Any] = {
                "session_id": session_id,
                "anonymous_id": anonymous_id,
                "abandoned_after": after,
                "now": None,
            }
            if database.execute(EXTEND.text, parameters).fetchone() is None:
                raise BenchFailed("A heartbeat found no session.")

        return call

    return connect


def _run(connect: Callable[[], Callable[[], None]], *, seconds: float, connections: int) -> Round:
    """Call from some threads; each waits for its answer before it calls again."""
    latencies: list[list[float]] = [[] for _ in range(connections)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(connections + 1)
    ends_at = [0.0]

    def work(own: list[float]) -> None:
        try:
            call = connect()
            call()
            barrier.wait()
            while (began := time.perf_counter()) < ends_at[0]:
                call()
                own.append(time.perf_counter() - began)
        except BaseException as failure:  # the main thread raises it
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(own,)) for own in latencies]
    for thread in threads:
        thread.start()
    ends_at[0] = time.perf_counter() + seconds
    with suppress(threading.BrokenBarrierError):  # a thread failed and recorded why
        barrier.wait()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    together = list(itertools.chain.from_iterable(latencies))
    return Round(len(together) / seconds, together)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="of a round")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--cpu", type=int, help="the core to tie the server to, as WEB_CPU does")
    options = parser.parse_args()
    with own_database():
        sessions = _make_sessions(options.sessions)
        with _server(options.cpu) as port:
            ways = {
                NO_OP: _http_caller(port, _requests("/api/user-activity/sessions/noop", sessions)),
                HEARTBEAT: _http_caller(
                    port, _requests("/api/user-activity/sessions/heartbeat", sessions)
                ),
                STATEMENT: _statement_caller(sessions),
            }
            rounds: dict[str, list[Round]] = {name: [] for name in ways}
            for repeat in range(1, options.repeats + 1):
                for name, connect in ways.items():
                    done = _run(connect, seconds=options.seconds, connections=options.connections)
                    rounds[name].append(done)
                    say(f"{repeat}/{options.repeats} {name}: {done.per_second:,.0f}/s")
    conclude(_result(rounds))


def _result(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    rates = {
        name: statistics.median(done.per_second for done in own) for name, own in rounds.items()
    }

    def latency(name: str, rank: int) -> float:
        return round(statistics.median(done.percentile(rank) for done in rounds[name]), 2)

    ratios = [
        heartbeat.per_second / floor.per_second
        for heartbeat, floor in zip(rounds[HEARTBEAT], rounds[NO_OP], strict=True)
    ]
    return {
        "name": "heartbeat",
        "heartbeats_per_second": round(rates[HEARTBEAT]),
        "noops_per_second": round(rates[NO_OP]),
        "statements_per_second": round(rates[STATEMENT]),
        "ratio": round(rates[HEARTBEAT] / rates[NO_OP], 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "latency_ms": {
            name: {"p50": latency(name, 50), "p99": latency(name, 99)} for name in rounds
        },
    }


if __name__ == "__main__":
    main()
