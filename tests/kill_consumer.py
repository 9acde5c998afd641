"""Kills a consumer many times: `python -m tests.kill_consumer --help`.

A killed member keeps its partitions until the broker misses it, which takes seconds. So the
members here are forked off a process that has loaded everything, and have their partitions
assigned instead of joining the group: a kill takes a fraction of a second, and handler, loop,
offsets and database are those of production.
"""

import os
import random
import signal
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import django
from django.conf import settings
from kafka import TopicPartition

from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.loop import Consumer
from pinactivity.kafka.producer import DeliveryError, Message
from pinactivity.kafka.record import Partition
from pinactivity.kafka.source import KafkaSource
from pinactivity.kafka.spec import registered_consumers

ANY_MOMENT, BETWEEN_COMMITS = "any-moment", "between-commits"


class AssignedSource(KafkaSource):
    """Has every partition of a topic, from the group's offsets on; once at the end, from the start.

    Args:
        dies: Kill this process where it should commit offsets: what was read is written by then.
    """

    def __init__(self, topic: str, group: str, *, dies: bool) -> None:
        super().__init__(
            bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS,
            topics=(topic,),
            group=group,
            max_poll_interval=timedelta(minutes=5),
            session_timeout=timedelta(seconds=45),
        )
        self._dies = dies
        self._consumer.unsubscribe()
        numbers = self._consumer.partitions_for_topic(topic) or set()
        self.partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
        self._consumer.assign(self.partitions)

    def start_again_at_the_end(self) -> None:
        """Go back to the start of the topic if there is nothing left to read."""
        if self.is_at_end():
            self._consumer.seek_to_beginning(*self.partitions)

    def is_at_end(self) -> bool:
        committed = {part: self._consumer.committed(part) or 0 for part in self.partitions}
        ends = self._consumer.end_offsets(self.partitions)
        return all(committed[part] >= ends[part] for part in self.partitions)

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit(offsets)


class NoDeadLetters:
    """A publisher that is never asked: the messages are sound."""

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        raise AssertionError("there is a dead-letter record")

    def close(self) -> None:
        pass


def make_consumer(
    source: AssignedSource, name: str, topic: str, group: str, *, rows: int
) -> Consumer:
    spec = replace(
        registered_consumers()[name],
        topics=(topic,),
        group=group,
        limits=lambda: BatchLimits(rows=rows, age=timedelta(0)),
    )
    return Consumer(
        spec, open_source=lambda: source, publisher=NoDeadLetters(), options=settings.CONSUMER
    )


def consume_until_killed(name: str, topic: str, group: str, *, ready: int, dies: bool) -> NoReturn:
    source = AssignedSource(topic, group, dies=dies)
    source.start_again_at_the_end()
    consumer = make_consumer(source, name, topic, group, rows=random.randint(1, 50))
    os.write(ready, b".")
    consumer.run(lambda: False)
    raise AssertionError("it ended by itself")


def kill_one(name: str, topic: str, group: str, *, between_commits: bool, longest: float) -> None:
    """Fork a member and see it killed: by itself before it commits, or by us at any moment."""
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            consume_until_killed(name, topic, group, ready=started, dies=between_commits)
        finally:
            os._exit(1)
    os.close(started)
    with open(ready, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
        assert pipe.read(1), "the member did not start"
    if not between_commits:
        time.sleep(random.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the member ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def main() -> None:
    parser = ArgumentParser(description="Kill a consumer many times, then let one finish.")
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("moment", choices=[ANY_MOMENT, BETWEEN_COMMITS])
    parser.add_argument("--consumer", default="view-stats", metavar="NAME")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--longest", type=float, default=0.2, help="Seconds to a kill.")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")
    django.setup()
    registered_consumers()
    began = time.monotonic()
    for _ in range(arguments.kills):
        kill_one(
            arguments.consumer,
            arguments.topic,
            arguments.group,
            between_commits=arguments.moment == BETWEEN_COMMITS,
            longest=arguments.longest,
        )
    print(f"{arguments.kills} kills in {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201 - its output

    source = AssignedSource(arguments.topic, arguments.group, dies=False)
    consumer = make_consumer(
        source, arguments.consumer, arguments.topic, arguments.group, rows=1000
    )
    while not source.is_at_end():
        consumer.run_once()
    consumer.close()


if __name__ == "__main__":
    main()
