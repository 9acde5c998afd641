"""The service's own processes, as an operator starts them, on the test's database."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.db import connection

MANAGE = [sys.executable, "manage.py"]
# Modules, not scripts: the first line of a script cannot hold every path.
GRANIAN = [sys.executable, "-m", "granian"]
CELERY = [sys.executable, "-m", "celery", "-A", "pinactivity.celery"]
_SHOWN_LINES = 100
"""Of a log, when a test fails."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the test's database in place of the given one."""
    url = urlsplit(os.environ["DATABASE_URL"])
    name = connection.settings_dict["NAME"]
    return {
        **os.environ,
        # The embedded broker lets a group's first member wait for half of it, and goes by the
        # first one that a group ever named.
        "CONSUMER_SESSION_TIMEOUT": "00:00:06",
        "DATABASE_URL": urlunsplit(url._replace(path=f"/{name}")),
        **variables,
    }


@contextmanager
def running(argv: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; at the end of the block it is killed if it still lives.

    When the block fails, pytest shows the end of the log with the failure.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            cwd=settings.BASE_DIR,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException as exc:
        end = "\n".join(log.read_text().splitlines()[-_SHOWN_LINES:])
        exc.add_note(f"The end of {log}:\n{end}")
        raise
    finally:
        # With its children: granian's worker would outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def worker(queue: str, *options: str) -> list[str]:
    """The command of a worker of one queue."""
    return [
        *CELERY,
        "worker",
        *("--pool", "threads", "--concurrency", "2", "--queues", queue),
        *("--hostname", f"{queue}-{time.monotonic_ns()}@test"),
        "--without-mingle",
        "--without-gossip",
        *options,
    ]


def wait_until(condition: Callable[[], object], *, seconds: float = 120, what: str = "") -> None:
    """Wait for a condition; the bound is generous because the machine may be busy.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition} did not come true"
        time.sleep(0.02)


def wait_for_backends_to_end() -> None:
    """Wait until PostgreSQL has noticed that killed processes are gone."""

    def alone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return bool(cursor.fetchone()[0] == 0)

    wait_until(alone, what="the end of other backends")
