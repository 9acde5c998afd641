"""The consumers' loop (design, section 10): the same tests on the in-memory and the real broker."""

import http.client
import json
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from structlog.testing import capture_logs

from embedded.stack import find_free_port, private_server
from pinactivity.kafka.dead_letters import DeadLetterOffice
from pinactivity.kafka.history import opened_reader, partitions_of
from pinactivity.kafka.loop import PoisonLimitReached
from pinactivity.kafka.producer import KafkaPublisher
from pinactivity.kafka.source import CommitRefused, Source
from pinactivity.kafka.topics import find_ends
from pinactivity.management.commands.consume import Replay, follow
from tests.consuming import (
    Bench,
    Broker,
    Clock,
    MemoryBroker,
    NumberHandler,
    RealBroker,
    RefusingPublisher,
    count_numbers,
    drive,
    handled_offsets,
)
from tests.processes import running, wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture(params=["memory", "memory-reading-ahead", "real-reading-ahead"])
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker, and whether handlers let the loop read the next batch while they write one."""
    monkeypatch.setattr(NumberHandler, "all_let_read_ahead", "ahead" in request.param)
    broker: Broker = MemoryBroker() if "memory" in request.param else RealBroker()
    yield broker
    broker.close()


@pytest.fixture
def bench(broker: Broker) -> Iterator[Bench]:
    bench = Bench(broker)
    yield bench
    bench.close()


@pytest.fixture
def handler() -> NumberHandler:
    return NumberHandler()


def test_messages_are_written_and_then_committed(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(20))

    drive(bench.consumer(handler), lambda: len(handler.numbers) == 20 and bench.committed == 20)

    assert sorted(handler.numbers) == list(range(20))
    assert bench.dead_letters == []


def test_order_within_a_key_is_kept(bench: Bench, handler: NumberHandler) -> None:
    for number in range(30):
        bench.send_bytes(json.dumps({"Number": number}).encode(), key=b"one key")

    drive(bench.consumer(handler, rows=7), lambda: len(handler.numbers) == 30)

    assert handler.numbers == list(range(30))


def test_full_batch_is_flushed_at_once(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(25))
    clock = Clock()
    consumer = bench.consumer(handler, rows=10, age=5, clock=clock)

    drive(consumer, lambda: len(handler.numbers) == 20)

    assert [len(batch) for batch in handler.batches] == [10, 10]
    assert bench.committed == 20


def test_batch_that_is_not_full_waits_for_its_age(bench: Bench, handler: NumberHandler) -> None:
    bench.send(1, 2, 3)
    clock = Clock()
    consumer = bench.consumer(handler, rows=10, age=5, clock=clock)
    polled = 0
    while polled < 3:
        polled += consumer.run_once().polled
    clock.now += 4.9
    consumer.run_once()
    assert handler.batches == []
    assert bench.committed == 0

    clock.now += 0.1
    consumer.run_once()

    assert [sorted(batch) for batch in handler.batches] == [[1, 2, 3]]
    assert bench.committed == 3


def test_poison_goes_to_the_dead_letters_and_the_partition_goes_on_c53(
    bench: Bench, handler: NumberHandler
) -> None:
    bench.send_bytes(b'{"Number": 1}', key=b"k")
    bench.send_bytes(b"\xff\xfe", key=b"k", headers={"Extra": b"\x00\xff", "MessageId": None})
    bench.send_bytes(b"\xff\xfe", key=b"k", headers={"Extra": b"\x00\xff"})
    bench.send_bytes(b'{"Number": 2}', key=b"k")

    with capture_logs() as logs:
        drive(bench.consumer(handler), lambda: bench.committed == 4)

    assert handler.numbers == [1, 2]
    first, second = bench.dead_letters
    original = [record for record in bench.broker.read(bench.topic) if record.value == b"\xff\xfe"]
    for letter, source, reason in zip(
        (first, second), original, (b"message-id-missing", b"value-not-json"), strict=True
    ):
        assert (letter.key, letter.value) == (b"k", b"\xff\xfe")
        headers = dict(letter.headers)
        at = headers.pop("dlq-at")
        assert at is not None
        assert datetime.now(UTC) - datetime.fromisoformat(at.decode()) < timedelta(minutes=5)
        assert headers == {
            **dict(source.headers),
            "dlq-reason": reason,
            "dlq-topic": bench.topic.encode(),
            "dlq-partition": str(source.partition).encode(),
            "dlq-offset": str(source.offset).encode(),
        }
    skipped = [line for line in logs if line["event"] == "skipped-poison"]
    assert [(line["reason"], line["log_level"]) for line in skipped] == [
        ("message-id-missing", "error"),
        ("value-not-json", "error"),
    ]
    assert skipped[1]["SourceEventId"] == dict(original[1].headers)["MessageId"].decode()  # type: ignore[union-attr]  # it is there


def test_refused_dead_letter_holds_the_offset_c54(bench: Bench, handler: NumberHandler) -> None:
    publisher = RefusingPublisher(bench.broker.publisher())
    bench.send_bytes(b'{"Number": 1}', b"no json", b'{"Number": 2}', key=b"k")
    consumer = bench.consumer(handler, publisher=publisher)

    drive(consumer, lambda: publisher.asked >= 3)
    assert bench.committed == 0
    assert consumer.waits_for == "DeadLettersRefused"
    publisher.refuses = False
    drive(consumer, lambda: bench.committed == 3)

    assert handler.numbers == [1, 2], "the rows were written once, whatever became of the letter"
    assert [letter.value for letter in bench.dead_letters] == [b"no json"]
    assert consumer.waits_for is None


def test_too_many_poison_messages_in_a_row_stop_the_consumer(
    bench: Bench, handler: NumberHandler
) -> None:
    good, bad = b'{"Number": 1}', b"no json"
    bench.send_bytes(good, bad, bad, bad, good, bad, bad, bad, bad, good, key=b"k")
    consumer = bench.consumer(handler, poison_limit=3)

    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)

    assert len(bench.dead_letters) == 6
    assert bench.committed == 8, "the fourth in a row is the first message not handled"


def test_poison_limit_counts_across_batches_and_zero_is_none(
    bench: Bench, handler: NumberHandler
) -> None:
    bench.send_bytes(*[b"no json"] * 12, key=b"k")
    consumer = bench.consumer(handler, rows=2, poison_limit=5)
    with pytest.raises(PoisonLimitReached):
        drive(consumer, lambda: False)
    assert len(bench.dead_letters) == bench.committed == 5
    consumer.close()

    drive(bench.consumer(handler, rows=2, poison_limit=0), lambda: bench.committed == 12)


def test_tombstones_are_skipped(bench: Bench, handler: NumberHandler) -> None:
    bench.broker.send_tombstone(bench.topic, b"k")
    bench.send_bytes(b'{"Number": 1}', key=b"k")
    bench.broker.send_tombstone(bench.topic, b"k")

    drive(bench.consumer(handler), lambda: bench.committed == 3)

    assert handler.numbers == [1]
    assert bench.dead_letters == []


def test_dead_sink_loses_neither_membership_nor_messages_c51(
    bench: Bench, handler: NumberHandler
) -> None:
    """The outage lasts several times the longest poll interval."""
    interval = timedelta(seconds=2)
    consumer = bench.consumer(handler, rows=10, max_poll_interval=interval)
    bench.send(*range(5))
    drive(consumer, lambda: bench.committed == 5)
    handler.down = True
    bench.send(*range(5, 40))

    with capture_logs() as logs:
        outage_ends = time.monotonic() + 4 * interval.total_seconds()
        drive(consumer, lambda: time.monotonic() > outage_ends)
        assert bench.committed == 5
        assert consumer.waits_for == "SinkUnavailable"
        handler.down = False
        drive(consumer, lambda: bench.committed == 40)

    assert sorted(handler.numbers) == list(range(40)), "no loss, and nothing twice"
    events = [line["event"] for line in logs]
    assert "partitions gone" not in events
    assert events.count("failed") > 10
    waits = [line["retryInSeconds"] for line in logs if line["event"] == "failed"]
    assert waits[:4] == [0.05, 0.1, 0.2, 0.2]


def test_what_was_written_but_not_committed_comes_again(
    bench: Bench, handler: NumberHandler
) -> None:
    """The end of a process between the writing and the commit, without the process."""

    class Killed(BaseException):
        pass

    def open_source() -> Source:
        source = bench.broker.join(bench.topic, bench.group, timedelta(minutes=5))

        def die(offsets: Any) -> None:
            source.close()  # the broker would notice after 45 s
            raise Killed

        source.commit = die  # type: ignore[method-assign]  # this is the place to die at
        return source

    bench.send(*range(10))
    with pytest.raises(Killed):
        drive(bench.consumer(handler, open_source=open_source), lambda: False)
    assert handler.numbers
    assert bench.committed == 0

    survivor = NumberHandler()
    drive(bench.consumer(survivor), lambda: bench.committed == 10)

    assert sorted(survivor.numbers) == list(range(10))


def test_refused_commit_is_tried_again_without_writing_again(
    bench: Bench, handler: NumberHandler
) -> None:
    refusals = 2
    opened: list[Source] = []

    def open_source() -> Source:
        source = bench.broker.join(bench.topic, bench.group, timedelta(minutes=5))
        commit = source.commit

        def refuse(offsets: Any) -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise CommitRefused
            commit(offsets)

        source.commit = refuse  # type: ignore[method-assign]  # the broker's fault
        opened.append(source)
        return source

    bench.send(*range(5))

    drive(bench.consumer(handler, open_source=open_source), lambda: bench.committed == 5)

    assert refusals == 0
    assert sorted(handler.numbers) == list(range(5))


def test_members_that_come_and_go_lose_nothing_c52(bench: Bench) -> None:
    """Each handler notes what it wrote; the offsets are checked against that all the time."""
    handlers: list[NumberHandler] = []
    stop_all, produced = threading.Event(), 0

    def consume(stop: threading.Event) -> None:
        handler = NumberHandler()
        handlers.append(handler)
        bench.consumer(handler, rows=20, age=0.2).run(lambda: stop.is_set() or stop_all.is_set())

    def check() -> None:
        offsets = bench.broker.committed(bench.topic, bench.group)
        handled = handled_offsets(handlers)
        for partition, offset in offsets.items():
            assert set(range(offset)) <= handled.get(partition, set())

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(consume, threading.Event())]
        try:
            for _ in range(4):
                visitor = threading.Event()
                threads.append(pool.submit(consume, visitor))
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    bench.send(*range(produced, produced + 50))
                    produced += 50
                    time.sleep(0.1)
                visitor.set()
                threads.pop().result(timeout=60)
                check()
            deadline = time.monotonic() + 60
            while bench.committed < produced and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            stop_all.set()
        for thread in threads:
            thread.result(timeout=60)

    check()
    assert bench.committed == produced
    counts = count_numbers(handlers)
    assert set(counts) == set(range(produced))


def test_stop_flushes_and_commits_what_was_read(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(10))
    consumer = bench.consumer(handler, age=60)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(consumer.run, stop.is_set)
        deadline = time.monotonic() + 60
        while consumer.unstored < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert handler.numbers == []
        stop.set()
        running.result(timeout=30)

    assert sorted(handler.numbers) == list(range(10))
    assert bench.committed == 10
    assert handler.is_closed


def test_one_by_one_gives_each_message_its_own_flush(bench: Bench, handler: NumberHandler) -> None:
    bench.send(*range(8))

    drive(bench.consumer(handler, one_by_one=True), lambda: bench.committed == 8)

    assert [len(batch) for batch in handler.batches] == [1] * 8


def test_refused_row_among_many_is_found_by_halving_c50(
    bench: Bench, handler: NumberHandler
) -> None:
    handler.refused = {37}
    bench.send(*range(100))

    drive(bench.consumer(handler, rows=100, age=1), lambda: bench.committed == 100)

    assert sorted(handler.numbers) == [number for number in range(100) if number != 37]
    (letter,) = bench.dead_letters
    assert json.loads(letter.value or b"") == {"Number": 37}
    assert dict(letter.headers)["dlq-reason"] == b"number-refused"


def test_second_consumer_of_another_group_gets_everything_too(
    broker: Broker, bench: Bench, handler: NumberHandler
) -> None:
    bench.send(1, 2, 3)
    drive(bench.consumer(handler), lambda: bench.committed == 3)
    other = Bench(broker)
    other.topic = bench.topic
    others = NumberHandler()

    drive(other.consumer(others), lambda: len(others.numbers) == 3)
    other.close()

    assert sorted(others.numbers) == sorted(handler.numbers) == [1, 2, 3]


def test_dead_letters_wait_while_their_broker_is_away_c54(
    bench: Bench, handler: NumberHandler
) -> None:
    absent = KafkaPublisher(
        bootstrap_servers=["127.0.0.1:1"], delivery_timeout=timedelta(seconds=1)
    )
    bench.send_bytes(b"no json", b'{"Number": 1}', key=b"k")
    consumer = bench.consumer(handler, publisher=absent)

    drive(consumer, lambda: consumer.waits_for)

    assert consumer.waits_for == "DeadLettersRefused"
    assert handler.numbers == [1]
    assert bench.committed == 0


def test_frozen_broker_is_waited_out(handler: NumberHandler) -> None:
    """A broker of one's own, so that nobody else waits with us."""
    with private_server("kafka") as server:
        broker = RealBroker([server.address])
        bench = Bench(broker)
        bench.send(*range(10))
        consumer = bench.consumer(handler)
        drive(consumer, lambda: bench.committed == 10)
        bench.send(*range(10, 20))
        server.freeze()
        thawing = threading.Timer(8, server.thaw)
        thawing.start()
        try:
            consumer.run(lambda: len(set(handler.numbers)) == 20)
        finally:
            thawing.join()
        assert bench.committed == 20
        broker.close()


