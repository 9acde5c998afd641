"""The stack: every server that the environment does not name, started and stopped together."""

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from embedded.apache_kafka import ApacheKafka
from embedded.clickhouse import ClickHouse
from embedded.environment import no_proxy
from embedded.errors import EmbeddedServerError, StartGivenUpError, explain_os_error
from embedded.folder import FolderLock, mark_throwaway
from embedded.guard import OWNER_FILE
from embedded.guarded import Owner
from embedded.outside import make_temporary_folder
from embedded.postgres import Postgres
from embedded.server import Server, is_port_free
from embedded.tansu import Tansu
from embedded.valkey import Valkey

SERVERS: Final[dict[str, type[Server]]] = {
    kind.name: kind for kind in (Postgres, Valkey, Tansu, ClickHouse)
}
# The two servers that can be `kafka`, by what KAFKA calls them; the first when it says nothing.
KAFKAS: Final[dict[str, type[Server]]] = {"tansu": Tansu, "apache": ApacheKafka}
KAFKA_VARIABLE: Final = "KAFKA"
CONTROL_VARIABLE: Final = "EMBEDDED_CONTROL"
# Below the range that systems give to outgoing connections, which would take a port found free.
FREE_PORTS: Final = range(20000, 32000)


class EmbeddedStack:
    """Embedded servers with one life.

    Args:
        data_dir: where kept data lives; None only with `throwaway`, for a temporary folder that is
            removed at the end.
        throwaway: trade safety of the data on a crash of the machine for speed. A folder is
            throwaway from its first use or never.
        only: names of the servers wanted, of `postgres`, `valkey`, `kafka`, `clickhouse`; None
            wants all.
        ports: name to port; a server without one gets a free port.
        environ: where addresses of servers that exist already are looked up; an empty mapping
            starts private servers whatever the environment says. KAFKA is looked up there too.
        kafka: which server is `kafka`, `tansu` or `apache`; None takes KAFKA's word, else `tansu`.

    Raises:
        EmbeddedServerError: from `start`, saying what happened and what to do.
    """

    def __init__(
        self,
        data_dir: Path | None,
        *,
        throwaway: bool = False,
        only: Collection[str] | None = None,
        ports: Mapping[str, int] | None = None,
        environ: Mapping[str, str] | None = None,
        kafka: str | None = None,
    ) -> None:
        names = set(SERVERS) if only is None else set(only)
        unknown = (names | set(ports or {})) - set(SERVERS)
        if unknown:
            raise EmbeddedServerError(
                f"No embedded server is named {', '.join(sorted(unknown))}. "
                f"There are: {', '.join(SERVERS)}."
            )
        if data_dir is None and not throwaway:
            raise EmbeddedServerError("A stack that keeps its data needs a data folder.")
        environ = os.environ if environ is None else environ
        self.given = {
            SERVERS[name].variable: environ[SERVERS[name].variable]
            for name in names
            if environ.get(SERVERS[name].variable)
        }
        self.names = [
            name for name in SERVERS if name in names and SERVERS[name].variable not in self.given
        ]
        self.servers: dict[str, Server] = {}
        # Of this process, since its children have the rest of its environment too.
        self._no_proxy = no_proxy(os.environ)
        self._kafka = kafka or environ.get(KAFKA_VARIABLE) or next(iter(KAFKAS))
        if self._kafka not in KAFKAS:
            raise EmbeddedServerError(
                f"{KAFKA_VARIABLE} is one of {', '.join(KAFKAS)}, not {self._kafka}."
            )
        # For further processes that are to end with the stack: GuardedProcess.spawn takes it.
        self.owner: Owner | None = None
        self._data_dir = data_dir
        self._throwaway = throwaway
        self._ports = dict(ports or {})
        self._control: Path | None = None
        self._temporary: Path | None = None
        self._lock: FolderLock | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make a process use this stack, given addresses included."""
        own: dict[str, str] = {}
        for server in self.servers.values():
            own |= server.environment
        control = {} if self._control is None else {CONTROL_VARIABLE: str(self._control)}
        return {**self._no_proxy, **self.given, **own, **control}

    def start(self) -> None:
        """Start all servers at once; on any failure stop them all and raise the first."""
        try:
            self._start()
        except OSError as exc:
            self.stop()
            raise explain_os_error(exc, what="The embedded servers could not start") from exc
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        data_dir = self._prepare_folder()
        self._lock = FolderLock(data_dir)
        mark_throwaway(data_dir, throwaway=self._throwaway)
        self._control = Path(tempfile.mkdtemp(prefix="embedded-"))
        (self._control / OWNER_FILE).write_text(str(os.getpid()))
        self.owner = owner = Owner(self._control, self._lock.fd, self._temporary)
        taken: set[int] = set()
        for name in self.names:
            port = self._ports.get(name) or find_free_port(taken)
            taken.add(port)
            kind = find_kind(name, self._kafka)
            server = kind(data_dir, self._control, port, throwaway=self._throwaway)
            description = {
                "data_dir": str(data_dir),
                "port": port,
                "throwaway": self._throwaway,
                "kafka": self._kafka,
            }
            (self._control / f"{name}.json").write_text(json.dumps(description))
            self.servers[name] = server
        with ThreadPoolExecutor(max(len(self.servers), 1)) as pool:
            starts = [pool.submit(server.launch, owner) for server in self.servers.values()]
            try:
                wait(starts, return_when=FIRST_EXCEPTION)
            finally:
                # Also when a signal ends the wait: nobody needs the others any more then.
                if any(not start.done() or start.exception() for start in starts):
                    for server in self.servers.values():
                        server.abandoned.set()
        failures = [exc for start in starts if (exc := start.exception()) is not None]
        # Those given up are a consequence, not the reason.
        for failure in sorted(failures, key=lambda exc: isinstance(exc, StartGivenUpError)):
            raise failure

    def _prepare_folder(self) -> Path:
        if self._data_dir is not None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            return self._data_dir.resolve()
        self._temporary = make_temporary_folder()
        return self._temporary

    def stop(self) -> None:
        """Stop every server; what was temporary is removed. Harmless when nothing runs."""
        for server in self.servers.values():
            server.ask_to_end()
        for server in self.servers.values():
            server.join()
        self.servers = {}
        for folder in (self._control, self._temporary):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._control = self._temporary = self.owner = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def attach(name: str, control: Path | None = None) -> Server:
    """Return a handle on a running server of another process's stack.

    Args:
        name: `postgres`, `valkey`, `kafka` or `clickhouse`.
        control: the stack's control folder; the environment's EMBEDDED_CONTROL when None.

    Raises:
        EmbeddedServerError: when that stack has no such server.
    """
    if control is None:
        control = Path(os.environ.get(CONTROL_VARIABLE, ""))
    try:
        description = json.loads((control / f"{name}.json").read_text())
    except OSError as exc:
        raise EmbeddedServerError(
            f"No embedded {name} is running under {CONTROL_VARIABLE}={control}. "
            "Run this under `python -m embedded run -- ...`."
        ) from exc
    return find_kind(name, description["kafka"])(
        Path(description["data_dir"]),
        control,
        description["port"],
        throwaway=description["throwaway"],
    )


def find_kind(name: str, kafka: str) -> type[Server]:
    """Return the class of a server; `kafka` says which one is `kafka`."""
    return KAFKAS[kafka] if name == Tansu.name else SERVERS[name]


@contextlib.contextmanager
def private_server(
    name: str, data_dir: Path | None = None, *, kafka: str | None = None
) -> Iterator[Server]:
    """Run one throwaway server of one's own, for tests that stop, kill or freeze it."""
    with EmbeddedStack(data_dir, throwaway=True, only={name}, environ={}, kafka=kafka) as stack:
        yield stack.servers[name]


def find_free_port(taken: Collection[int] = ()) -> int:
    """Find a port that nobody listens on."""
    for port in random.sample(FREE_PORTS, 200):
        if port not in taken and is_port_free(port):
            return port
    raise EmbeddedServerError("No free port was found on the loopback; pass ports of your own.")
