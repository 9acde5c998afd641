"""Relays in processes that tests kill: `python -m tests.relaying ..`.

One process loads Django and forks, so that a relay starts in milliseconds.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")
if __name__ == "__main__":
    django.setup()

from django.conf import settings
from django.db import Error, connection

from outbox.relay import OutboxRelay
from outbox.wakeup import WAKE_UP_INTERVAL
from pinactivity.kafka.producer import DeliveryError, KafkaPublisher, Message


class _DyingPublisher(KafkaPublisher):
    """Kills its process when Kafka has acknowledged everything, before the marks are committed."""

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        if all(answer is None for answer in super().publish(messages)):
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("Kafka has not acknowledged everything.")


def _make_relay(publisher: type[KafkaPublisher]) -> OutboxRelay:
    return OutboxRelay(
        publisher=publisher(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            delivery_timeout=settings.OUTBOX.delivery_timeout,
        ),
        options=settings.OUTBOX,
    )


def _die() -> None:
    _make_relay(_DyingPublisher).run()


def _work() -> None:
    relay = _make_relay(KafkaPublisher)
    while True:
        try:
            relay.run(linger=WAKE_UP_INTERVAL)
        except Error:  # PostgreSQL restarts
            connection.close()
        time.sleep(0.1)


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        work()
    finally:
        os._exit(1)


def _kill_after_acknowledgement(times: int) -> None:
    """Run relays one after the other; fail unless each kills itself after the acknowledgement."""
    for _ in range(times):
        _, status = os.waitpid(_fork(_die), 0)
        if not os.WIFSIGNALED(status):
            sys.exit("A relay ended by itself.")


def _keep_running(count: int, lifetime: float) -> None:
    """Run relays until SIGTERM; kill each after a random time, and start another."""
    chosen = random.Random(7)
    kills = 0
    ends: dict[int, float] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for pid in ends:
            os.kill(pid, signal.SIGKILL)
        print(f"{kills} kills", flush=True)  # noqa: T201 - it is a program
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        while len(ends) < count:
            pid = _fork(_work)
            ends[pid] = time.monotonic() + chosen.uniform(0.5, 1.5) * lifetime
        time.sleep(0.05)
        for pid in [pid for pid, end in ends.items() if time.monotonic() > end]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del ends[pid]
            kills += 1


def main() -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.relaying", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("die").add_argument("times", type=int)
    run = actions.add_parser("run")
    run.add_argument("relays", type=int)
    run.add_argument("--lifetime", type=float, default=float("inf"), help="seconds, about")
    arguments: Any = parser.parse_args()
    if arguments.action == "die":
        _kill_after_acknowledgement(arguments.times)
    else:
        _keep_running(arguments.relays, arguments.lifetime)


if __name__ == "__main__":
    main()