# -- as processes, on the real broker ------------------------------------------------------


@dataclass
class Echo:
    """The consumer of `tests.echo` in processes of its own."""

    bench: Bench
    folder: Path
    age: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def numbers(self) -> list[int]:
        file = self.folder / "numbers"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def run(self, *arguments: str, **variables: str) -> Any:
        return running(
            [sys.executable, "manage.py", "consume", "echo", *arguments],
            self.log,
            DJANGO_SETTINGS_MODULE="tests.echo.settings",
            ECHO_TOPIC=self.bench.topic,
            ECHO_GROUP=self.bench.group,
            ECHO_FILE=str(self.folder / "numbers"),
            ECHO_AGE=str(self.age),
            **variables,
        )

    def wait_for(self, condition: Callable[[], object]) -> None:
        try:
            wait_until(condition, seconds=90, what="what the process should do")
        except AssertionError:
            raise AssertionError(self.log.read_text()[-3000:]) from None


@pytest.fixture
def echo(transactional_db: None, tmp_path: Path) -> Iterator[Echo]:
    broker = RealBroker()
    bench = Bench(broker)
    yield Echo(bench, tmp_path)
    bench.close()
    broker.close()


def test_sigterm_flushes_commits_and_exits_with_zero(echo: Echo) -> None:
    """The batch would wait for an hour."""
    echo.age = 299
    echo.bench.send(*range(10))
    port = find_free_port()
    with echo.run(METRICS_PORT=str(port)) as process:
        group = f'group="{echo.bench.group}"'
        consumed = f"kafka_consumer_consumed_total{{{group}}} 10.0"
        echo.wait_for(lambda: consumed in fetch(port, "/metrics")[1])
        status, body = fetch(port, "/healthz")
        assert (status, json.loads(body)["Status"]) == (200, "live")
        oldest = f"kafka_consumer_oldest_unstored_seconds{{{group}}}"
        (line,) = [line for line in fetch(port, "/metrics")[1].splitlines() if oldest in line]
        assert float(line.split()[-1]) > 0
        assert echo.numbers == []
        process.terminate()
        assert process.wait(timeout=10) == 0, echo.log.read_text()

    assert sorted(echo.numbers) == list(range(10))
    assert echo.bench.committed == 10


