"""A whole run in real processes leaves no trace of a device but where the contracts put it.

Address and User-Agent stay in PostgreSQL: with their session, and the address besides in the
counters of the rate limits. The AnonymousId is in rows, in facts, in payloads of events and in
answers to its own device (design, section 13). Everything else that leaves a process is searched
for them: logs, PostgreSQL's own included, /metrics, exported spans, Kafka's keys and headers,
`last_error`.
"""

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import jwt
import pytest
from clickhouse_connect.driver.client import Client
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings
from django.db import connection
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from embedded.stack import find_free_port
from outbox.models import OutboxMessage
from pinactivity.celery import app
from pinactivity.core.ids import new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.testing import message
from pinactivity.kafka.topic_admin import create_topics
from pinactivity.kafka.topics import (
    PROPERTY_OBJECT_VIEW_ENDED,
    TOPICS,
    USER_SIGNED_IN,
    dead_letter_topics,
)
from pinactivity.postgres.clock import statement_time
from sessions.models import ActivityCloserRun, Session
from tests.api import HEARTBEAT, LINK, OPEN, START, view_heartbeat
from tests.dev_stats import SESSIONS, VIEWS, count_rows, rows_of
from tests.dev_stats import TABLES as FACTS_TABLES
from tests.kafka import TopicReader, skip_to_end
from tests.processes import CELERY, GRANIAN, MANAGE, running, wait_until, worker
from tests.tokens import bearer, claims, pem
from views.models import PropertyObjectViewStatsSeen

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

CONSUMERS = ("signed-in", "view-stats", SESSIONS, VIEWS)
ADDRESSES = ("198.51.100.77", "2001:db8:77::abcd", "127.77.66.55")
"""Of devices: by X-Forwarded-For, of either version, and by the socket."""
UNCLOSABLE, UNLINKABLE, UNSTORABLE = "Unclosable", "Unlinkable", "Unstorable"
REFUSALS = {
    # By rows that hold an address and a User-Agent: PostgreSQL's DETAIL quotes them.
    "chk_refuse_closing": f"status = 'Active' OR user_agent NOT LIKE '%{UNCLOSABLE}%'",
    "chk_refuse_linking": f"user_id IS NULL OR user_agent NOT LIKE '%{UNLINKABLE}%'",
    "chk_refuse_starting": f"user_agent NOT LIKE '%{UNSTORABLE}%'",
}

Channels = dict[str, str]
"""What was told, by where."""


def spellings(mark: str) -> set[str]:
    """The ways to write a mark that mean the same: an id without dashes, an address as it came."""
    lower = mark.lower()
    return {lower, lower.replace("-", "")} | ({"2001:0db8:0077"} if ":" in lower else set())


def find(mark: object, channels: Mapping[str, str]) -> set[str]:
    """Return the channels that tell a mark, in any of its spellings."""
    wanted = spellings(str(mark))
    return {name for name, text in channels.items() if any(each in text.lower() for each in wanted)}


def test_search_finds_what_is_there() -> None:
    device = new_id()
    for mark in (*ADDRESSES, device, "SecretBrowser"):
        for text in (str(mark), str(mark).upper(), f'{{"x": "{mark}"}}', f"\x00{mark}\xff"):
            assert find(mark, {"one": text, "other": "nothing"}) == {"one"}
    assert find(device, {"one": device.hex}) == {"one"}
    assert find("2001:db8:77::abcd", {"one": "2001:0DB8:0077:0:0:0:0:ABCD"}) == {"one"}


# -- the processes, and what hears them ----------------------------------------------------


