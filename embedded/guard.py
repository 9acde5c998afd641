"""Run one server and end it when the process that wanted it is gone.

Started as a script (`python -I -S guard.py SPEC`), so it imports the standard library only and is
up in a few hundredths of a second. One guard owns one server: a server cannot outlive it by
accident, and a terminal's Ctrl-C reaches neither (both are in sessions of their own).

The owner is gone when standard input is closed **or** the parent process has changed. The second
test matters when the owner forked: its children keep the pipe open after it died.

Files in the control folder:
    NAME.state      JSON, replaced whole: guard, pid (null when down), exit_code, failure (why it
                    could not be started), obeyed (how many commands, the first start included)
    NAME.commands   named pipe, one command a line: start | stop SIGNAL | quit
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5
DYING_SECONDS = 5.0
"""How long an owner may take to die."""
OWNER_FILE = "owner.pid"


class Guard:
    """The loop around one server process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        control = Path(spec["control"])
        self.state_file = control / f"{spec['name']}.state"
        self.commands_file = control / f"{spec['name']}.commands"
        self.control = control
        self.owner: int = spec["owner"]
        self.child: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.failure = ""
        self.obeyed = 0
        self.was_asked = False
        """To end, by whoever lives and cleans up."""

    def run(self) -> None:
        """Serve commands until told to quit or the owner is gone."""
        os.mkfifo(self.commands_file, 0o600)
        # Read and write, so that the pipe never reports the end of file between two writers.
        commands = os.open(self.commands_file, os.O_RDWR | os.O_NONBLOCK)
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        os.set_blocking(wakeup_read, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            # Not SIG_IGN: the server would inherit that.
            signal.signal(number, lambda *_: None)
        asked_to_end: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
        self.obey(["start"])
        while os.getppid() == self.owner and not asked_to_end:
            readable, _, _ = select.select([0, commands, wakeup_read], [], [], POLL_SECONDS)
            if wakeup_read in readable:
                os.read(wakeup_read, 512)
            self.notice_exit()
            if commands in readable:  # first: who asks to quit closes the pipe as well
                lines = os.read(commands, 4096).decode().splitlines()
                if any(not self.obey(line.split()) for line in lines):
                    self.was_asked = True
                    break
            if 0 in readable and not os.read(0, 512):
                break
        self.was_asked |= bool(asked_to_end)

    def obey(self, words: list[str]) -> bool:
        """Carry out one command; False ends the guard."""
        match words:
            case ["start"]:
                self.start()
            case ["stop", number]:
                self.stop([(int(number), 10.0), (int(signal.SIGKILL), 10.0)])
            case ["quit"]:
                return False
        self.obeyed += 1
        self.write_state()
        return True

    def start(self) -> None:
        """Start the server unless it runs."""
        if self.child is not None:
            return
        spec = self.spec
        user: dict[str, Any] = {}
        if spec["user"] is not None:
            uid, gid = spec["user"]
            user = {"user": uid, "group": gid, "extra_groups": []}
        try:
            with Path(spec["log"]).open("ab") as log:
                self.child = subprocess.Popen(
                    spec["argv"],
                    env=spec["env"],
                    cwd=spec["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **user,
                )
            self.exit_code, self.failure = None, ""
        except (OSError, subprocess.SubprocessError) as error:
            # Not into the log: a full disk is one of the reasons.
            self.exit_code, self.failure = None, str(error)

    def notice_exit(self) -> None:
        """Record that the server has ended by itself."""
        if self.child is not None and self.child.poll() is not None:
            self.exit_code, self.child = self.child.returncode, None
            self.write_state()

    def stop(self, signals: list[tuple[int, float]]) -> None:
        """Send each signal in turn, waiting its seconds, until the server has ended."""
        for number, seconds in signals:
            if self.child is None:
                return
            with contextlib.suppress(ProcessLookupError):
                # A frozen process would not act on a polite signal before it is thawed.
                os.kill(self.child.pid, signal.SIGCONT)
                os.kill(self.child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(seconds)
            self.notice_exit()

    def write_state(self) -> None:
        """Publish the state; a full disk must not end the guard before its server."""
        state = {
            "guard": os.getpid(),
            "pid": self.child.pid if self.child is not None else None,
            "exit_code": self.exit_code,
            "failure": self.failure,
            "obeyed": self.obeyed,
        }
        new = self.state_file.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(state))
            new.replace(self.state_file)

    def clean_up(self) -> None:
        """Remove this guard's files; the last guard of a dead owner removes the rest."""
        self.state_file.unlink(missing_ok=True)
        self.commands_file.unlink(missing_ok=True)
        if not self.is_owner_gone():
            return
        for leftover in (OWNER_FILE, f"{self.spec['name']}.json"):
            (self.control / leftover).unlink(missing_ok=True)
        try:
            self.control.rmdir()
        except OSError:
            return
        if self.spec["remove"]:
            # Backends of a database killed the hard way may need a moment to let go.
            folder = Path(self.spec["remove"])
            for _ in range(20):
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    return
                time.sleep(0.1)

    def is_owner_gone(self) -> bool:
        """Tell whether the owner has died; its pipe closes a moment before its children know."""
        deadline = time.monotonic() + DYING_SECONDS
        while os.getppid() == self.owner and not self.was_asked and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getppid() != self.owner


def main() -> None:
    """Run the guard that standard input and the one argument describe."""
    guard = Guard(json.loads(sys.argv[1]))
    try:
        if os.getppid() == guard.owner:
            guard.run()
    finally:
        guard.stop([(number, seconds) for number, seconds in guard.spec["stop_signals"]])
        guard.clean_up()


if __name__ == "__main__":
    main()