def test_sigterm_ends_a_process_whose_sink_never_answers(echo: Echo) -> None:
    hangs = echo.folder / "hangs"
    echo.bench.send(1)
    with echo.run(ECHO_HANG=str(hangs)) as process:
        echo.wait_for(hangs.exists)
        process.terminate()
        assert process.wait(timeout=12) == 0
    assert "stopped without flushing" in echo.log.read_text()
    assert echo.bench.committed == 0


def test_several_consumers_in_a_process_all_stop_when_one_does(echo: Echo) -> None:
    """The signed-in consumer has nothing to read, and would go on for ever."""
    echo.bench.send_bytes(*[b"no json"] * 2, key=b"k")
    with echo.run("signed-in", CONSUMER_POISON_LIMIT="1") as process:
        assert process.wait(timeout=90) == 1
    assert "echo: more than 1 poison messages" in echo.log.read_text()


def test_kill_between_writing_and_commit_delivers_again(echo: Echo) -> None:
    echo.bench.send(*range(10))
    with echo.run(ECHO_DIE="yes") as process:
        assert process.wait(timeout=90) == -signal.SIGKILL
    written = echo.numbers
    assert written
    assert echo.bench.committed == 0

    with echo.run():
        echo.wait_for(lambda: echo.bench.committed == 10)

    counts = Counter(echo.numbers)
    assert set(counts) == set(range(10))
    assert all(counts[number] == 2 for number in written)


