"""Look whether disk and memory suffice, before anything is begun.

Started as a script too (`python -I room.py venv`), before there is a virtual environment, so it
imports the standard library only.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

MB = 1_000_000
# Measured, and a little more (README.md has the figures). PostgreSQL's log of changes may grow to
# 2 GB in a long life of `up`.
NEEDED_DISK = {"venv": 1800 * MB, "up": 600 * MB, "run": 1000 * MB}
NEEDED_MEMORY = {"up": 1200 * MB, "run": 1500 * MB}


def missing_disk(purpose: str, folder: Path) -> str:
    """Say what is missing on the disk of a folder that need not exist yet; nothing when enough."""
    folder = folder.absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, needed = shutil.disk_usage(there).free, NEEDED_DISK[purpose]
    if free >= needed:
        return ""
    return (
        f"{folder} needs {needed // MB} MB of disk, and {free // MB} MB are free. Free some space, "
        "or use another disk."
    )


def missing_memory(purpose: str) -> str:
    """Say what is missing of memory; nothing when there is enough, or where it is not known."""
    free, needed = free_memory(), NEEDED_MEMORY[purpose]
    if free is None or free >= needed:
        return ""
    return (
        f"all of this takes {needed // MB} MB of memory, and {free // MB} MB are free: it may "
        "become slow, or the system may end parts of it."
    )


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes that new processes can have: the machine's, or less in a container (Linux).

    Swap counts. In a container the files that the kernel may forget count as free.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = sum(int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
    except (OSError, KeyError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        # No container, or one without a limit ("max").
        pass
    return free


def main() -> None:
    """Refuse when the disk is too small for the purpose named by the one argument."""
    (purpose,) = sys.argv[1:]
    missing = missing_disk(purpose, Path(f".{purpose}"))
    if missing:
        sys.exit(missing)


if __name__ == "__main__":
    main()
