"""Root's PostgreSQL runs where its user can enter, and nothing that exists changes its mode."""

import os
import pwd
import shutil
import stat
from pathlib import Path

import psutil
import psycopg
import pytest

from embedded import EmbeddedServerError, EmbeddedStack, outside
from embedded.outside import LINK, can_enter, copy_once, find_store, move_outside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as somebody else")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder that only root may enter, in a folder that everybody may pass."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of the test's own."""
    folder = tmp_path / "store"
    monkeypatch.setattr(outside, "STORES", (folder,))
    return folder


def remember(data_dir: Path) -> None:
    stack = EmbeddedStack(data_dir, only={"postgres"}, environ={})
    with stack, psycopg.connect(stack.environment["DATABASE_URL"]) as database:
        database.execute("CREATE TABLE kept AS SELECT 42 AS answer")


def recall(data_dir: Path) -> object:
    stack = EmbeddedStack(data_dir, only={"postgres"}, environ={})
    with stack, psycopg.connect(stack.environment["DATABASE_URL"]) as database:
        return database.execute("SELECT answer FROM kept").fetchone()


def test_data_in_a_closed_folder_is_found_again_and_the_folder_stays_closed(data_dir: Path) -> None:
    remember(data_dir)
    assert not (data_dir / "postgres").exists()
    assert recall(data_dir) == (42,)
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


def test_data_of_before_moves_when_its_folder_is_closed(data_dir: Path) -> None:
    data_dir.chmod(0o711)
    remember(data_dir)
    assert (data_dir / "postgres").exists()
    data_dir.chmod(0o700)
    assert recall(data_dir) == (42,)
    assert not (data_dir / "postgres").exists()
    # It stays found when the folder is opened again.
    data_dir.chmod(0o711)
    assert recall(data_dir) == (42,)


def test_a_server_in_a_closed_folder_has_no_right_of_root(data_dir: Path) -> None:
    with EmbeddedStack(data_dir, only={"postgres"}, environ={}) as stack:
        server = psutil.Process(stack.servers["postgres"].pid)
        assert server.username() == "nobody"
        status = Path(f"/proc/{server.pid}/status").read_text()
    capabilities = dict(line.split(":\t") for line in status.splitlines() if "Cap" in line)
    assert int(capabilities["CapEff"], 16) == int(capabilities["CapPrm"], 16) == 0


def test_data_whose_folder_outside_was_removed_begins_anew(data_dir: Path) -> None:
    remember(data_dir)
    shutil.rmtree((data_dir / LINK).resolve())
    with EmbeddedStack(data_dir, only={"postgres"}, environ={}) as stack:
        stack.servers["postgres"].check()


def test_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        remember(tmp_path / "data")
        assert recall(tmp_path / "data") == (42,)
    finally:
        os.umask(before)


def test_a_throwaway_stack_under_a_closed_tmpdir_starts_and_leaves_nothing(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(data_dir))
    with EmbeddedStack(None, throwaway=True, only={"postgres"}, environ={}) as stack:
        folder = stack.servers["postgres"].data_dir
        stack.servers["postgres"].check()
    assert not folder.exists()
    assert list(data_dir.iterdir()) == []


def test_moving_ends_what_a_kill_cut_off(
    data_dir: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another file system, owners included: the link comes first, the old folder goes last."""
    nobody = pwd.getpwnam("nobody")
    user = nobody.pw_uid, nobody.pw_gid
    old = data_dir / "postgres"
    old.mkdir()
    (old / "file").write_text("kept")
    os.chown(old / "file", *user)
    folder = outside.make_folder("data-")
    (data_dir / LINK).symlink_to(folder)
    (folder / "postgres.moving").mkdir()

    def refuse(self: Path, target: Path) -> Path:
        if self == old:
            raise OSError(18, "Invalid cross-device link")
        return original(self, target)

    original = Path.rename
    monkeypatch.setattr(Path, "rename", refuse)
    move_outside(data_dir, "postgres", user)
    moved = folder / "postgres" / "file"
    assert (moved.read_text(), moved.stat().st_uid) == ("kept", nobody.pw_uid)
    assert not old.exists()


def test_a_copy_can_be_read_by_everybody_and_is_made_once(tmp_path: Path, store: Path) -> None:
    source = tmp_path / "wheel"
    (source / "bin").mkdir(parents=True, mode=0o700)
    (source / "bin" / "program").touch(mode=0o700)
    (source / "text").touch(mode=0o600)
    copy = copy_once([source], "wheel-1")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (copy / "wheel").rglob("*")}
    assert modes == {"bin": 0o755, "program": 0o755, "text": 0o644}
    assert stat.S_IMODE((source / "text").stat().st_mode) == 0o600
    assert copy_once([source], "wheel-1") == copy
    assert [path.name for path in store.iterdir()] == ["wheel-1"]


@pytest.mark.parametrize("how", ["another's", "open to others", "a link"])
def test_a_store_that_anybody_may_have_made_is_refused(
    how: str, tmp_path: Path, store: Path
) -> None:
    if how == "a link":
        (tmp_path / "elsewhere").mkdir()
        store.symlink_to(tmp_path / "elsewhere")
    else:
        store.mkdir()
        store.chmod(0o777 if how == "open to others" else 0o755)
        os.chown(store, 12345 if how == "another's" else 0, 0)
    with pytest.raises(EmbeddedServerError, match="must be root's alone"):
        find_store()


def test_who_owns_a_folder_may_enter_it(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 23456)
    assert can_enter(folder / "data", (12345, 1))
    assert not can_enter(folder / "data", (1, 23456))
    folder.chmod(0o710)
    assert can_enter(folder / "data", (1, 23456))
    assert not can_enter(folder / "data", (1, 1))