def test_poison_limit_stops_the_process_with_an_error(echo: Echo) -> None:
    echo.bench.send_bytes(*[b"no json"] * 5, key=b"k")
    with echo.run(CONSUMER_POISON_LIMIT="3") as process:
        assert process.wait(timeout=90) == 1
    assert "more than 3 poison messages in a row" in echo.log.read_text()
    assert len(echo.bench.dead_letters) == echo.bench.committed == 3


def test_replay_from_the_beginning_reads_everything_again(echo: Echo) -> None:
    echo.bench.send(*range(10))
    with echo.run() as process:
        echo.wait_for(lambda: echo.bench.committed == 10)
        process.terminate()
        assert process.wait(timeout=10) == 0

    with echo.run("--from-beginning"):
        echo.wait_for(lambda: len(echo.numbers) == 20)

    assert set(Counter(echo.numbers).values()) == {2}


def test_replay_shows_how_far_it_is_and_ends_with_what_there_was(
    capsys: pytest.CaptureFixture[str], handler: NumberHandler
) -> None:
    broker = RealBroker()
    bench = Bench(broker)
    bench.send(*range(10))
    with opened_reader(settings.KAFKA_BOOTSTRAP_SERVERS) as reader:
        ends = find_ends(reader, partitions_of(reader, bench.topic))
    parts = {(part.topic, part.partition): end for part, end in ends.items()}
    replay = Replay(bench.group, dict.fromkeys(parts, 0), parts)
    bench.send(10, 11)  # what comes meanwhile is no part of it
    with ThreadPoolExecutor() as pool:
        done = pool.submit(follow, replay, threading.Event(), shown=True)
        drive(bench.consumer(handler), lambda: bench.committed == 12)
        assert done.result(timeout=30) == 10
    assert f"{bench.group}: 100%" in capsys.readouterr().err
    assert follow(replay, threading.Event(), shown=False) == 0  # nobody is asked for nobody's sake
    bench.close()
    broker.close()