class SpanReceiver:
    """An OTLP receiver on the loopback, as a collector is."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.requests.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def text(self) -> str:
        """All that was received, readable: names, attributes, events, resources."""
        return "\n".join(str(ExportTraceServiceRequest.FromString(r)) for r in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Process:
    """A process of the service, with where it serves its metrics."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, port: int) -> None:
        self.process, self.log, self.port = process, log, port

    def get(self, path: str) -> tuple[int, str]:
        """Ask by HTTP; (0, "") while nobody answers."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            link.close()


@contextmanager
def service(folder: Path, **variables: str) -> Iterator[dict[str, Process]]:
    """Run all of the service as in production: two webs, of which one is behind a proxy."""
    ports: dict[str, int] = {}

    def web(name: str) -> list[str]:
        return [
            *(*GRANIAN, "--interface", "wsgi", "--host", "127.0.0.1", "--no-ws"),
            *("--port", str(ports[name]), "--workers", "1", "--blocking-threads", "2"),
            "pinactivity.wsgi:application",
        ]

    commands: dict[str, Callable[[], list[str]]] = {
        "web": lambda: web("web"),
        "web behind a proxy": lambda: web("web behind a proxy"),
        "closer": lambda: worker("closer"),
        "relay": lambda: worker("relay"),
        "beat": lambda: [*CELERY, "beat", "--pidfile=", "--schedule", str(folder / "schedule")],
        "consumer": lambda: [*MANAGE, "consume", *CONSUMERS],
    }
    with ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            ports[name] = find_free_port()
            own = {"TRUSTED_PROXY_COUNT": "1"} if "proxy" in name else {}
            if not name.startswith("web"):
                own["METRICS_PORT"] = str(ports[name])
            log = folder / f"{name}.log"
            process = stack.enter_context(running(command(), log, **variables, **own))
            processes[name] = Process(process, log, ports[name])
        for name, each in processes.items():
            wait_until(partial(is_up, each), what=f"the start of {name}")
        yield processes


def is_up(process: Process) -> bool:
    assert process.process.poll() is None, process.log.read_text()
    return process.get("/metrics")[0] == 200


def stop(processes: Mapping[str, Process]) -> None:
    for each in processes.values():
        each.process.send_signal(signal.SIGTERM)
    assert {name: each.process.wait(30) for name, each in processes.items()} == dict.fromkeys(
        processes, 0
    )


class Device:
    """A browser: what it sends names it, by address, User-Agent and AnonymousId."""

    answers = ""
    """Of all devices."""

    def __init__(
        self, web: Process, kind: str = "", *, address: str = "127.0.0.1", forwarded: str = ""
    ) -> None:
        self.anonymous_id = new_id()
        self.user_agent = f"SecretBrowser{new_id().hex}{kind}"
        self._port, self._address, self._forwarded = web.port, address, forwarded

    def send(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        link = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=30, source_address=(self._address, 0)
        )
        sent = {
            "User-Agent": self.user_agent,
            "X-Anonymous-Id": str(self.anonymous_id),
            "Content-Type": "application/json",
            **({"X-Forwarded-For": self._forwarded} if self._forwarded else {}),
            **headers,
        }
        with closing(link):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            link.request(method, path, None if body is None else content, sent)
            answer = link.getresponse()
            text = answer.read().decode()
        Device.answers += f"{answer.headers}\n{text}\n"
        return answer.status, json.loads(text)

    def visit(self) -> tuple[UUID, UUID]:
        """Start, beat, open a view and beat that; return the ids of session and view."""
        status, started = self.send("POST", START)
        assert status == 201, started
        body = {"SessionId": started["SessionId"]}
        assert self.send("POST", HEARTBEAT, body)[1]["Restarted"] is False
        body |= {"PropertyObjectId": str(new_id()), "ViewSource": "Map", "FilterSnapshot": {"A": 1}}
        _, opened = self.send("POST", OPEN, body)
        view_id = UUID(opened["PropertyObjectViewId"])
        assert self.send("PUT", view_heartbeat(view_id)) == (200, {"Accepted": True})
        return UUID(started["SessionId"]), view_id


# -- the run -------------------------------------------------------------------------------


@pytest.fixture
def readers(kafka_topics: None) -> Iterator[dict[str, TopicReader]]:
    """What arrives in our topics and in their dead letters; the consumers begin with it."""
    app.control.purge()
    specs = [registered_consumers()[name] for name in CONSUMERS]
    letters = dead_letter_topics(specs)
    create_topics(
        letters,
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
        partitions=1,
        replication=1,
        retention=settings.KAFKA_TOPIC_RETENTION,
    )
    for spec in specs:
        skip_to_end(spec.topics, spec.group)
    found = {"kafka": TopicReader(*TOPICS), "dead letters": TopicReader(*letters)}
    yield found
    for reader in found.values():
        reader.close()
    app.control.purge()


@pytest.fixture
def refusals() -> Iterator[None]:
    """Let PostgreSQL refuse what some devices do."""
    with connection.cursor() as cursor:
        for name, rule in REFUSALS.items():
            cursor.execute(f"ALTER TABLE sessions ADD CONSTRAINT {name} CHECK ({rule}) NOT VALID")
    yield
    with connection.cursor() as cursor:
        for name in REFUSALS:
            cursor.execute(f"ALTER TABLE sessions DROP CONSTRAINT IF EXISTS {name}")


def publish(topic: str, value: dict[str, Any]) -> None:
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=15)
    )
    with closing(publisher):
        assert publisher.publish([message(topic, value)]) == [None]


def sign_in(device: Device, user_id: UUID, **changes: object) -> None:
    """Publish identity's event; changes break it."""
    signed_in = {
        "UserId": str(user_id),
        "AnonymousId": str(device.anonymous_id),
        "SignedInAt": iso_utc(statement_time()),
    }
    publish(USER_SIGNED_IN, signed_in | changes)


