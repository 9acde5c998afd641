"""`python -m embedded up`: the whole system on this machine, with a day of visits in it."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Final

from embedded.errors import EmbeddedServerError, reason_in
from embedded.guarded import Command, GuardedProcess
from embedded.room import missing_disk, missing_memory
from embedded.server import HOST, is_port_free
from embedded.stack import EmbeddedStack, find_free_port

ROOT: Final = Path(__file__).resolve().parent.parent
VISITS: Final = ROOT / "data" / "web-visits-1995-08-01.csv"
WEB_PORT: Final = 8000
ADMIN: Final = "admin"
SCHEDULE: Final = "beat-schedule"
READY_SECONDS: Final = 60.0
# Web and workers finish what they are at: a request, a transaction, a batch.
STOP_SIGNALS: Final = [(signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)]


class _Stopped(BaseException):
    """The user asked to stop."""


class System:
    """The application's processes on a stack.

    Args:
        stack: Started.
        data_dir: Holds logs and the secrets made here.
        port: Of the web.
    """

    def __init__(self, stack: EmbeddedStack, *, data_dir: Path, port: int) -> None:
        self._stack = stack
        self._data_dir = data_dir
        self._port = port
        self._processes: dict[str, GuardedProcess] = {}
        self._environment_file = data_dir / "environment"
        self.log("manage").parent.mkdir(parents=True, exist_ok=True)
        self.admin_password = _kept_secret(data_dir / "admin-password", length=9)
        self._environment = {
            **os.environ,
            **stack.environment,
            "PINACTIVITY_DEVELOPMENT": os.environ.get("PINACTIVITY_DEVELOPMENT", "true"),
            "SECRET_KEY": os.environ.get("SECRET_KEY")
            or _kept_secret(data_dir / "secret-key", length=48),
            **_keys_of_tokens(data_dir),
            # The embedded broker lets a first consumer in after half of it.
            "CONSUMER_SESSION_TIMEOUT": os.environ.get("CONSUMER_SESSION_TIMEOUT", "00:00:06"),
            "DJANGO_SUPERUSER_PASSWORD": self.admin_password,
        }

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def prepare(self) -> None:
        """Migrate, make topics and an admin user: all harmless when done already."""
        self.manage("prepare", "--admin", ADMIN, "--verbosity", "0", quiet=True)

    def start(self) -> None:
        """Start web, workers, consumers and beat; `wait_ready` waits for them."""
        # Modules, not scripts: the first line of a script cannot hold every path.
        celery = [sys.executable, "-m", "celery", "-A", "pinactivity.celery"]
        worker = [
            *celery,
            *("worker", "--pool", "threads", "--purge", "--without-mingle", "--without-gossip"),
        ]
        self._spawn(
            "web",
            [
                *(sys.executable, "-m", "granian", "--interface", "wsgi"),
                *("--host", HOST, "--port", str(self._port)),
                *("--blocking-threads", "4", "--blocking-threads-idle-timeout", "600"),
                "pinactivity.wsgi:application",
            ],
        )
        self._spawn("worker-closer", [*worker, "-Q", "closer", "-c", "2", "-n", "closer@%h"])
        self._spawn("worker-relay", [*worker, "-Q", "relay", "-c", "2", "-n", "relay@%h"])
        self._spawn("worker-maintenance", [*worker, "-Q", "maintenance", "-c", "1", "-n", "m@%h"])
        consumers = (
            "signed-in",
            "view-stats",
            "dev-stats-session-ended",
            "dev-stats-property-object-view-ended",
            "dev-stats-property-objects",
        )
        self._spawn("consumers", [sys.executable, "manage.py", "consume", *consumers])
        # Anew: beat would wait until the clock is again where it was at the last tick.
        for schedule in self._data_dir.glob(f"{SCHEDULE}*"):
            schedule.unlink()
        self._spawn("beat", [*celery, "beat", "--schedule", str(self._data_dir / SCHEDULE)])

    def stop(self) -> None:
        """Stop the processes, all at once, in an orderly way."""
        self._environment_file.unlink(missing_ok=True)
        for process in self._processes.values():
            process.ask_to_quit()
        for process in self._processes.values():
            process.join(30.0)
        self._processes = {}

    def write_environment(self) -> None:
        """Leave a file that makes a shell use this stack: `. .data/environment`."""
        own = ("PINACTIVITY_DEVELOPMENT", "SECRET_KEY", "JWT_DEVELOPMENT_SECRET")
        names = [*self._stack.environment, *(name for name in own if name in self._environment)]
        lines = [f"export {name}={shlex.quote(self._environment[name])}\n" for name in names]
        self._environment_file.touch(mode=0o600)
        self._environment_file.write_text("".join(lines))

    def watch(self) -> None:
        """Wait; raise when a process ends by itself."""
        while True:
            for name, process in self._processes.items():
                state = process.state()
                if state is None or state.pid is None:
                    raise EmbeddedServerError(f"{name} ended by itself: {self._reason(name)}")
            time.sleep(0.5)

    def manage(self, *arguments: str, quiet: bool = False) -> None:
        """Run a management command to its end.

        Raises:
            EmbeddedServerError: it failed.
        """
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        with self.log("manage").open("ab") as log:
            output = log if quiet else None
            process = subprocess.Popen(
                command, env=self._environment, cwd=ROOT, stdout=output, stderr=output
            )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code != 0:
            failed = f"manage.py {arguments[0]} failed (exit code {code})"
            raise EmbeddedServerError(f"{failed}: {self._reason('manage')}" if quiet else failed)

    def log(self, name: str) -> Path:
        return self._data_dir / "logs" / f"{name}.log"

    def _reason(self, name: str) -> str:
        log = self.log(name)
        end = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return reason_in(log, end)

    def _spawn(self, name: str, argv: list[str]) -> None:
        taken = {self._port}
        environment = {**self._environment, "METRICS_PORT": "0"}
        if name != "web":
            environment["METRICS_PORT"] = str(find_free_port(taken))
        owner = self._stack.owner
        assert owner is not None  # the stack is started
        process = self._processes[name] = GuardedProcess(owner.control, name)
        command = Command(argv, self.log(name), list(STOP_SIGNALS), environment, cwd=str(ROOT))
        process.spawn(command, owner)

    def wait_ready(self) -> None:
        """Wait until the web can serve."""
        # Without the proxies that the environment may name.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            state = self._processes["web"].state()
            if state is None or state.pid is None:
                break
            try:
                with opener.open(f"{self.url}/health/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EmbeddedServerError(f"The web is not ready: {self._reason('web')}")


def up(data_dir: Path, *, port: int | None, visits: Path) -> int:
    """Bring everything up, replay visits once, and wait for Ctrl-C or SIGTERM.

    Args:
        data_dir: Kept between calls.
        port: Of the web; None takes the first free one from 8000.
        visits: What to replay, as `manage.py replay_visits` takes it.

    Raises:
        EmbeddedServerError: something could not start, or ended by itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    began = time.monotonic()
    missing = missing_disk("up", data_dir)
    if missing:
        raise EmbeddedServerError(missing)
    if missing := missing_memory("up"):
        _say(f"warning: {missing}")
    try:
        _say("starting PostgreSQL, Valkey, Kafka and ClickHouse where none is given")
        with EmbeddedStack(data_dir) as stack, _take_port(port) as taken:
            system = System(stack, data_dir=data_dir, port=taken.getsockname()[1])
            try:
                system.prepare()
                system.start()
                system.write_environment()
                # Before the replay, so that its views are stored as somebody's.
                system.manage("own_visited_objects", str(visits), "--reader", ADMIN, quiet=True)
                _say("replaying half a day of visits, unless that was done before")
                system.manage("replay_visits", str(visits), "--if-new")
                system.wait_ready()
                system.manage("show_activity", "--wait", "60")
                _say(_directions(stack, system, data_dir))
                _say(f"ready after {time.monotonic() - began:.0f} s; Ctrl-C stops everything")
                system.watch()
            finally:
                _say("stopping")
                system.stop()
    except _Stopped:
        pass
    _say("stopped")
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    # A second Ctrl-C must not cut the orderly stop short.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped


