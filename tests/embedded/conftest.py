"""What the tests of the servers share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.processes import remove_outside


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that everybody may pass, unlike pytest's own: PostgreSQL keeps its data in it."""
    folder = Path(tempfile.mkdtemp(prefix="test-"))
    folder.chmod(0o711)
    yield folder
    remove_outside(folder)
    shutil.rmtree(folder)
