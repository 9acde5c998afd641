"""Reconciliation of a day's worth of events: how long, how much memory, how much disk.

`make bench NAME=reconciliation` closes a million sessions over six hours, publishes their events
through the relay, stores their facts, and runs `manage.py reconcile` over that time in a process
of its own. It must report that nothing is lost. The servers must be empty ones.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connection

from bench.measure import BenchFailed, conclude, database_url, own_database, say
from outbox.options import OutboxOptions
from outbox.relay import OutboxRelay
from pinactivity.core.times import iso_utc
from pinactivity.kafka.offsets import move_offsets
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.topics import SESSION_ENDED

_HOURS = 6

# A reconciliation reads only the key and the CreatedAt of a message.
_CLOSE = """
    WITH new AS (
        INSERT INTO sessions (
            id, anonymous_id, status, created_at, last_activity_at, ended_at, duration,
            close_reason, version, user_agent, browser, os, device_type
        )
        SELECT gen_random_uuid(), gen_random_uuid(), 'Inactive', at - interval '17 min',
               at - interval '12 min', at, interval '5 min', 'Inactivity', 2, 'bench', '', '',
               'Unknown'
        FROM (
            SELECT %(since)s + n * %(hours)s * interval '1 hour' / %(count)s AS at
            FROM generate_series(0, %(count)s - 1) AS n
        ) AS times
        RETURNING id, ended_at
    )
    INSERT INTO outbox_messages (message_id, topic, key, headers, payload, created_at)
    SELECT gen_random_uuid(), %(topic)s, id,
           json_build_object('MessageId', gen_random_uuid(), 'CreatedAt', ended_at)::text,
           json_build_object('SessionId', id)::text, ended_at
    FROM new
"""


def _fill(sessions: int, since: datetime) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
        cursor.execute(
            _CLOSE,
            {"since": since, "count": sessions, "hours": _HOURS, "topic": SESSION_ENDED},
        )
        cursor.execute("ANALYZE")
    say(f"{sessions:,} sessions closed")
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=30)
    )
    with closing(publisher):
        OutboxRelay(publisher=publisher, options=OutboxOptions()).run()
    spec = registered_consumers()["dev-stats-session-ended"]
    move_offsets(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        topics=spec.topics,
        group=spec.group,
        since=datetime.now(UTC) + timedelta(days=1),
    )
    say("published")


def _run_command(bounds: list[str]) -> dict[str, Any]:
    """Run the command; return what it prints, and what it took."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "manage.py", "reconcile", *bounds, "--json"]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "DATABASE_URL": database_url(), "TMPDIR": folder},
        )
        with process:
            disk = memory = 0
            while process.poll() is None:
                disk = max(disk, _size_of_open_files(process.pid, folder))
                memory = max(memory, _peak_memory(process.pid))
                time.sleep(0.2)
            output = process.stdout.read() if process.stdout else b""
        seconds = time.monotonic() - began
    if process.returncode:
        raise BenchFailed(f"reconcile ended with {process.returncode}.")
    total = json.loads(output)["Total"]
    return {
        **{name: total[name] for name in ("Closed", "Facts", "Lost", "Duplicated", "Late")},
        "seconds": round(seconds, 1),
        "memory_mb": memory // 1024,
        "disk_mb": disk // 2**20,
    }


def _size_of_open_files(pid: int, folder: str) -> int:
    """Add up a process's open files in a folder, deleted ones too. Linux only."""
    total = 0
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(descriptor.readlink()).startswith(folder):
                total += descriptor.stat().st_size
        except OSError:  # closed meanwhile
            continue
    return total


def _peak_memory(pid: int) -> int:
    """Return the most memory that a process has had, in KiB; 0 once it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    options = parser.parse_args()
    until = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    since = until - timedelta(hours=_HOURS)
    bounds = ["--from", iso_utc(since), "--to", iso_utc(until)]
    call_command("migrate_clickhouse", verbosity=0)
    call_command("create_topics", verbosity=0)
    with own_database():
        _fill(options.sessions, since)
        began = time.monotonic()
        call_command("backfill_session_facts", *bounds)
        say(f"backfilled in {time.monotonic() - began:.0f} s")
        result = _run_command(bounds)
    conclude({"name": "reconciliation", "sessions": options.sessions, **result})
    if result["Lost"] or result["Facts"] != options.sessions:
        raise BenchFailed("The reconciliation is not whole.")


if __name__ == "__main__":
    main()
