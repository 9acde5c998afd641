"""Folders that another user can enter, for a server that refuses to run as root.

Under a closed home, or where the umask shares nothing, that user reaches neither the wheel nor the
data folder. Then both go to a folder of root's that everybody may pass: the wheel's files as a
copy, the data behind a link that the data folder keeps. Nothing that exists changes its mode.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from embedded.errors import EmbeddedServerError

# The second for systems whose first one cannot be written.
STORES: Final = (Path("/var/lib/embedded-servers"), Path("/var/tmp/embedded-servers"))
LINK: Final = "outside"
PASSABLE: Final = 0o711
# (uid, gid) as systems have it whose accounts lack it.
NOBODY: Final = (65534, 65534)


def can_enter(path: Path, user: tuple[int, int]) -> bool:
    """Tell whether a user (uid, gid) may pass every folder above the path."""
    uid, gid = user
    for parent in path.resolve().parents:
        status = parent.stat()
        if status.st_uid == uid:
            needed = stat.S_IXUSR
        elif status.st_gid == gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not status.st_mode & needed:
            return False
    return True


def find_outside(data_dir: Path) -> Path:
    """Return where data that another user needs lies: in the data folder, or behind its link."""
    link = data_dir / LINK
    return link.resolve() if link.is_symlink() else data_dir


def move_outside(data_dir: Path, name: str, user: tuple[int, int]) -> None:
    """See that a user can enter the data folder's part `name`, which need not exist yet.

    What is there already, from a time when the user could enter, is moved. Killed in between, the
    next call goes on.
    """
    link = data_dir / LINK
    if not link.is_symlink():
        if can_enter(data_dir / name, user):
            return
        link.symlink_to(make_folder("data-"))
    outside = link.resolve()
    if not outside.exists():
        # Removed by somebody: begin anew, as if the part had been.
        link.unlink()
        link.symlink_to(outside := make_folder("data-"))
    before, after = data_dir / name, outside / name
    if before.exists() and not after.exists():
        move(before, after)


def move(before: Path, after: Path) -> None:
    """Move a folder with its owners and modes, also to another file system."""
    try:
        before.rename(after)
    except OSError:
        new = after.with_suffix(".moving")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(before, new, symlinks=True)
        for path in (before, *before.rglob("*")):
            status = path.lstat()
            os.chown(
                new / path.relative_to(before),
                status.st_uid,
                status.st_gid,
                follow_symlinks=False,
            )
        new.rename(after)
        shutil.rmtree(before)


def make_folder(prefix: str) -> Path:
    """Make a new folder that everybody may pass."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=find_store()))
    folder.chmod(PASSABLE)
    return folder


def make_temporary_folder() -> Path:
    """Make a folder that everybody may pass, in TMPDIR unless that is closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="embedded-data-"))
    folder.chmod(PASSABLE)
    if os.geteuid() != 0 or can_enter(folder / "any", NOBODY):
        return folder
    folder.rmdir()
    return make_folder("embedded-data-")


def copy_once(sources: Iterable[Path], name: str) -> Path:
    """Return a folder with copies of a wheel's folders that everybody may read.

    `name` holds the wheel's version; whoever finds it finds it whole.
    """
    target = find_store() / name
    if target.exists():
        return target
    new = Path(tempfile.mkdtemp(prefix=f"{name}.new-", dir=target.parent))
    try:
        copy_for_all(sources, new)
        try:
            new.rename(target)
        except OSError:
            # Another stack may have been as quick.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def copy_for_all(sources: Iterable[Path], target: Path) -> None:
    """Copy folders into one so that everybody may read them, whatever umask is in force."""
    for source in sources:
        shutil.copytree(source, target / source.name, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)


@contextmanager
def copied_to_plain_path(sources: Iterable[Path]) -> Iterator[Path]:
    """Copy folders for a moment to where no character of the path means anything to a shell."""
    folders = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    folder = next(folder for folder in folders if not is_special(folder))
    with tempfile.TemporaryDirectory(prefix="embedded-", dir=folder) as target:
        copy_for_all(sources, Path(target))
        yield Path(target)


def is_special(path: Path | str) -> bool:
    """Tell whether a shell would read a path between double quotes as something else."""
    return not set('"$`\\').isdisjoint(str(path))


def find_store() -> Path:
    """Return root's folder for all this, made if need be.

    Raises:
        EmbeddedServerError: none can be made, or what has its name is not to be trusted: in a
            folder that everybody may write to, anybody may have made it.
    """
    for store in STORES:
        try:
            store.mkdir()
            store.chmod(PASSABLE)
        except FileExistsError:
            pass
        except OSError:
            continue
        status = store.lstat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not others_write:
            return store
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root, and the user nobody can enter neither the data folder "
        f"nor {' nor '.join(map(str, STORES))}, which must be root's alone. Run this as an "
        "ordinary user, or in a folder that everybody may enter."
    )