def _directions(stack: EmbeddedStack, system: System, data_dir: Path) -> str:
    lines = {
        "Admin": f"{system.url}/admin/  ({ADMIN} / {system.admin_password})",
        "Page of a developer": f"{system.url}/dev-stats/  (likewise)",
        "API": f"{system.url}/api/user-activity/",
        "Health, metrics": f"{system.url}/health/ready  {system.url}/metrics",
        **{server.variable: server.address for server in stack.servers.values()},
        **stack.given,
        "Logs": str(system.log("web").parent),
        "For manage.py": f". {data_dir / 'environment'}",
    }
    return "\n" + "\n".join(f"  {name:<24} {value}" for name, value in lines.items()) + "\n"


def _take_port(port: int | None) -> socket.socket:
    """Bind the web's port before the web does, which takes a while to come and shares it."""
    candidates = range(WEB_PORT, WEB_PORT + 100) if port is None else [port]
    for candidate in candidates:
        if is_port_free(candidate):
            # Two that start at once would both find it free; granian lets them share it. This one
            # does not listen, so it gets no connection.
            taken = socket.socket()
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                taken.bind((HOST, candidate))
            except OSError:
                taken.close()
            else:
                return taken
    if port is None:
        return _take_port(find_free_port())
    raise EmbeddedServerError(
        f"Port {port}, wanted for the web, is in use. Stop what listens there, or choose another."
    )


def _keys_of_tokens(data_dir: Path) -> dict[str, str]:
    """Make a secret for `manage.py issue_dev_token`, unless tokens are somebody else's."""
    given = ("JWT_DEVELOPMENT_SECRET", "JWT_JWKS_URL", "JWT_PUBLIC_KEY")
    if any(os.environ.get(name) for name in given):
        return {}
    return {"JWT_DEVELOPMENT_SECRET": _kept_secret(data_dir / "jwt-secret", length=48)}


def _kept_secret(path: Path, *, length: int) -> str:
    """Read a secret made before, or make it, for the owner's eyes only."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(length))
    return path.read_text().strip()


def _say(text: str) -> None:
    print(text, flush=True)
