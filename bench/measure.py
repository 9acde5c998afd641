"""What benches share: a database of their own, interleaved repeats, medians, the JSON line."""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from django.core.management import call_command
from django.db import connection

_MADE_BY_A_BENCH = "Made by a bench of pinactivity; dropped without asking."


class BenchFailed(SystemExit):
    """The bench cannot run here, or what it measured did not do the work."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The repeats of one way of doing the work."""

    seconds: list[float]
    """One a repeat, in order."""
    work: int
    """Units of work in each repeat."""

    @property
    def per_second(self) -> float:
        """Units of work a second, by the median repeat."""
        return self.work / statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """Units of work a second, by the fastest repeat."""
        return self.work / min(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest repeat, as a part of the median."""
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)


def interleave(
    ways: Mapping[str, Callable[[], object]],
    *,
    work: int,
    repeats: int,
    prepare: Callable[[], None],
    check: Callable[[str], None],
) -> dict[str, Samples]:
    """Measure several ways of doing the same work, in turn: A B A B, never A A B B.

    So whatever else the machine does meets all of them.

    Args:
        ways: By name. One call does all the work once.
        work: Units of work in a call, of any kind; only for the rates.
        repeats: Calls of each way.
        prepare: Makes the same starting point before every call; not measured.
        check: Takes the name after every call and raises when the work is not done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1, repeats + 1):
        for name, run in ways.items():
            prepare()
            gc.collect()
            began = time.perf_counter()
            run()
            taken = time.perf_counter() - began
            check(name)
            seconds[name].append(taken)
            say(f"{repeat}/{repeats} {name}: {taken:.2f} s, {work / taken:,.0f}/s")
    return {name: Samples(taken, work) for name, taken in seconds.items()}


def ratio_range(samples: Samples, limit: Samples) -> list[float]:
    """Return the lowest and the highest ratio among the pairs that ran one after the other."""
    ratios = [against / own for own, against in zip(samples.seconds, limit.seconds, strict=True)]
    return [round(min(ratios), 3), round(max(ratios), 3)]


def say(line: str) -> None:
    """Tell a person how it goes."""
    print(line, file=sys.stderr, flush=True)


def conclude(result: Mapping[str, Any]) -> None:
    """Print the result: the last line of stdout."""
    print(json.dumps(result), flush=True)


@contextmanager
def own_database() -> Iterator[None]:
    """Give the block an empty, migrated database beside the environment's, then drop it.

    The environment's own is never written. A database of that name that no bench has made is
    refused; one that a killed bench has left is dropped.

    Raises:
        BenchFailed: the name is taken.
    """
    given = str(connection.settings_dict["NAME"])
    own = f"{given}_bench"
    _drop(own)
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{own}"')
        cursor.execute(f"COMMENT ON DATABASE \"{own}\" IS '{_MADE_BY_A_BENCH}'")
    try:
        _connect_to(own)
        call_command("migrate", verbosity=0)
        yield
    finally:
        _connect_to(given)
        _drop(own)


@contextmanager
def unbounded_statements() -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs a statement without the connection's statement_timeout."""

    def execute(statement: str, **parameters: Any) -> list[Any]:
        cursor.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
        try:
            yield execute
        finally:
            cursor.execute("RESET statement_timeout")


def database_url() -> str:
    """Return the URL of the database in use, for the environment of a process."""
    url = urlsplit(os.environ["DATABASE_URL"])
    return urlunsplit(url._replace(path=f"/{connection.settings_dict['NAME']}"))


def _drop(name: str) -> None:
    """Drop a database that a bench made; fails while another bench is using it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s",
            [name],
        )
        row = cursor.fetchone()
        if row is None:
            return
        if row[0] != _MADE_BY_A_BENCH:
            raise BenchFailed(f"The database {name} exists, and no bench has made it.")
        cursor.execute(f'DROP DATABASE "{name}"')


def _connect_to(name: str) -> None:
    connection.close()
    connection.settings_dict["NAME"] = name
