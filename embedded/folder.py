"""The data folder: one stack at a time, and kept data never in throwaway mode."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from embedded.errors import EmbeddedServerError
from embedded.outside import LINK

LOCK_FILE: Final = "lock"
THROWAWAY_FILE: Final = "throwaway"
# Longer than a server takes to stop after its owner crashed.
WAIT_SECONDS: Final = 40.0


class FolderLock:
    """An exclusive lock on a data folder, held until the last holder of its descriptor is gone.

    The guards inherit the descriptor. So the lock outlives a crashed stack just as long as one of
    its servers does.
    """

    def __init__(self, data_dir: Path) -> None:
        self.fd = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire(data_dir)
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(self.fd)
            raise

    def _acquire(self, data_dir: Path) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = os.pread(self.fd, 32, 0).decode()
                # A dead holder's servers are on their way out: worth waiting for.
                if is_running(holder) or time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"Another embedded stack (process {holder or 'unknown'}) uses {data_dir}. "
                        "Stop it, or use another data folder (--data-dir)."
                    ) from None
                time.sleep(0.1)

    def release(self) -> None:
        """Give the folder free, also where a forked child still has the descriptor."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def is_running(pid: str) -> bool:
    """Tell whether a process with this id exists."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def mark_throwaway(data_dir: Path, *, throwaway: bool) -> None:
    """Refuse to mix kept data and throwaway mode; mark a new folder."""
    marker = data_dir / THROWAWAY_FILE
    used = any((data_dir / name).exists() for name in ("postgres", "clickhouse", "kafka", LINK))
    if throwaway and not used:
        marker.touch()
    elif throwaway != marker.exists():
        raise EmbeddedServerError(
            f"{data_dir} holds kept data: throwaway mode could lose it. Use another folder."
            if throwaway
            else f"{data_dir} was filled in throwaway mode and may be damaged. Remove it, or use "
            "another folder."
        )
