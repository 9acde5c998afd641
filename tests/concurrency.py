"""Races with real threads: each has its own connection, and all start at once."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Self, TypeVar
from uuid import UUID

import psycopg
import pytest
from django.db import connection, connections

T = TypeVar("T")

COMMITTED = pytest.mark.django_db(transaction=True)
"""For tests that need a second connection, or that lose the first."""


def run_together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls in as many threads behind a barrier; return their results in order.

    Raises:
        Exception: the first that a call raised.
    """
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        try:
            barrier.wait(timeout=30)
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, c) for c in calls]]


class Background:
    """A call in a thread of its own: `with Background(call) as run: ...; run.result()`."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._pool = ThreadPoolExecutor(1)

        def run() -> T:
            try:
                return call()
            finally:
                connections.close_all()

        self._future = self._pool.submit(run)

    def result(self, timeout: float = 60) -> object:
        return self._future.result(timeout=timeout)

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)


@contextmanager
def beside() -> Iterator["psycopg.Connection[Any]"]:
    """Open another connection to the same database."""
    settings = connection.settings_dict
    with closing(
        psycopg.connect(
            host=settings["HOST"],
            port=settings["PORT"],
            user=settings["USER"],
            password=settings["PASSWORD"],
            dbname=settings["NAME"],
        )
    ) as other:
        yield other


@contextmanager
def locked(statement: str, *parameters: UUID) -> Iterator[None]:
    """Hold what a statement locks in a transaction of another connection."""
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute(statement, parameters)
        yield
    finally:
        holder.close()
