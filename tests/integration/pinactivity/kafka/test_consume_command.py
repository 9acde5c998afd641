"""`manage.py consume` as a process, on the real broker."""

import http.client
import json
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError

from embedded.stack import find_free_port
from pinactivity.kafka.history import opened_reader, partitions_of
from pinactivity.kafka.runner import GroupReplay, follow_replay
from pinactivity.kafka.topic_admin import find_ends
from tests.consuming import (
    Bench,
    NumberHandler,
    RealBroker,
    drive,
)
from tests.echo.process import Echo

pytestmark = pytest.mark.kafka


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
    replay = GroupReplay(bench.group, dict.fromkeys(parts, 0), parts)
    bench.send(10, 11)  # what comes later is no part of it
    with ThreadPoolExecutor() as pool:
        done = pool.submit(follow_replay, replay, threading.Event(), shown=True)
        drive(bench.consumer(handler), lambda: bench.committed == 12)
        assert done.result(timeout=30) == 10
    assert f"{bench.group}: 100%" in capsys.readouterr().err
    assert (
        follow_replay(replay, threading.Event(), shown=False) == 0
    )  # where nothing is shown, Kafka is not asked
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


def test_port_in_use_is_reported(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with echo.run(METRICS_PORT=str(port)) as process:
            assert process.wait(timeout=60) == 1
    assert f"Port {port} is not free" in echo.log.read_text()


def test_unknown_name_is_reported_with_the_known_names() -> None:
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
