"""Writing a batch's rows by the handler, and finding the rows that are at fault."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import structlog
from django.db import DataError, close_old_connections

from pinactivity.kafka.entry import Entry, State
from pinactivity.kafka.record import Poison
from pinactivity.kafka.spec import ConsumerSpec, Handler, SlowDown
from pinactivity.telemetry import metrics, tracing

log = structlog.get_logger(__name__)

_WORK_SECONDS = 30.0
"""Of work between two polls: well below every sensible max_poll_interval."""


class Unfinished(SlowDown):
    """It is time to poll: the rest of the batch follows at once."""


class EntryWriter:
    """Writes rows by a handler, and remembers in each entry what is done.

    Args:
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        handler: Handler[Any],
        *,
        clock: Callable[[], float],
        fed_metrics: Sequence[metrics.ConsumerMetrics],
    ) -> None:
        self._spec = spec
        self._handler = handler
        self._clock = clock
        self._metrics = fed_metrics

    def write(self, entries: Sequence[Entry[Any]], while_waiting: Callable[[], None]) -> None:
        """Write what is decoded and not written; halve what is refused until one row is left.

        Raises:
            Unfinished: after half a minute. A second call does the rest, as after any exception
                of the handler.
        """
        decoded = [entry for entry in entries if entry.state is State.DECODED]
        if not decoded:
            return
        began = self._clock()
        written = 0
        units = [[entry] for entry in decoded] if self._spec.one_by_one else [decoded]
        units.reverse()
        try:
            while units:
                if self._clock() - began > _WORK_SECONDS:
                    raise Unfinished
                unit = units.pop()
                reason = self._write_unit(unit, while_waiting)
                if reason is None:
                    written += len(unit)
                elif len(unit) == 1:
                    unit[0].mark_as_poison(reason)
                else:
                    half = len(unit) // 2
                    units += [unit[half:], unit[:half]]
        finally:
            self._report(written, seconds=self._clock() - began)

    def _write_unit(self, unit: list[Entry[Any]], while_waiting: Callable[[], None]) -> str | None:
        """Write rows at once; return the reason when one of them is at fault."""
        close_old_connections()
        try:
            with self._correlated(unit):
                self._handler.flush(unit, while_waiting)
        except Poison as exc:
            return exc.reason
        except DataError:
            return "row-refused"
        for entry in unit:
            entry.state = State.WRITTEN
        return None

    @contextmanager
    def _correlated(self, unit: list[Entry[Any]]) -> Iterator[None]:
        """Join the messages' traces; with `one_by_one`, also the message's correlation id."""
        contexts = [entry.context for entry in unit if entry.context is not None]
        attributes: dict[str, str | int] = {
            "messaging.consumer.group.name": self._spec.group,
            "rows": len(unit),
        }
        with (
            tracing.gathering_span("insert", contexts, attributes),
            tracing.correlate(unit[0].record.correlation_id)
            if self._spec.one_by_one
            else nullcontext(),
        ):
            yield

    def _report(self, written: int, *, seconds: float) -> None:
        metrics.CONSUMER_FLUSH_SECONDS.labels(self._spec.group).observe(seconds)
        if not written:
            return
        for each in self._metrics:
            each.batch_size.labels(self._spec.group).observe(written)
        log.info("flushed", group=self._spec.group, rows=written, insertMs=round(seconds * 1000))