def park_a_message(device: Device) -> None:
    """Write an event that is too large for Kafka."""
    payload = json.dumps({"AnonymousId": str(device.anonymous_id), "Filling": "x" * 2_000_000})
    OutboxMessage.objects.create(
        message_id=new_id(),
        topic=PROPERTY_OBJECT_VIEW_ENDED,
        key=str(new_id()),
        headers='{"Version": "2"}',
        payload=payload,
    )


def make_silent() -> None:
    """Date back what is Active, as if all devices had fallen silent 13 minutes ago."""
    with connection.cursor() as cursor:
        for table in ("sessions", "property_object_views"):
            cursor.execute(
                f"UPDATE {table} SET created_at = created_at - interval '13 min',"
                " last_activity_at = last_activity_at - interval '13 min' WHERE status = 'Active'"
            )


def tables() -> Channels:
    """The contents of every table of ours, Django's included."""
    channels = {}
    with connection.cursor() as cursor:
        for name in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT row::text FROM {name} AS row")
            channels[f"table {name}"] = "\n".join(text for (text,) in cursor.fetchall())
    return channels


def records(name: str, reader: TopicReader) -> Channels:
    """What topics hold, the payloads apart from all around them."""
    found = reader.read()
    assert found, name
    around = [
        [record.topic, record.key, *(part for header in record.headers for part in header)]
        for record in found
    ]
    return {
        f"payloads of {name}": "\n".join(record.value.decode(errors="replace") for record in found),
        f"keys and headers of {name}": "\n".join(map(str, around)),
    }


