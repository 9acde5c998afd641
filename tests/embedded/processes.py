"""Runs `python -m embedded run` as a process and knows every process that it brought up."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from embedded.outside import LINK

PROJECT = Path(__file__).resolve().parent.parent.parent
SERVER_VARIABLES = ("DATABASE_URL", "REDIS_URL", "KAFKA_BOOTSTRAP_SERVERS", "CLICKHOUSE_URL")
# A command that says it is up and then waits for a signal, ending with a code of its own.
WAITING_COMMAND = """
import os, signal, sys, time
def end(number, frame):
    sys.exit(40 + number)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print(os.environ.get("EMBEDDED_CONTROL"), flush=True)
time.sleep(120)
"""


def bare_environment(**added: str) -> dict[str, str]:
    """Return this process's environment without anything of servers."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in SERVER_VARIABLES and not name.startswith("EMBEDDED_")
    }
    return kept | added


def run_embedded(*arguments: str, **added: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m embedded` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "embedded", *arguments],
        cwd=PROJECT,
        env=bare_environment(**added),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@dataclass
class RunningStack:
    """A running `python -m embedded run`, its servers and guards included."""

    process: "subprocess.Popen[str]"
    control: Path
    family: list[psutil.Process]

    def send(self, number: int) -> None:
        """Send a signal to the stack's process."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def wait_family_gone(self, seconds: float = 30) -> list[psutil.Process]:
        """Wait for every server and guard to end; return those that did not."""
        deadline = time.monotonic() + seconds
        alive = self.family
        while alive and time.monotonic() < deadline:
            alive = [each for each in alive if is_alive(each)]
            time.sleep(0.05)
        return alive

    def end(self) -> None:
        """End whatever a failed test left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.wait()


def start_embedded(*arguments: str) -> RunningStack:
    """Start `python -m embedded run ARGUMENTS` with a command that waits for a signal."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "embedded", "run", *arguments, "--"),
            *(sys.executable, "-c", WAITING_COMMAND),
        ],
        cwd=PROJECT,
        env=bare_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    control = Path(process.stdout.readline().strip())
    family = psutil.Process(process.pid).children(recursive=True)
    # A guard, its server and the command at least.
    assert len(family) >= 3
    return RunningStack(process, control, family)


def is_alive(process: psutil.Process) -> bool:
    """Tell whether the process runs; one that only waits to be reaped does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def small_disk(folder: Path, *, size: str) -> Iterator[None]:
    """Mount a file system of this size on the folder; skip where that is not allowed."""
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting needs root")
    mounted = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remove_outside(folder: Path) -> None:
    """Remove what PostgreSQL keeps outside of data folders that are closed to its user."""
    for link in folder.rglob(LINK):
        if link.is_symlink():
            shutil.rmtree(link.resolve(), ignore_errors=True)
