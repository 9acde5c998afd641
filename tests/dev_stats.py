"""What tests of dev-stats share: events, a consumer with a topic of its own, ClickHouse's rows."""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import IO, Any
from urllib.parse import urlsplit

from clickhouse_connect.driver.client import Client
from django.conf import settings
from prometheus_client import REGISTRY

from devstats.clickhouse import DATABASE, connect_writer
from devstats.clickhouse_migrations import migrate
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.kafka.producer import Publisher
from pinactivity.kafka.record import Record
from pinactivity.kafka.source import Source
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.testing import message
from pinactivity.kafka.topics import dead_letter_topic
from tests.consuming import FIVE_MINUTES, Broker, drive

SESSIONS = "dev-stats-session-ended"
VIEWS = "dev-stats-property-object-view-ended"
OBJECTS = "dev-stats-property-objects"
TABLES = ("session_facts", "property_object_view_facts", "property_objects")

CREATED_AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def ended_session(**fields: Any) -> dict[str, Any]:
    """A payload of `session-ended`: a guest's five minutes, by default."""
    return {
        "SessionId": str(new_id()),
        "AnonymousId": str(new_id()),
        "UserId": None,
        "CreatedAt": iso_utc(CREATED_AT),
        "LastActivityAt": iso_utc(CREATED_AT + timedelta(minutes=5)),
        "DurationSeconds": 300,
        **fields,
    }


def ended_view(**fields: Any) -> dict[str, Any]:
    """A payload of `property-object-view-ended`: a guest's minute, by default."""
    return {
        "PropertyObjectViewId": str(new_id()),
        "PropertyObjectId": str(new_id()),
        "SessionId": str(new_id()),
        "AnonymousId": str(new_id()),
        "UserId": None,
        "ViewSource": "Map",
        "ViewedAt": iso_utc(CREATED_AT),
        "LastActivityAt": iso_utc(CREATED_AT + timedelta(minutes=1)),
        "DurationSeconds": 60,
        "FilterSnapshot": None,
        **fields,
    }


def changed_object(**fields: Any) -> dict[str, Any]:
    """A payload of `property-object-changed`: a new object of a new developer."""
    return {
        "PropertyObjectId": str(new_id()),
        "DeveloperId": str(new_id()),
        "BrandId": None,
        **fields,
    }


@dataclass(frozen=True)
class Scale:
    """How long the tests of outages go on."""

    kills: int
    away_seconds: float
    """ClickHouse stopped, or its table gone."""
    joins: int
    join_seconds: float


class Ingest:
    """One of the service's consumers, with a topic, dead letters and a group of its own."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self._spec = registered_consumers()[name]
        unique = new_id().hex
        self.topic = f"pin.test.{name}-{unique}"
        self.group = f"{name}-{unique}"
        self.sent = 0
        broker.create(self.topic)
        broker.create(dead_letter_topic(self.topic, self.group))
        self._consumers: list[Consumer] = []
        self._members: dict[str, Consumer] = {}

    def send(self, *payloads: Mapping[str, Any] | bytes, **options: Any) -> None:
        """Send messages; `options` are the headers of all of them, and the key."""
        self.broker.send([message(self.topic, payload, **options) for payload in payloads])
        self.sent += len(payloads)

    def consumer(
        self,
        *,
        rows: int = 1000,
        age: float = 0.0,
        max_poll_interval: timedelta = FIVE_MINUTES,
        group: str | None = None,
        publisher: Publisher | None = None,
        open_source: Callable[[], Source] | None = None,
        **options: Any,
    ) -> Consumer:
        """Make a member; of another group where the topic is to be read anew."""
        name = group or self.group
        consumer = Consumer(
            replace(
                self._spec,
                topics=(self.topic,),
                group=name,
                limits=lambda: BatchLimits(rows=rows, age=timedelta(seconds=age)),
            ),
            open_source=open_source
            or (lambda: self.broker.join(self.topic, name, max_poll_interval)),
            publisher=publisher or self.broker.publisher(),
            options=ConsumerOptions(
                **{
                    "first_wait": timedelta(milliseconds=50),
                    "longest_wait": timedelta(milliseconds=200),
                    **options,
                }
            ),
        )
        self._consumers.append(consumer)
        return consumer

    def run(self, group: str | None = None) -> Consumer:
        """Consume what was sent so far; always by the same member of a group."""
        name = group or self.group
        if name not in self._members:
            self._members[name] = self.consumer(group=group)
        drive(self._members[name], lambda: self.committed(name) == self.sent)
        return self._members[name]

    def committed(self, group: str | None = None) -> int:
        """How many messages lie before the group's offsets."""
        return sum(self.broker.committed(self.topic, group or self.group).values())

    @property
    def dead_letters(self) -> list[Record]:
        return self.broker.read(dead_letter_topic(self.topic, self.group))

    @property
    def reasons(self) -> list[str]:
        """Why there are dead letters."""
        headers = [dict(letter.headers)["dlq-reason"] for letter in self.dead_letters]
        return [reason.decode() for reason in headers if reason is not None]

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()


