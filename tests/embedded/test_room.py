"""What is missing of disk and memory is said before anything begins, and which Python is taken."""

import subprocess
import sys
from pathlib import Path

import pytest

from embedded import room
from embedded.environment import no_proxy
from embedded.room import MB, free_memory, missing_disk, missing_memory
from tests.embedded.processes import PROJECT, run_embedded, small_disk

FIND_PYTHON = PROJECT / "embedded" / "find_python.sh"


def write_meminfo(folder: Path, *, available: int, swap: int = 0) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 9 kB\nMemAvailable: {available} kB\nSwapFree: {swap} kB\n")
    return file


def write_cgroup(folder: Path, *, limit: str, used: int, forgettable: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {forgettable}\n")
    return folder


def test_memory_is_the_machines_with_its_swap(tmp_path: Path) -> None:
    meminfo = write_meminfo(tmp_path, available=1000, swap=24)
    assert free_memory(meminfo, tmp_path / "none") == 1024 * 1024


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    meminfo = write_meminfo(tmp_path, available=10_000_000)
    cgroup = write_cgroup(tmp_path, limit=str(900 * MB), used=600 * MB, forgettable=100 * MB)
    assert free_memory(meminfo, cgroup) == 400 * MB


def test_a_container_without_a_limit_has_the_machines_memory(tmp_path: Path) -> None:
    meminfo = write_meminfo(tmp_path, available=1000)
    assert free_memory(meminfo, write_cgroup(tmp_path, limit="max", used=1, forgettable=0)) == (
        1000 * 1024
    )


def test_a_system_that_does_not_tell_its_memory_is_not_judged(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("free", "said"), [(2000 * MB, ""), (None, ""), (700 * MB, "700 MB are")])
def test_missing_memory_is_named(
    free: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: free)
    missing = missing_memory("up")
    assert said in missing
    assert bool(missing) == bool(said)
    assert not said or "takes 1200 MB" in missing


def test_missing_disk_is_named_for_a_folder_yet_to_be_made(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, size="64m"):
        assert f"{disk}/a/b needs 600 MB of disk, and 6" in missing_disk("up", disk / "a" / "b")
        script = [sys.executable, "-I", str(PROJECT / "embedded" / "room.py"), "venv"]
        refused = subprocess.run(script, cwd=disk, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"{disk}/.venv needs 1800 MB of disk" in refused.stderr


def test_tests_are_not_begun_on_a_disk_too_small(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, size="64m"):
        ended = run_embedded("run", "--throwaway", "--", "true", TMPDIR=str(disk))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"embedded: {disk} needs 1000 MB of disk")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://proxy"}, "127.0.0.1,localhost"),
        ({"HTTPS_PROXY": "http://proxy", "NO_PROXY": "x.org"}, "x.org,127.0.0.1,localhost"),
        ({"ALL_PROXY": "http://proxy", "no_proxy": "*"}, None),
    ],
)
def test_a_proxy_is_not_asked_for_servers_on_loopback(
    environ: dict[str, str], expected: str | None
) -> None:
    added = no_proxy(environ)
    assert added == ({} if expected is None else {"no_proxy": expected, "NO_PROXY": expected})


def find_python(folder: Path, *candidates: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", FIND_PYTHON, *candidates],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def write_python(folder: Path, name: str, *, version: str = "3, 11", venv: bool = True) -> Path:
    """Write a stand-in that says of itself what it is told to; it is this Python."""
    file = folder / name
    claim = f"import sys; sys.version_info = ({version}, 0)"
    lacking = "" if venv else "; sys.modules['venv'] = None"
    file.write_text(
        f"#!/bin/sh\nexec \"{sys.executable}\" -c \"{claim}{lacking}\nexec('''$2''')\"\n"
    )
    file.chmod(0o755)
    return file


def test_the_first_python_that_really_runs_is_taken(tmp_path: Path) -> None:
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    old = write_python(tmp_path, "python3.12", version="3, 10")
    good = write_python(tmp_path, "python3.13", version="3, 13")
    found = find_python(tmp_path)
    assert found.stdout == f"{good}\n"
    assert old.exists()


def test_a_python_without_venv_gives_way_to_one_with_it(tmp_path: Path) -> None:
    write_python(tmp_path, "python3.11", venv=False)
    good = write_python(tmp_path, "python3", version="3, 14")
    assert find_python(tmp_path).stdout == f"{good}\n"


def test_a_python_without_venv_names_the_package(tmp_path: Path) -> None:
    write_python(tmp_path, "python3", version="3, 12", venv=False)
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert found.stderr == (
        "python3 has no module venv; on Debian or Ubuntu: apt install python3.12-venv\n"
    )


def test_a_python_that_was_asked_for_is_the_only_one_tried(tmp_path: Path) -> None:
    write_python(tmp_path, "python3.11")
    found = find_python(tmp_path, "/nowhere/python")
    assert found.returncode == 1
    assert found.stderr.startswith("No Python 3.11 or newer among: /nowhere/python. ")
    assert found.stderr.count("\n") == 1
