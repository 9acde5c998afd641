"""Apache Kafka in place of the wheel's broker: `KAFKA=apache`."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaTimeoutError

from embedded import EmbeddedServerError, EmbeddedStack, attach, private_server
from embedded.apache_kafka import VERSION, ApacheKafka
from embedded.folder import is_running
from embedded.server import Server
from embedded.stack import KAFKAS
from embedded.tansu import Tansu
from tests.embedded.processes import PROJECT, run_embedded

needs_java = pytest.mark.skipif(
    shutil.which("java") is None or shutil.which("mvn") is None,
    reason="Apache Kafka needs Java and Maven",
)


def create_topic(server: Server, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=server.address)
    admin.create_topics({topic: {"num_partitions": 6, "replication_factor": 1}})
    admin.close()


def list_topics(server: Server) -> set[str]:
    admin = KafkaAdminClient(bootstrap_servers=server.address)
    try:
        return set(admin.list_topics())
    finally:
        admin.close()


def send(server: Server, topic: str, value: bytes) -> None:
    """Send a message and wait for its acknowledgement."""
    producer = KafkaProducer(bootstrap_servers=server.address, acks="all", max_block_ms=5_000)
    try:
        producer.send(topic, value).get(20)
    finally:
        producer.close()


def read(server: Server, topic: str, count: int, *, group: str | None = None) -> set[bytes]:
    """Read this many messages of a topic; a group goes on where it had got to."""
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=server.address,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=30_000,
    )
    try:
        values = {next(consumer).value for _ in range(count)}
        if group is not None:
            consumer.commit()
        return values
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[Server]:
    """One node for this file."""
    with private_server("kafka", kafka="apache") as server:
        yield server


@needs_java
def test_topics_messages_and_offsets_survive_a_stop_a_kill_and_a_freeze(broker: Server) -> None:
    create_topic(broker, "kept")
    send(broker, "kept", b"before")
    assert read(broker, "kept", 1, group="readers") == {b"before"}

    interruptions: list[Callable[[Server], object]] = [Server.restart, kill_and_start, freeze]
    for interrupt in interruptions:
        interrupt(broker)
        value = interrupt.__name__.encode()
        assert "kept" in list_topics(broker)
        send(broker, "kept", value)
        assert read(broker, "kept", 1, group="readers") == {value}
    assert read(broker, "kept", 4) == {b"before", b"restart", b"kill_and_start", b"freeze"}


def kill_and_start(broker: Server) -> None:
    broker.kill()
    assert broker.pid is None
    broker.start()


def freeze(broker: Server) -> None:
    broker.freeze()
    with pytest.raises(TimeoutError):
        broker.check()
    broker.thaw()
    broker.check()


@needs_java
def test_a_topic_that_nobody_made_is_refused(broker: Server) -> None:
    with pytest.raises(KafkaTimeoutError):
        send(broker, "misspelt", b"lost")
    assert "misspelt" not in list_topics(broker)


@needs_java
def test_another_stack_on_the_folder_finds_the_topics_and_needs_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApacheKafka, "jars", tmp_path / "jars" / "lib")
    data_dir = tmp_path / "data"
    with start(data_dir) as stack:
        create_topic(stack.servers["kafka"], "kept")
        send(stack.servers["kafka"], "kept", b"value")
    java_alone(tmp_path / "bin", monkeypatch)
    with start(data_dir) as stack:
        control = Path(stack.environment["EMBEDDED_CONTROL"])
        assert isinstance(attach("kafka", control), ApacheKafka)
        server = stack.servers["kafka"]
        assert read(server, "kept", 1) == {b"value"}
        pid = server.pid
        server.freeze()
    assert not is_running(str(pid))
    assert [each.name for each in (tmp_path / "jars").iterdir()] == ["lib"]


def start(data_dir: Path) -> EmbeddedStack:
    return EmbeddedStack(data_dir, only={"kafka"}, environ={"KAFKA": "apache"})


def java_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Java on the PATH, and nothing else."""
    java = shutil.which("java")
    assert java is not None
    folder.mkdir()
    (folder / "java").symlink_to(java)
    monkeypatch.setenv("PATH", str(folder))


def test_missing_java_is_reported_without_a_traceback(tmp_path: Path) -> None:
    ended = run_embedded(
        *("run", "--only", "kafka", "--kafka", "apache", "--throwaway", "--", "true"),
        PATH=str(tmp_path),
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"embedded: Apache Kafka {VERSION} needs Java 17 or newer")
    assert "leave out KAFKA=apache" in ended.stderr
    assert "KAFKA_BOOTSTRAP_SERVERS" in ended.stderr
    assert "Traceback" not in ended.stderr


@needs_java
def test_missing_maven_is_reported_when_the_jars_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApacheKafka, "jars", tmp_path / "jars" / "lib")
    java_alone(tmp_path / "bin", monkeypatch)
    with pytest.raises(EmbeddedServerError, match="no `mvn` on the PATH"):
        start(tmp_path / "data").start()


@needs_java
def test_jars_that_cannot_be_fetched_are_reported_with_the_reason_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApacheKafka, "jars", tmp_path / "jars" / "lib")
    java_alone(tmp_path / "bin", monkeypatch)
    maven = tmp_path / "bin" / "mvn"
    maven.write_text("#!/bin/sh\necho no such registry\nexit 1\n")
    maven.chmod(0o755)
    for _ in range(2):
        with pytest.raises(EmbeddedServerError, match="could not fetch the jars") as caught:
            start(tmp_path / "data").start()
        assert "no such registry" in str(caught.value)
    assert list((tmp_path / "jars").iterdir()) == []


def test_the_environment_chooses_the_broker_and_only_from_those_that_there_are(
    tmp_path: Path,
) -> None:
    with private_server("kafka") as server:
        assert isinstance(server, Tansu)
    with pytest.raises(EmbeddedServerError, match="KAFKA is one of tansu, apache, not pulsar"):
        EmbeddedStack(tmp_path, only={"kafka"}, environ={"KAFKA": "pulsar"})
    assert KAFKAS["apache"] is ApacheKafka


def test_the_version_is_that_of_the_compose_file() -> None:
    assert f"image: apache/kafka:{VERSION}\n" in (PROJECT / "docker-compose.yml").read_text()