def test_replay_from_a_time_reads_what_came_since(echo: Echo) -> None:
    echo.bench.send(*range(10))
    time.sleep(1.5)  # the broker's clock, to the millisecond, lies between
    since = datetime.now(UTC) - timedelta(seconds=0.5)
    echo.bench.send(100, 101)
    with echo.run("--from-timestamp", since.isoformat()):
        echo.wait_for(lambda: len(echo.numbers) >= 2)
        echo.wait_for(lambda: echo.bench.committed >= 12)

    assert sorted(echo.numbers) == [100, 101]


def test_replay_from_a_time_to_come_reads_nothing_of_the_past(echo: Echo) -> None:
    echo.bench.send(*range(10))
    since = datetime.now(UTC) + timedelta(hours=1)
    with echo.run("--from-timestamp", since.isoformat()):
        echo.wait_for(lambda: echo.bench.committed == 10)
        echo.bench.send(100)
        echo.wait_for(lambda: echo.bench.committed == 11)

    assert echo.numbers == [100]


def test_replay_is_refused_while_the_group_has_live_members(echo: Echo) -> None:
    echo.bench.send(*range(10))
    with echo.run():
        echo.wait_for(lambda: echo.bench.committed == 10)
        with echo.run("--from-beginning") as second:
            assert second.wait(timeout=60) == 1
        assert "has live members" in echo.log.read_text()

    assert Counter(echo.numbers) == Counter(range(10))


