"""What the brokers that speak Kafka's protocol share: their address and their health check."""

import socket
import struct
from typing import Final

from embedded.server import HOST, Server

METADATA: Final = 3
METADATA_VERSION: Final = 1
NO_TOPICS: Final = 0


class KafkaBroker(Server):
    """A server of Kafka's protocol."""

    name = "kafka"
    variable = "KAFKA_BOOTSTRAP_SERVERS"

    @property
    def address(self) -> str:
        """The bootstrap address."""
        return f"{HOST}:{self.port}"

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
