"""Fresh machines as newcomers have them: a user, a folder, an environment, and a checkout in it."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest

from embedded.up import VISITS
from tests.embedded.processes import PROJECT, is_alive, remove_outside

USER: Final = "nobody"
"""An ordinary user that every system has, and whose own home is nowhere."""
FEW_VISITS: Final = "few-visits.csv"
MAKE_UP: Final = ("make", "up", f"ARGS=--visits {FEW_VISITS}")
READY_SECONDS: Final = 120.0
INSTALL_SECONDS: Final = 400.0
VERSION: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How this machine reaches its registry, which is no part of the place.
REGISTRY: Final = ("PIP_", "SSL_", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "HTTPS_PROXY")

# What a newcomer does by hand: start a session, sign in, and find the event in Kafka.
_VISIT: Final = """
import json, subprocess, sys, time, urllib.request, uuid
api, user = sys.argv[1], str(uuid.uuid4())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def post(path, **headers):
    headers["User-Agent"] = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/120.0"
    request = urllib.request.Request(api + path, method="POST", headers=headers)
    with opener.open(request, timeout=20) as answer:
        return json.load(answer)
def manage(*words):
    command = [sys.executable, "manage.py", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
session = post("sessions")
device = {"X-Anonymous-Id": session["AnonymousId"]}
token = manage("issue_dev_token", user).strip()
assert post("sessions/link", Authorization="Bearer " + token, **device)["Outcome"] == "Linked"
deadline, event = time.monotonic() + 30, ""
while user not in event:
    assert time.monotonic() < deadline, "no event"
    topic = "pin.user-activity.session-linked.v1"
    event = manage("show_topic", topic, "--key", session["SessionId"])
print(json.dumps({"event": user}))
"""


@dataclass
class Running:
    """A `make up` that is ready."""

    process: "subprocess.Popen[bytes]"
    output: Path
    api: str
    seconds: float

    def family(self) -> list[psutil.Process]:
        """Every process that it brought up, its guards and servers included."""
        return psutil.Process(self.process.pid).children(recursive=True)


@dataclass
class Place:
    """One machine; everything of it lies under `root`, which is removed at the end."""

    root: Path
    checkout: Path
    environment: dict[str, str]
    uid: int | None = None
    umask: int = 0o022
    wrapper: list[str] = field(default_factory=list)
    """Put before each command."""

    def start(
        self, *argv: str, output: Path, wrapper: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start a program here, as this user."""
        with output.open("ab") as log:
            return subprocess.Popen(
                [*(wrapper or self.wrapper), *argv],
                cwd=self.checkout,
                env=self.environment,
                umask=self.umask,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # None changes nothing.
                user=self.uid,
                group=self.uid,
                extra_groups=None if self.uid is None else [],
            )

    def run(
        self, *argv: str, seconds: float = READY_SECONDS, wrapper: Sequence[str] = ()
    ) -> tuple[int, str]:
        """Run a program here to its end; return its exit code and all that it said."""
        output = self.root / f"output-{time.monotonic_ns()}"
        process = self.start(*argv, output=output, wrapper=wrapper)
        try:
            code = process.wait(seconds)
        finally:
            end(process)
        return code, output.read_text(errors="replace")

    @contextmanager
    def up(self, *, seconds: float = READY_SECONDS) -> Iterator[Running]:
        """Run `make up` until it is ready; at the end press Ctrl-C, and see that nothing is left.

        Raises:
            AssertionError: it ended, took too long, or left a process or a file.
        """
        output = self.root / f"output-{time.monotonic_ns()}"
        began = time.monotonic()
        process = self.start(*MAKE_UP, output=output)
        try:
            while "\nready after" not in (said := output.read_text(errors="replace")):
                assert process.poll() is None, said
                assert time.monotonic() < began + seconds, said
                time.sleep(0.1)
            (api,) = (line.split()[1] for line in said.splitlines() if line.startswith("  API "))
            running = Running(process, output, api, time.monotonic() - began)
            family = running.family()
            # With pytest's -rP this is the table of the places.
            sys.stdout.write(f"ready after {running.seconds:.0f} s\n")
            yield running
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
            wait_gone(family)
        finally:
            end(process)
        assert self.leftovers() == []

    def visit(self, running: Running, *, wrapper: Sequence[str] = ()) -> None:
        """Send one device's requests, as the README tells, and find its event in Kafka."""
        shell = '. .data/environment; exec .venv/bin/python -c "$0" "$1"'
        command = ("sh", "-c", shell, _VISIT, running.api)
        code, said = self.run(*command, wrapper=wrapper)
        assert code == 0, said
        assert json.loads(said.splitlines()[-1])["event"]

    def leftovers(self) -> list[str]:
        """Return what still runs from here, and what lies in this place's TMPDIR."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = [process.cwd(), *process.cmdline()]
                if process.pid != os.getpid() and any(str(self.root) in word for word in words):
                    processes.append(" ".join(words)[:200])
        return processes + [path.name for path in Path(self.environment["TMPDIR"]).iterdir()]


@contextmanager
def make_place(
    folder: str = "pinactivity",
    *,
    root: bool = False,
    user: bool = False,
    umask: int = 0o022,
    venv: bool = True,
) -> Iterator[Place]:
    """Make a home of mode 0700 with a fresh checkout in it.

    Args:
        folder: Of the checkout, in the home.
        root: Skip where the tests are not run by root.
        user: Somebody else than root; where the tests are not run by root, it is whoever runs them.
        umask: In force when the checkout and its virtual environment come to be, and after.
        venv: With a virtual environment that has the packages of the one in use, so that the
            place need not install them once more.
    """
    if root and os.geteuid() != 0:
        pytest.skip("only root can try out what root does")
    uid = pwd.getpwnam(USER).pw_uid if user and os.geteuid() == 0 else None
    # In a folder that everybody may enter, as homes are; a closed one would be somebody's own.
    below = Path(tempfile.mkdtemp(prefix="new-"))
    below.chmod(0o711)
    before = os.umask(umask)
    try:
        home, temporary = below / "home", below / "tmp"
        home.mkdir()
        home.chmod(0o700)
        temporary.mkdir()
        checkout = home / folder
        copy_checkout(checkout)
        environment = {
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:{SYSTEM_PATH}",
            "HOME": str(home),
            "USER": "newcomer",
            "TMPDIR": str(temporary),
            "LANG": "C.UTF-8",
            **{name: text for name, text in os.environ.items() if name.startswith(REGISTRY)},
        }
        if uid is not None:
            environment["PATH"] = SYSTEM_PATH
        place = Place(below, checkout, environment, uid, umask)
        if venv:
            python = find_python(VERSION, environment["PATH"], uid=uid)
            if python is None:
                pytest.skip(f"the user {uid} can run no {VERSION}")
            link_packages(checkout, python)
        if uid is not None:
            # The files of the packages are links to those in use, and stay whose they are.
            packages = ["-path", "*/site-packages/*", "-not", "-type", "d", "-prune", "-o"]
            give = ["-exec", "chown", "--no-dereference", f"{uid}:{uid}", "{}", "+"]
            subprocess.run(["find", home, temporary, *packages, *give], check=True)
        yield place
    finally:
        os.umask(before)
        remove_outside(below)
        shutil.rmtree(below)


def copy_checkout(checkout: Path) -> None:
    """Copy what a clone would hold, changes that are not committed included."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".data", ".env", "__pycache__", ".*_cache")
    shutil.copytree(PROJECT, checkout, ignore=ignored, copy_function=shutil.copy)
    # As the umask has it, like a clone.
    mask = os.umask(0)
    os.umask(mask)
    for path in (checkout, *checkout.rglob("*")):
        path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~mask)
    with VISITS.open() as visits:
        (checkout / FEW_VISITS).write_text("".join(next(visits) for _ in range(300)))


