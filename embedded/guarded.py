"""A process under a guard, as its owner and as other processes see it.

Everything but the start goes through files in the control folder, so a test can stop, freeze or
restart a server that another process started.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embedded.errors import EmbeddedServerError

GUARD_SCRIPT: Final = Path(__file__).with_name("guard.py")
PAUSE_SECONDS: Final = 0.02
COMMAND_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Command:
    """What a guard runs, and how it is asked to stop: (signal, seconds to wait) in turn."""

    argv: list[str]
    log: Path
    stop_signals: list[tuple[int, float]]
    env: dict[str, str]
    cwd: str = "/"
    user: tuple[int, int] | None = None


@dataclass(frozen=True)
class State:
    """What the guard last published.

    `failure` says why the process could not even be started; `obeyed` counts the commands that
    the guard has carried out.
    """

    guard: int
    pid: int | None
    exit_code: int | None
    failure: str
    obeyed: int


@dataclass(frozen=True)
class Owner:
    """What ties a guard to the stack that starts it."""

    control: Path
    lock_fd: int
    remove: Path | None


class GuardedProcess:
    """A handle on one guarded process; any process may hold one."""

    def __init__(self, control: Path, name: str) -> None:
        self.control = control
        self.name = name
        self._guard: subprocess.Popen[bytes] | None = None

    def spawn(self, command: Command, owner: Owner) -> None:
        """Start the guard, which starts the process at once."""
        spec = {
            "name": self.name,
            "control": str(owner.control),
            "owner": os.getpid(),
            "remove": str(owner.remove) if owner.remove is not None else None,
            **command.__dict__,
            "log": str(command.log),
        }
        # The guard keeps the lock of the data folder too: after a crash of the owner the folder is
        # free only when the last server has let go of it.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD_SCRIPT), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(owner.lock_fd,),
            start_new_session=True,
        )
        self._wait(lambda state: state.obeyed > 0, what="start")

    def state(self) -> State | None:
        """Read what the guard last published; None when there is no guard."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.control / f"{self.name}.state").read_text()
            return State(**json.loads(text))
        return None

    @property
    def pid(self) -> int | None:
        """The process id, None while the process is down."""
        state = self.state()
        return state.pid if state is not None else None

    def start(self) -> None:
        """Start the process unless it is up; returns once it is started, maybe not yet ready."""
        self._obey("start")

    def stop(self, number: int) -> None:
        """Stop the process with this signal; the guard stays, ready for a start."""
        self._obey(f"stop {int(number)}")

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is up."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_exit(self, seconds: float) -> State:
        """Wait until the process is down."""
        return self._wait(lambda state: state.pid is None, what="end", seconds=seconds)

    def ask_to_quit(self) -> None:
        """Tell the guard to stop the process and go; does not wait."""
        if self._guard is not None and self._guard.stdin is not None:
            # A closed pipe says it as well, and does so even if no command could be written.
            with contextlib.suppress(EmbeddedServerError):
                self._tell("quit")
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def join(self, seconds: float) -> None:
        """Wait for the guard to go; past the limit, kill what it left."""
        if self._guard is None:
            return
        pid = self.pid
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._guard.kill()
            self._guard.wait()
        self._guard = None

    def _obey(self, line: str) -> None:
        state = self.state()
        self._tell(line)
        before = state.obeyed if state is not None else 0
        self._wait(lambda new: new.obeyed > before, what=line)

    def _tell(self, line: str) -> None:
        try:
            pipe = os.open(self.control / f"{self.name}.commands", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as exc:
            raise EmbeddedServerError(
                f"The guard of {self.name} is gone, so it cannot be told to {line}. "
                "Start the stack again."
            ) from exc
        try:
            os.write(pipe, f"{line}\n".encode())
        finally:
            os.close(pipe)

    def _wait(
        self, reached: Callable[[State], bool], *, what: str, seconds: float = COMMAND_SECONDS
    ) -> State:
        deadline = time.monotonic() + seconds
        while True:
            state = self.state()
            if state is not None and reached(state):
                return state
            if self._guard is not None and self._guard.poll() is not None:
                raise EmbeddedServerError(f"The guard of {self.name} ended before the {what}.")
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"The {what} of {self.name} took longer than {seconds:.0f} seconds."
                )
            time.sleep(PAUSE_SECONDS)
