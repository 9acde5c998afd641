"""Apache Kafka itself: its jars out of the Maven registry, on the machine's Java.

One node, broker and controller at once, on loopback. `KAFKA=apache` starts it in place of Tansu.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import ClassVar, Final
from xml.etree import ElementTree as ET

from embedded.environment import server_environment
from embedded.errors import EmbeddedServerError, StartGivenUpError, reason_in
from embedded.guarded import Command, GuardedProcess, Owner, State
from embedded.kafka_broker import KafkaBroker
from embedded.server import HOST, PAUSE_SECONDS, died_at_start, is_port_free

ROOT: Final = Path(__file__).resolve().parent.parent
POM: Final = Path(__file__).with_name("kafka") / "pom.xml"
VERSION: Final = ET.parse(POM).findtext(".//{*}properties/{*}kafka.version") or ""
DOWNLOAD_SECONDS: Final = 900.0
FORMAT_SECONDS: Final = 60.0
# Apart from those that the stack hands out: a server about to start may have been given one.
CONTROLLER_PORTS: Final = range(18000, 20000)
CLUSTER_ID: Final = "cGluYWN0aXZpdHkta2Fmaw"
NODE: Final = 1
CONFIGURATION: Final = "server.properties"
SETTINGS: Final = {
    "node.id": str(NODE),
    "process.roles": "broker,controller",
    "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "BROKER",
    "controller.listener.names": "CONTROLLER",
    # Relative to the configuration, so that no character of a folder's name needs escaping.
    "log.dirs": "log",
    # A misspelt name is an error.
    "auto.create.topics.enable": "false",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    # A group's first member need not wait for others.
    "group.initial.rebalance.delay.ms": "0",
    # After a crash a broker must wait for the end of its earlier life's session.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    # Out of the heap, at the start.
    "log.cleaner.dedupe.buffer.size": str(4 << 20),
}
JVM_OPTIONS: Final = [
    "-Xmx512m",
    # Quick to start, and sparing with the two cores of a small machine.
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
]


class ApacheKafka(KafkaBroker):
    """Apache Kafka; topics and offsets are kept."""

    # Of the checkout, not of a data folder: throwaway stacks need no download of their own.
    jars: ClassVar[Path] = ROOT / ".data" / f"apache-kafka-{VERSION}" / "lib"
    stop_signals: ClassVar[list[tuple[int, float]]] = [
        (signal.SIGTERM, 15.0),
        (signal.SIGKILL, 5.0),
    ]

    @property
    def folder(self) -> Path:
        """Kafka's own data folder."""
        return self.data_dir / "kafka"

    def launch(self, owner: Owner) -> None:
        """Fetch the jars and format the storage where that was not done before; start."""
        java = self._find_program("java", "Java 17 or newer")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if not self.jars.exists():
            self._fetch_jars(owner)
        if not self.folder.exists():
            self._format_storage(java, owner)
        super().launch(owner)

    def command(self) -> Command:
        """Run the node in the foreground, with its listeners in a configuration written anew."""
        write_configuration(self.folder, self.port)
        java = self._find_program("java", "Java 17 or newer")
        return self._java(java, "kafka.Kafka", CONFIGURATION, folder=self.folder)

    def _java(self, java: str, *arguments: str, folder: Path) -> Command:
        argv = [java, *JVM_OPTIONS, "-cp", f"{self.jars}/*", *arguments]
        return Command(argv, self.log, self.stop_signals, server_environment(), str(folder))

    def _find_program(self, program: str, wanted: str) -> str:
        found = shutil.which(program)
        if found is None:
            raise EmbeddedServerError(
                f"Apache Kafka {VERSION} needs {wanted}, and there is no `{program}` on the PATH. "
                f"Install it, leave out KAFKA=apache to use the broker of a wheel, or set "
                f"{self.variable} to the address of a server of your own."
            )
        return found

    def _fetch_jars(self, owner: Owner) -> None:
        """Let Maven copy the jars to another name first, so that a part of them is never used."""
        maven = self._find_program("mvn", "Maven to fetch its jars once")
        self.jars.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="lib.new-", dir=self.jars.parent))
        argv = [
            *(maven, "--quiet", "--batch-mode", "--file", str(POM)),
            *("dependency:copy-dependencies", f"-DoutputDirectory={new}"),
        ]
        # Maven's own environment is whatever reaches its registry from here: proxies, settings.
        command = Command(argv, self.log, self.stop_signals, dict(os.environ), str(new))
        seen = self._log_size()
        try:
            state = self._run_to_end("maven", command, owner, seconds=DOWNLOAD_SECONDS)
            if state.exit_code != 0:
                raise EmbeddedServerError(
                    f"Maven could not fetch the jars of Apache Kafka {VERSION} that {POM} names. "
                    "See that its registry can be reached, leave out KAFKA=apache to use the "
                    f"broker of a wheel, or set {self.variable} to the address of a server of your "
                    f"own: {reason_in(self.log, self._log_tail(seen) or state.failure)}"
                )
            try:
                new.rename(self.jars)
            except OSError:
                # Another stack may have been as quick.
                if not self.jars.exists():
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _format_storage(self, java: str, owner: Owner) -> None:
        """Format under another name first, so that a half-made storage is never used."""
        new = self.data_dir / "kafka.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        write_configuration(new, self.port)
        tool = "kafka.tools.StorageTool"
        options = ("--cluster-id", CLUSTER_ID, "--config", CONFIGURATION)
        command = self._java(java, tool, "format", *options, folder=new)
        seen = self._log_size()
        state = self._run_to_end("kafka-format", command, owner, seconds=FORMAT_SECONDS)
        if state.exit_code != 0:
            raise died_at_start(self, state, self._log_tail(seen))
        new.rename(self.folder)

    def _run_to_end(self, name: str, command: Command, owner: Owner, *, seconds: float) -> State:
        """Run a program under a guard of its own; give it up when nobody waits any more."""
        process = GuardedProcess(owner.control, name)
        deadline = time.monotonic() + seconds
        try:
            process.spawn(command, owner)
            while (state := process.state()) is not None and state.pid is not None:
                if self.abandoned.is_set():
                    raise StartGivenUpError(f"The start of {self.name} was given up.")
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"{name} took longer than {seconds:.0f} seconds. Its log is {self.log}."
                    )
                time.sleep(PAUSE_SECONDS)
        finally:
            process.ask_to_quit()
            process.join(sum(seconds for _, seconds in self.stop_signals) + 5.0)
        if state is None:
            raise EmbeddedServerError(f"The guard of {name} ended before {name} did.")
        return state


def write_configuration(folder: Path, port: int) -> None:
    """Write the configuration of a node whose broker listens on this port."""
    controller = f"{HOST}:{find_controller_port()}"
    listeners = {
        "listeners": f"BROKER://{HOST}:{port},CONTROLLER://{controller}",
        "advertised.listeners": f"BROKER://{HOST}:{port}",
        "controller.quorum.voters": f"{NODE}@{controller}",
    }
    lines = [f"{name}={value}\n" for name, value in (SETTINGS | listeners).items()]
    (folder / CONFIGURATION).write_text("".join(lines))


def find_controller_port() -> int:
    """Find a port for the controller, to which only its own node connects."""
    for port in random.sample(CONTROLLER_PORTS, 200):
        if is_port_free(port):
            return port
    raise EmbeddedServerError(
        f"No free port was found on the loopback from {CONTROLLER_PORTS.start} to "
        f"{CONTROLLER_PORTS.stop - 1} for Kafka's controller."
    )