def link_packages(checkout: Path, python: str) -> None:
    """Make a virtual environment whose packages are links to those of the one in use."""
    subprocess.run([python, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    packages = Path("lib") / VERSION / "site-packages"
    (checkout / ".venv" / packages).rmdir()
    # The folders are new, and have the modes of the umask in force; the files are the same.
    copy = ["cp", "--recursive", "--no-preserve=mode"]
    source, target = Path(sys.prefix) / packages, checkout / ".venv" / packages
    linked = subprocess.run([*copy, "--link", source, target], capture_output=True, check=False)
    if linked.returncode != 0:
        # Another file system.
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "--recursive", source, target], check=True)
    # Another patch version may want another package: then `make` looks itself.
    told = subprocess.check_output([python, "-c", "import sys; print(sys.version)"], text=True)
    if told.strip() == sys.version:
        for stamp in ("base", "dev"):
            (checkout / ".venv" / stamp).touch()


def find_python(name: str, path: str, *, uid: int | None = None) -> str | None:
    """Find a Python that this user can run and that can make a virtual environment."""
    for folder in path.split(":"):
        candidate = f"{folder}/{name}"
        command = [candidate, "-c", "import ensurepip, venv"]
        with suppress(OSError):
            tried = subprocess.run(command, user=uid, capture_output=True, check=False)
            if tried.returncode == 0:
                return candidate
    return None


def end(process: "subprocess.Popen[bytes]") -> None:
    """End what a failed test left, in an orderly way if it will."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_gone(family: Sequence[psutil.Process], seconds: float = 40) -> None:
    """Wait until all of these processes have ended."""
    wait_for(lambda: not any(is_alive(each) for each in family), seconds)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition to come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
