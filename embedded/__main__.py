"""`python -m embedded run [OPTIONS] -- CMD ARGS...`, and `python -m embedded up`."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Final

from embedded.errors import EmbeddedServerError, explain_os_error
from embedded.room import missing_disk, missing_memory
from embedded.stack import KAFKAS, SERVERS, EmbeddedStack
from embedded.up import VISITS
from embedded.up import up as bring_up

DEFAULT_DATA_DIR: Final = Path(__file__).resolve().parent.parent / ".data"


class InterruptedStartError(BaseException):
    """A signal came before the command ran; not an Exception, so nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Runner:
    """Runs one command and passes signals on to it."""

    def __init__(self) -> None:
        self.command: subprocess.Popen[bytes] | None = None
        self.finished = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward the signal; before the command, give up; after it, let the stop finish."""
        if self.finished:
            return
        if self.command is None:
            raise InterruptedStartError(number)
        if number == signal.SIGINT and is_terminal_in_front():
            # The terminal has sent it to the command already; twice means "at once" to many.
            return
        self.command.send_signal(number)

    def run(self, argv: list[str], stack: EmbeddedStack) -> int:
        """Start the stack, run the command to its end, stop the stack, return the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)
        try:
            with stack:
                try:
                    self.command = subprocess.Popen(argv, env=os.environ | stack.environment)
                except OSError as exc:
                    raise EmbeddedServerError(f"Cannot run {argv[0]}: {exc.strerror}.") from exc
                code = self.command.wait()
                self.finished = True
        except InterruptedStartError as exc:
            return 128 + exc.number
        return code if code >= 0 else 128 - code


def is_terminal_in_front() -> bool:
    """Tell whether a terminal's Ctrl-C reaches this process and its command alike."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m embedded", description=__doc__)
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run a command with what its environment lacks")
    run.add_argument("--only", help=f"comma-separated names of {', '.join(SERVERS)}")
    run.add_argument("--kafka", choices=KAFKAS, help="which broker (default: KAFKA, else tansu)")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="kept data")
    where.add_argument(
        "--throwaway", action="store_true", help="a temporary folder, fast and removed at the end"
    )
    run.add_argument("argv", nargs="+", metavar="CMD", help="the command, after --")
    up = commands.add_parser("up", help="run the whole system, with a day of visits in it")
    up.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="kept data")
    up.add_argument("--port", type=int, help="of the web (default: the first free from 8000)")
    up.add_argument("--visits", type=Path, default=VISITS, help="what to replay (default: shipped)")
    return parser.parse_args(arguments)


def check_room() -> None:
    """Refuse a disk too small for all servers at work; warn of too little memory."""
    missing = missing_disk("run", Path(tempfile.gettempdir()))
    if missing:
        raise EmbeddedServerError(f"{missing} TMPDIR names another folder.")
    if missing := missing_memory("run"):
        print(f"embedded: warning: {missing}", file=sys.stderr)


def main() -> int:
    """Carry out the command line."""
    options = parse(sys.argv[1:])
    try:
        if options.action == "up":
            return bring_up(options.data_dir, port=options.port, visits=options.visits.resolve())
        if options.throwaway and options.only is None:
            check_room()
        stack = EmbeddedStack(
            None if options.throwaway else options.data_dir,
            throwaway=options.throwaway,
            only=options.only.split(",") if options.only else None,
            kafka=options.kafka,
        )
        return Runner().run(options.argv, stack)
    except EmbeddedServerError as exc:
        print(f"embedded: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"embedded: {explain_os_error(exc, what='Could not go on')}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