def metric(process: Process, name: str) -> float:
    """Sum a metric's samples, whatever their labels."""
    lines = process.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_no_address_user_agent_or_anonymous_id_appears_where_it_does_not_belong(
    tmp_path: Path, readers: dict[str, TopicReader], refusals: None, clickhouse: Client
) -> None:
    postgres_log = os.environ.get("EMBEDDED_POSTGRES_LOG")
    logged_before = Path(postgres_log).stat().st_size if postgres_log else 0
    spans = SpanReceiver()
    identity = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    Device.answers = ""

    def token(user_id: UUID) -> dict[str, str]:
        return bearer(jwt.encode(claims(user_id), identity, algorithm="RS256"))

    with (
        closing(spans),
        service(
            tmp_path,
            PINACTIVITY_DEVELOPMENT="false",
            SECRET_KEY=new_id().hex * 2,
            ALLOWED_HOSTS="127.0.0.1",
            SECURE_SSL_REDIRECT="false",
            JWT_ISSUER=settings.JWT_ISSUER,
            JWT_AUDIENCE=settings.JWT_AUDIENCE,
            JWT_PUBLIC_KEY=pem(identity),
            LOG_LEVEL="DEBUG",
            OTEL_EXPORTER_OTLP_ENDPOINT=spans.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="200",
            ACTIVITY_CLOSER_POLLING_INTERVAL="00:00:01",
            RATE_LIMIT_HEARTBEATS="3",
            DEV_STATS_FLUSH_INTERVAL="00:00:01",
        ) as processes,
    ):
        web, proxied = processes["web"], processes["web behind a proxy"]
        guest = Device(web, address=ADDRESSES[2])
        user = Device(proxied, forwarded=f"10.0.0.1, {ADDRESSES[0]}:4711")
        late = Device(proxied, UNLINKABLE, forwarded="[2001:DB8:77::ABCD]:443")
        stuck = Device(proxied, UNCLOSABLE, forwarded="2001:0db8:0077:0:0:0:0:abcd")
        refused = Device(web, UNSTORABLE, address=ADDRESSES[2])
        devices = (guest, user, late, stuck, refused)

        # What devices do, and what goes wrong with it.
        guest.visit()
        user.visit()
        late_session, _ = late.visit()
        stuck_session, _ = stuck.visit()
        assert refused.send("POST", START)[0] == 503
        assert user.send("POST", LINK, **token(new_id()))[1]["Outcome"] == "Linked"
        assert user.send("POST", LINK, **token(new_id()))[1]["Outcome"] == "Switched"
        assert user.send("POST", LINK, Authorization="Bearer x.y.z")[0] == 401
        assert user.send("POST", HEARTBEAT, b'{"SessionId": ')[0] == 400
        assert user.send("POST", f"/api/{new_id()}")[0] == 404
        beats = [guest.send("POST", HEARTBEAT, {"SessionId": str(new_id())})[0] for _ in range(4)]
        assert beats[-1] == 429

        # A sign-in that PostgreSQL refuses at first; two messages that nobody can read.
        consumer = processes["consumer"]
        sign_in(late, new_id())
        sign_in(guest, new_id(), SignedInAt="yesterday")
        publish(
            PROPERTY_OBJECT_VIEW_ENDED,
            {"AnonymousId": str(user.anonymous_id), "DurationSeconds": -1},
        )
        wait_until(lambda: metric(consumer, "kafka_consumer_retries_total"), what="a retry")
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE sessions DROP CONSTRAINT chk_refuse_linking")
        linked = Session.objects.filter(id=late_session, user_id__isnull=False)
        wait_until(linked.exists, what="the link after the retry")
        wait_until(
            lambda: metric(consumer, "kafka_consumer_dead_lettered_total") >= 3,
            what="the dead letters",
        )

        # Everything falls silent; one session cannot be closed.
        park_a_message(guest)
        make_silent()
        others = Session.objects.active().exclude(id=stuck_session)
        wait_until(lambda: not others.exists(), what="the closings")
        failed = ActivityCloserRun.objects.filter(failures__gt=0, finished_at__isnull=False)
        wait_until(failed.exists, what="the run that has failed at one")
        wait_until(lambda: not OutboxMessage.objects.pending().exists(), what="the deliveries")
        views = PropertyObjectViewStatsSeen.objects
        wait_until(lambda: views.count() == 4, what="the statistics")
        closed = Session.objects.filter(status="Inactive").count()
        wait_until(
            lambda: (
                count_rows(clickhouse) >= closed
                and count_rows(clickhouse, "property_object_view_facts") >= 4
            ),
            what="the facts",
        )
        run = failed.latest("started_at")
        wait_until(lambda: str(run.id) in spans.text, what="the spans")

        channels = {
            f"metrics of {name}": each.get("/metrics")[1] for name, each in processes.items()
        }
        stop(processes)

    channels |= {f"log of {name}": each.log.read_text() for name, each in processes.items()}
    for name, reader in readers.items():
        channels |= records(name, reader)
    channels["spans"] = spans.text
    channels["answers"] = Device.answers
    errors = OutboxMessage.objects.exclude(last_error="").values_list("last_error", flat=True)
    channels["last_error"] = "\n".join(errors)
    channels |= tables()
    channels["facts"] = "\n".join(
        str(row) for table in FACTS_TABLES for row in rows_of(clickhouse, table)
    )
    if postgres_log:
        with Path(postgres_log).open("rb") as log:
            log.seek(logged_before)
            channels["log of postgresql"] = log.read().decode(errors="replace")

    # The search sees all of them: what belongs there is found.
    def logs(*names: str) -> set[str]:
        return {f"log of {name}" for name in names}

    of_postgresql = logs("postgresql") if postgres_log else set()
    assert find("chk_refuse_closing", channels) == of_postgresql | logs("closer")
    assert find("chk_refuse_linking", channels) == of_postgresql | logs("consumer")
    assert find("chk_refuse_starting", channels) == of_postgresql | logs("web")
    assert find(run.id, channels) >= logs("closer") | {"spans", "table activity_closer_runs"}
    assert find(stuck_session, channels) >= logs("closer") | {"table sessions"}
    assert find(late_session, channels) >= {"table sessions", "facts", "payloads of kafka"}
    assert find("MessageSizeTooLargeError", channels) >= logs("relay") | {"last_error"}
    assert find("dlq-reason", channels) == {"keys and headers of dead letters"}
    closed_by = ActivityCloserRun.objects.filter(closed_sessions__gt=0)
    assert any("keys and headers of kafka" in find(each.id, channels) for each in closed_by)
    assert {name for name in channels if name.startswith("metrics")} == find(
        "python_gc_objects_collected_total", channels
    )
    assert logs("beat") <= find("beat", channels)

    # And nothing finds a device but where it belongs.
    for mark in (*ADDRESSES, *(device.user_agent for device in devices), "SecretBrowser"):
        places = find(mark, channels)
        if mark in ADDRESSES:
            places -= {"table rate_limit_windows"}
        assert places == (set() if mark == refused.user_agent else {"table sessions"}), mark
    for device in devices[:4]:
        places = find(device.anonymous_id, channels)
        assert {"payloads of kafka", "table sessions", "table outbox_messages"} <= places
        assert places <= {
            "payloads of kafka",
            "payloads of dead letters",
            "facts",
            "table sessions",
            "table outbox_messages",
            "table rate_limit_windows",
            "answers",
        }
    assert find(refused.anonymous_id, channels) == set()