def test_port_in_use_is_told(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with echo.run(METRICS_PORT=str(port)) as process:
            assert process.wait(timeout=60) == 1
    assert f"Port {port} is not free" in echo.log.read_text()


def test_unknown_name_is_told_with_the_names_that_there_are() -> None:
    with pytest.raises(CommandError, match=r"no consumer nonsense.*signed-in"):
        call_command("consume", "signed-in", "nonsense")


def fetch(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        connection.close()


# -- dead letters as an operator sees them, on the real broker -----------------------------


@pytest.fixture
def letters(echo: Echo) -> Bench:
    """A bench with four letters: two of each reason."""
    bench = echo.bench
    bench.send_bytes(b"no json", b"{}", b"no json", b"{}", key=b"k")
    drive(bench.consumer(NumberHandler()), lambda: bench.committed == 4)
    bench.close()
    return bench


def run_command(*arguments: str) -> str:
    output = StringIO()
    call_command("dead_letters", *arguments, stdout=output)
    return output.getvalue()


def test_dead_letters_are_counted_by_reason(letters: Bench) -> None:
    office = DeadLetterOffice(bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS)
    assert office.count([letters.dead_letter_topic]) == {
        letters.dead_letter_topic: {"value-not-json": 2, "number-missing": 2}
    }


def test_dead_letters_list_knows_the_registered_topics(kafka_topics: None) -> None:
    call_command("create_topics", stdout=StringIO())
    topic = "pin.identity.user-signed-in.user-activity-identity-signed-in.dlq"
    wait_until(lambda: topic in run_command("list"), what="the news of a topic just created")


def test_dead_letter_is_shown_whole(letters: Bench) -> None:
    letter = letters.dead_letters[1]
    shown = json.loads(
        run_command("show", letters.dead_letter_topic, str(letter.partition), str(letter.offset))
    )
    assert (shown["key"], shown["value"]) == ("k", {})
    assert shown["headers"]["dlq-reason"] == "number-missing"
    with pytest.raises(CommandError, match="no letter"):
        run_command("show", letters.dead_letter_topic, str(letter.partition), "99")


def test_redrive_sends_the_original_once_whatever_the_order_of_redrives(letters: Bench) -> None:
    topic = letters.dead_letter_topic
    original = letters.broker.read(letters.topic)

    assert run_command("redrive", topic, "--limit", "1") == "1 published again, 3 remain\n"
    assert (
        run_command("redrive", topic, "--reason", "number-missing")
        == "2 published again, 0 remain\n"
    )
    assert run_command("redrive", topic) == "1 published again, 0 remain\n"
    assert run_command("redrive", topic) == "0 published again, 0 remain\n"

    again = letters.broker.read(letters.topic)[4:]
    assert [(each.key, each.value, each.headers) for each in again] == [
        (original[place].key, original[place].value, original[place].headers)
        for place in (0, 1, 3, 2)
    ]


def test_redrive_of_a_topic_that_is_not_there_is_told() -> None:
    with pytest.raises(CommandError, match="There is no topic"):
        run_command("redrive", "pin.test.nothing.group.dlq")
