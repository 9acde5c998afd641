"""ClickHouse: the chDB engine in a process of its own, behind the HTTP front."""

import importlib.util
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import ClassVar

from embedded.environment import server_environment
from embedded.guarded import Command
from embedded.server import HOST, Server, missing_wheel


class ClickHouse(Server):
    """ClickHouse over HTTP; its data is kept."""

    name = "clickhouse"
    variable = "CLICKHOUSE_URL"
    wheel = "chdb"
    # The front gives running queries a few seconds, then the engine closes its tables.
    stop_signals: ClassVar[list[tuple[int, float]]] = [
        (signal.SIGTERM, 12.0),
        (signal.SIGKILL, 5.0),
    ]

    @property
    def address(self) -> str:
        """The URL of the default database."""
        return f"http://default:@{HOST}:{self.port}/"

    def command(self) -> Command:
        """Run the front, which opens the engine."""
        if importlib.util.find_spec("chdb") is None:
            raise missing_wheel(self)
        folder = self.data_dir / "clickhouse"
        folder.mkdir(parents=True, exist_ok=True)
        project = Path(__file__).resolve().parent.parent
        paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        return Command(
            [sys.executable, "-m", "embedded.clickhouse_http", str(folder), str(self.port)],
            self.log,
            self.stop_signals,
            server_environment() | paths,
            # Where Python finds the front: a colon in this path would end it in PYTHONPATH.
            str(project),
        )

    def check(self) -> None:
        """Run SELECT 1."""
        url = f"http://{HOST}:{self.port}/?query=SELECT%201"
        # Without the proxies that the environment may name.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=5) as response:
            answer = response.read()
        if answer != b"1\n":
            raise ConnectionError(f"SELECT 1 answered {answer!r}")
