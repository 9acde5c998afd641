"""`make up` is ready, and one visit goes through the whole chain, wherever a newcomer is."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.embedded.places import (
    INSTALL_SECONDS,
    MAKE_UP,
    READY_SECONDS,
    VERSION,
    Place,
    find_python,
    make_place,
    wait_gone,
)
from tests.embedded.processes import small_disk

pytestmark = pytest.mark.timeout(600)

WEIRD = 'it\'s "fünf" $HOME & 50% {a}?*'
# A path through the workers to Kafka, and servers of a test's own.
SOME = "ARGS=tests/acceptance/test_processes.py tests/embedded/test_stack.py -k 'c15 or kept_data'"
NEWER = ("python3.12", "python3.13", "python3.14")
# What a Debian without any Python still has, of what the Makefile uses.
PROGRAMS = ("make", "bash", "sh", "env", "touch", "rm", "mkdir", "ps")


def try_out(place: Place, *, seconds: float = READY_SECONDS) -> str:
    """Bring everything up, visit it, press Ctrl-C; return what `make up` said."""
    with place.up(seconds=seconds) as running:
        place.visit(running)
    return running.output.read_text(errors="replace")


def test_here() -> None:
    with make_place() as place:
        try_out(place)


def test_in_the_closed_home_of_root_with_nothing_but_a_clone() -> None:
    with make_place(root=True, venv=False) as place:
        said = try_out(place, seconds=INSTALL_SECONDS)
        assert "\nPython: 3." in f"\n{said}"
        size = subprocess.check_output(["du", "-sm", place.checkout / ".venv"], text=True)
        sys.stdout.write(f"MB of a virtual environment: {size}")


def test_as_root_who_shares_nothing_with_others() -> None:
    with make_place(root=True, umask=0o077) as place:
        try_out(place)


@pytest.mark.parametrize("who", ["root", "user"])
def test_in_a_path_with_spaces_quotes_and_umlauts_without_a_locale(who: str) -> None:
    with make_place(WEIRD, root=who == "root", user=who == "user") as place:
        place.environment["LANG"] = "C"
        try_out(place)


def test_in_a_path_of_200_characters_with_a_tmpdir_as_odd() -> None:
    with make_place("deep") as place:
        below = place.checkout.parent / "-".join(["a long name"] * 8) / ("x" * 40)
        below.mkdir(parents=True)
        checkout = below / ("c" * (200 - len(f"{below}/")))
        place.checkout.rename(checkout)
        place.checkout = checkout
        assert len(str(checkout)) == 200
        temporary = Path(place.environment["TMPDIR"]) / "it's odd"
        temporary.mkdir()
        place.environment["TMPDIR"] = str(temporary)
        # An environment may be moved, as a folder may be renamed.
        try_out(place)


def test_as_an_ordinary_user_with_a_closed_home() -> None:
    with make_place(user=True) as place:
        try_out(place)


def test_without_home_user_and_locale_in_a_clone_that_cannot_be_written() -> None:
    with make_place(user=True) as place:
        for name in ("HOME", "USER", "LANG"):
            del place.environment[name]
        place.environment["LC_ALL"] = "POSIX"
        git = place.checkout / ".git"
        git.mkdir(mode=0o555)
        try_out(place)


@pytest.mark.parametrize("who", ["root", "user"])
def test_make_test_runs_as_well(who: str) -> None:
    with make_place(WEIRD, root=who == "root", user=who == "user", umask=0o077) as place:
        del place.environment["HOME"], place.environment["USER"]
        place.environment["LANG"] = "C"
        # None of these tests looks at a page, so none needs Debian's.
        browser = place.root / "chromium"
        browser.symlink_to("/bin/true")
        place.environment["PATH"] += f":{place.root}"
        code, said = place.run("make", "test", SOME, seconds=300)
        assert code == 0, said
        assert "\nAll tests take " in f"\n{said}"
        assert "2 passed" in said
        # pytest keeps the folders of its last tests.
        assert [left for left in place.leftovers() if not left.startswith("pytest-of-")] == []


def test_with_newer_pythons_only() -> None:
    with make_place(venv=False) as place, only_programs(place, python=NEWER) as python:
        said = try_out(place, seconds=INSTALL_SECONDS)
        assert f"\nPython: {python.removeprefix('python')}." in f"\n{said}"


def test_without_any_python() -> None:
    with make_place(venv=False) as place, only_programs(place, python=()):
        code, said = place.run(*MAKE_UP)
        assert code != 0
        told, made = said.splitlines()
        assert told.startswith("No Python 3.11 or newer among: python3.11 ")
        assert "apt install python3 python3-venv" in told
        assert made.startswith("make: ***")
        assert not (place.checkout / ".venv").exists()


def test_with_a_python_that_lacks_venv() -> None:
    with make_place(venv=False) as place, only_programs(place, python=()):
        # As Debian's is without its package for that.
        stub = Path(place.environment["PATH"]) / VERSION
        stub.write_text(
            f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"\n'
        )
        stub.chmod(0o755)
        code, said = place.run(*MAKE_UP)
        assert code != 0
        told, _ = said.splitlines()
        assert told == (
            f"{VERSION} has no module venv; on Debian or Ubuntu: apt install {VERSION}-venv"
        )


def test_behind_a_proxy_with_the_usual_ports_taken() -> None:
    with make_place(user=True) as place, ExitStack() as taken:
        for port in range(8000, 8004):
            with_port = socket.socket()
            taken.enter_context(with_port)
            with_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                with_port.bind(("127.0.0.1", port))
                with_port.listen()
            except OSError:
                # Somebody else's already.
                continue
        # What pip may need the machine's own proxy for comes first.
        code, said = place.run("make", ".venv/base")
        assert code == 0, said
        # A proxy where nobody listens: whoever asks it is refused.
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
            place.environment[name] = "http://127.0.0.1:9"
        said = try_out(place)
        assert "http://127.0.0.1:800" not in said.replace("http://127.0.0.1:8004", "")


def test_without_ipv6() -> None:
    with make_place(root=True) as place:
        off = 'ip link set lo up && sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 && exec "$@"'
        place.wrapper = ["unshare", "--net", "sh", "-c", off, "sh"]
        code, said = place.run("true")
        if code != 0:
            pytest.skip(f"no network of one's own here: {said}")
        with place.up() as running:
            network = f"--net=/proc/{running.process.pid}/ns/net"
            place.visit(running, wrapper=["nsenter", network])


def test_with_a_full_tmpdir() -> None:
    with make_place() as place:
        temporary = Path(place.environment["TMPDIR"])
        temporary.rmdir()
        with small_disk(temporary, size="64k"):
            (temporary / "filler").write_bytes(bytes(64 << 10))
            with place.up() as running:
                place.visit(running)
                (temporary / "filler").unlink()


def test_with_a_clock_that_is_an_hour_off_and_then_put_right() -> None:
    with make_place() as place:
        library = fetch_faketime(place.root)
        with place.up() as running:
            place.visit(running)
        place.environment |= {"LD_PRELOAD": str(library), "FAKETIME": "+1h"}
        with place.up() as running:
            place.visit(running)
        del place.environment["LD_PRELOAD"], place.environment["FAKETIME"]
        with place.up() as running:
            place.visit(running)


def test_beside_another_and_after_it_was_killed() -> None:
    with make_place() as place:
        with place.up() as running:
            code, said = place.run(*MAKE_UP)
            assert code != 0
            (told,) = (line for line in said.splitlines() if line.startswith("embedded: "))
            assert "Another embedded stack (process " in told
            assert "Traceback" not in said
            place.visit(running)
            (up,) = (each for each in running.family() if "embedded" in each.cmdline())
            family = running.family()
            up.send_signal(signal.SIGKILL)
            running.process.wait(30)
        # No pause: the next one waits for what the killed one's guards still end.
        try_out(place)
        wait_gone(family)


def test_that_fails_leaves_nothing_and_says_why_in_one_line() -> None:
    with make_place() as place:
        data = place.checkout / ".data"
        with place.up():
            pass
        (configuration,) = (
            path
            for path in (
                data / "outside/postgres/postgresql.conf",
                data / "postgres/postgresql.conf",
            )
            if path.exists()
        )
        configuration.write_text(configuration.read_text() + "no_such_setting = on\n")
        code, said = place.run(*MAKE_UP)
        assert code != 0
        (told,) = (line for line in said.splitlines() if line.startswith("embedded: "))
        assert "The embedded postgres ended at once" in told
        assert str(data / "logs" / "postgres.log") in told
        assert "Traceback" not in said
        assert place.leftovers() == []


def test_with_a_disk_too_small() -> None:
    with make_place() as place:
        with small_disk(place.checkout / ".data", size="50m"):
            code, said = place.run(*MAKE_UP)
            assert code != 0
        (told,) = (line for line in said.splitlines() if line.startswith("embedded: "))
        assert "MB of disk, and 5" in told
        assert place.leftovers() == []


@contextmanager
def only_programs(place: Place, *, python: tuple[str, ...]) -> Iterator[str]:
    """Give a place a PATH with a few programs and the first of these Pythons that is here."""
    folder = place.root / "bin"
    folder.mkdir()
    found = ""
    for name in python:
        path = find_python(name, f"{os.environ['PATH']}:{':'.join(pyenv_folders())}")
        if path is not None:
            (folder / name).symlink_to(path)
            found = name
            break
    if python and not found:
        pytest.skip(f"there is none of {', '.join(python)}")
    for program in PROGRAMS:
        path = shutil.which(program)
        if path is not None:
            (folder / program).symlink_to(path)
    before, place.environment["PATH"] = place.environment["PATH"], str(folder)
    try:
        yield found
    finally:
        place.environment["PATH"] = before


def pyenv_folders() -> list[str]:
    """Where a widespread manager of Pythons keeps them."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return [str(path) for path in sorted(versions.glob("3.1[2-9]*/bin"))]


def fetch_faketime(folder: Path) -> Path:
    """Get Debian's library that fakes the time; skip where it cannot be had."""
    if shutil.which("apt-get") is None:
        pytest.skip("the library that fakes the time comes from Debian's packages")
    unpacked = folder / "faketime"
    unpacked.mkdir()
    script = "apt-get download -qq libfaketime && dpkg --extract *.deb . && rm *.deb"
    fetched = subprocess.run(
        ["sh", "-c", script], cwd=unpacked, capture_output=True, text=True, check=False
    )
    libraries = list(unpacked.rglob("libfaketimeMT.so.1"))
    if fetched.returncode != 0 or not libraries:
        pytest.skip(f"libfaketime cannot be had: {fetched.stderr[-200:]}")
    return libraries[0]
