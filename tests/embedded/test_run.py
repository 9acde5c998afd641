"""`python -m embedded run` ends with its command and leaves no process, whatever happens."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from embedded import EmbeddedStack, attach
from tests.embedded.processes import (
    PROJECT,
    RunningStack,
    bare_environment,
    is_alive,
    run_embedded,
    start_embedded,
)


@pytest.fixture
def running() -> Iterator[RunningStack]:
    """Run the whole stack in a temporary folder."""
    stack = start_embedded("--throwaway")
    yield stack
    stack.end()


def test_the_exit_code_is_the_commands() -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.environ['REDIS_URL']); sys.exit(7)"]
    ended = run_embedded("run", "--throwaway", "--only", "valkey", "--", *command)
    assert ended.returncode == 7
    assert ended.stdout.startswith("redis://127.0.0.1:")


def test_a_command_killed_by_a_signal_gives_the_shells_code() -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    ended = run_embedded("run", "--throwaway", "--only", "valkey", "--", *command)
    assert ended.returncode == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist_is_named() -> None:
    ended = run_embedded("run", "--throwaway", "--only", "valkey", "--", "no-such-command")
    assert ended.returncode == 1
    assert ended.stderr == "embedded: Cannot run no-such-command: No such file or directory.\n"


def test_a_given_address_reaches_the_command_unchanged() -> None:
    ended = run_embedded("run", "--throwaway", "--only", "valkey", "--", "env", REDIS_URL="given")
    assert [line for line in ended.stdout.splitlines() if line.startswith("REDIS_URL=")] == [
        "REDIS_URL=given"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_and_ends_everything(
    running: RunningStack, number: int
) -> None:
    running.send(number)
    assert running.wait() == 40 + number
    assert running.wait_family_gone() == []
    assert not running.control.exists()


def test_a_killed_owner_leaves_no_process_and_no_folder(running: RunningStack) -> None:
    log = attach("postgres", running.control).log
    # The command is not a server: a dead stack cannot end it, the test does.
    (command,) = [each for each in running.family if "time.sleep(120)" in str(each.cmdline())]
    running.send(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    command.kill()
    assert running.wait_family_gone() == []
    assert not running.control.exists()
    assert not log.parent.parent.exists()


_SLOWLY_DYING_OWNER = """
import os, sys, time
from pathlib import Path
from embedded.guarded import Command, GuardedProcess, Owner
control = Path(sys.argv[1])
lock = os.open(control / "owner.pid", os.O_CREAT | os.O_RDWR)
process = GuardedProcess(control, "sleeper")
command = Command([sys.executable, "-c", "import time; time.sleep(60)"], control.parent / "log",
                  [(15, 5.0)], {})
process.spawn(command, Owner(control, lock, control.parent / "remove"))
process._guard.stdin.close()
time.sleep(1)
os._exit(0)
"""


def test_a_guard_cleans_up_after_an_owner_that_dies_slowly(tmp_path: Path) -> None:
    """A killed process gives up its pipes first; that it has died, its children see later."""
    control, remove = tmp_path / "control", tmp_path / "remove"
    control.mkdir()
    remove.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", _SLOWLY_DYING_OWNER, str(control)],
        cwd=PROJECT,
        env=bare_environment(),
    )
    assert owner.wait(30) == 0
    deadline = time.monotonic() + 30
    while (control.exists() or remove.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not control.exists()
    assert not remove.exists()


def test_a_folder_is_free_again_when_the_servers_of_a_killed_owner_are_gone(
    tmp_path: Path,
) -> None:
    arguments = ["--only", "postgres", "--data-dir", str(tmp_path)]
    running = start_embedded(*arguments)
    running.send(signal.SIGKILL)
    running.wait()
    # No pause here: the start waits for the servers that are on their way out.
    with EmbeddedStack(tmp_path, only={"postgres"}, environ={}) as stack:
        stack.servers["postgres"].check()
    for each in running.wait_family_gone(0.1):
        each.kill()


def test_a_signal_during_the_start_ends_everything(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "embedded", "run", "--data-dir", str(tmp_path), "--", "true"],
        cwd=PROJECT,
        env=bare_environment(),
    )
    logs = tmp_path / "logs"
    while not logs.exists() or not any(logs.iterdir()):
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(is_alive(each) for each in family)
