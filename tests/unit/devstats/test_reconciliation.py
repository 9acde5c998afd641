"""The file of the Kafka index: where it is, and what is left of it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import os, time, uuid
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")
import django
django.setup()
from devstats.reconciliation.kafka_index import KafkaIndex
index = KafkaIndex(None)
for _ in range(50_000):
    index.add(str(uuid.uuid4()), None, copies=1, unread=0, dead=0)
print("filled", flush=True)
time.sleep(60)
"""


def test_file_of_the_index_is_in_tmpdir_has_no_name_and_goes_with_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", FILL], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"filled\n"
            opened = [
                descriptor.stat().st_size
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir()
                if str(descriptor.readlink()).startswith(str(tmp_path))
            ]
            assert len(opened) == 1
            assert opened[0] > 1_000_000  # else it is in memory
            assert list(tmp_path.iterdir()) == []
        finally:
            process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