def metric(name: str, **labels: str) -> float:
    """Read a metric of this process."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


# -- ClickHouse ----------------------------------------------------------------------------


def make_tables() -> None:
    """Make the tables where they are missing."""
    client = connect_writer(database=None)
    list(migrate(client, cluster=""))
    client.close()


def clear_tables(client: Client) -> None:
    """Empty the tables, and let parts merge again."""
    for table in TABLES:
        client.command(f"TRUNCATE TABLE {DATABASE}.{table}")
        client.command(f"SYSTEM START MERGES {DATABASE}.{table}")


def stop_merges(client: Client) -> None:
    """Keep every inserted row as it is, until `clear_tables`."""
    for table in TABLES:
        client.command(f"SYSTEM STOP MERGES {DATABASE}.{table}")


def merge(client: Client) -> None:
    """Let the copies of rows collapse, now."""
    for table in TABLES:
        client.command(f"SYSTEM START MERGES {DATABASE}.{table}")
        client.command(f"OPTIMIZE TABLE {DATABASE}.{table} FINAL")


def rows_of(client: Client, table: str) -> list[dict[str, Any]]:
    """Every row that is stored, copies included."""
    found = client.query(f"SELECT * FROM {DATABASE}.{table}")
    return list(found.named_results())


def count_rows(client: Client, table: str = "session_facts") -> int:
    """Stored rows, copies included."""
    return int(client.query(f"SELECT count() FROM {DATABASE}.{table}").result_rows[0][0])


READ_SESSIONS = f"""
    SELECT count(), sum(duration) FROM (
        SELECT SessionId, argMax(DurationSeconds, IngestionTime) AS duration
        FROM {DATABASE}.session_facts GROUP BY SessionId
    )
"""
"""As the specification reads: each session once, without FINAL."""


def read_sessions(client: Client) -> tuple[int, int]:
    """Sessions and their seconds, as a reader counts them."""
    ((count, seconds),) = client.query(READ_SESSIONS).result_rows
    return count, seconds


class CuttingProxy:
    """Stands before ClickHouse and breaks connections after the server has answered.

    Args:
        url: Of ClickHouse.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._target = (address.hostname or "", address.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://default:@127.0.0.1:{self._listener.getsockname()[1]}/"
        self.cuts = 0
        """Inserts whose answer is still to be lost."""
        self.requests: list[bytes] = []
        """The heads of all requests."""
        self.spoil: Callable[[bytes], Iterable[bytes]] | None = None
        """Makes of an answer what comes of it, piece by piece, before the connection ends."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as incoming:
            while request := _read_http(incoming):
                self.requests.append(request.partition(b"\r\n\r\n")[0])
                with (
                    socket.create_connection(self._target) as server,
                    server.makefile("rb") as answers,
                ):
                    server.sendall(request)
                    answer = _read_http(answers)
                if self.cuts and b"INSERT" in request:
                    self.cuts -= 1
                    return
                if self.spoil:
                    for piece in self.spoil(answer):
                        client.sendall(piece)
                    return
                client.sendall(answer)


def _read_http(stream: IO[bytes]) -> bytes:
    """Read one request or answer as it is; empty at the end of the connection."""
    head = b""
    while line := stream.readline():
        head += line
        if line == b"\r\n":
            break
    else:
        return b""
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        body = b""
        while True:
            line = stream.readline()
            chunk = stream.read(int(line, 16) + 2)
            body += line + chunk
            if int(line, 16) == 0:
                return head + body
    length = [
        int(line.partition(b":")[2])
        for line in lowered.split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    return head + (stream.read(length[0]) if length else b"")


@contextmanager
def lossy_clickhouse() -> Iterator[CuttingProxy]:
    """Lead the service's connections through a proxy."""
    direct = settings.CLICKHOUSE_URL
    proxy = CuttingProxy(direct)
    settings.CLICKHOUSE_URL = proxy.url
    try:
        yield proxy
    finally:
        settings.CLICKHOUSE_URL = direct
        proxy.close()


def dump(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload).encode()


def spread(days: Sequence[datetime]) -> list[dict[str, Any]]:
    """Sessions that began at these moments."""
    return [
        ended_session(CreatedAt=iso_utc(day), LastActivityAt=iso_utc(day + timedelta(minutes=5)))
        for day in days
    ]
