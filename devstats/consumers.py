"""What ended, and whose objects are, from Kafka into ClickHouse (design, section 11)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from django.conf import settings

from devstats.clickhouse import RowRefused, StorageUnavailable
from devstats.facts import FUTURE_TOLERANCE, SessionFact, ViewFact, decode_session, decode_view
from devstats.ownership import PropertyObject, decode_property_object, with_owner
from devstats.property_objects import find_versions, store_objects
from devstats.tables import SESSION_FACTS, VIEW_FACTS
from devstats.writer import FactWriter, Row
from pinactivity.kafka.buffer import BatchLimits
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.spec import ConsumerSpec, SinkUnavailable, register
from pinactivity.kafka.topics import (
    PROPERTY_OBJECT_CHANGED,
    PROPERTY_OBJECT_VIEW_ENDED,
    SESSION_ENDED,
)
from pinactivity.telemetry.metrics import (
    DEV_STATS,
    DEV_STATS_INGEST_LAG,
    DEV_STATS_SESSION_FACTS_INGESTED,
    DEV_STATS_VIEW_FACTS_INGESTED,
)

Made = TypeVar("Made", bound=Row)

_SESSION_ENDED_GROUP = "dev-stats-session-ended"
_VIEW_ENDED_GROUP = "dev-stats-property-object-view-ended"
_PROPERTY_OBJECTS_GROUP = "dev-stats-property-objects"


class SessionFactsHandler:
    """DevStatsSessionEndedConsumer: a row of `session_facts` for each ended session."""

    def __init__(self) -> None:
        self._writer = FactWriter()

    def decode(self, record: Record) -> SessionFact:
        """See `decode_session`."""
        return decode_session(record)

    def flush(
        self, entries: Sequence[Entry[SessionFact]], while_waiting: Callable[[], None]
    ) -> None:
        """Add the rows.

        Raises:
            Poison: a CreatedAt or LastActivityAt lies more than an hour ahead; ClickHouse refuses
                a row.
            SinkUnavailable: ClickHouse is away.
        """
        with _sink():
            _refuse_future_events(self._writer, entries, "created-at-in-the-future")
            rows = _distinct(entries)
            self._writer.append(SESSION_FACTS, rows, while_waiting=while_waiting)
        DEV_STATS_SESSION_FACTS_INGESTED.inc(len(rows))
        _observe_lag(_SESSION_ENDED_GROUP, entries)

    def close(self) -> None:
        """Give up the connection."""
        self._writer.close()


class ViewFactsHandler:
    """A row of `property_object_view_facts`, with its object's owner, for each ended view."""

    def __init__(self) -> None:
        self._writer = FactWriter()

    def decode(self, record: Record) -> ViewFact:
        """See `decode_view`."""
        return decode_view(record)

    def flush(self, entries: Sequence[Entry[ViewFact]], while_waiting: Callable[[], None]) -> None:
        """Find the owners, once for all, and add the rows.

        Raises:
            Poison: a ViewedAt lies more than an hour ahead; ClickHouse refuses a row.
            SinkUnavailable: ClickHouse is away.
        """
        with _sink():
            _refuse_future_events(self._writer, entries, "viewed-at-in-the-future")
            rows = _distinct(entries)
            versions = find_versions(
                self._writer.client, [view.property_object_id for view in rows.values()]
            )
            owned = {
                origin: with_owner(view, versions.get(view.property_object_id, ()))
                for origin, view in rows.items()
            }
            self._writer.append(VIEW_FACTS, owned, while_waiting=while_waiting)
        DEV_STATS_VIEW_FACTS_INGESTED.inc(len(rows))
        _observe_lag(_VIEW_ENDED_GROUP, entries)

    def close(self) -> None:
        """Give up the connection."""
        self._writer.close()


class PropertyObjectsHandler:
    """A row of `property_objects` for each change of an object's owner, unless it is known."""

    def __init__(self) -> None:
        self._writer = FactWriter()

    def decode(self, record: Record) -> PropertyObject:
        """See `decode_property_object`."""
        return decode_property_object(record)

    def flush(
        self, entries: Sequence[Entry[PropertyObject]], while_waiting: Callable[[], None]
    ) -> None:
        """Add the rows, in the order of their messages.

        Raises:
            Poison: a CreatedAt lies more than an hour ahead: it would win until then.
            SinkUnavailable: ClickHouse is away.
        """
        with _sink():
            latest = max(entry.row.updated_at for entry in entries)
            _refuse_future(self._writer, latest, "updated-at-in-the-future")
            store_objects(
                self._writer, list(_distinct(entries).values()), while_waiting=while_waiting
            )
        _observe_lag(_PROPERTY_OBJECTS_GROUP, entries)

    def close(self) -> None:
        """Give up the connection."""
        self._writer.close()


@contextmanager
def _sink() -> Iterator[None]:
    try:
        yield
    except RowRefused as exc:
        raise Poison("row-refused") from exc
    except StorageUnavailable as exc:
        raise SinkUnavailable from exc.__cause__


def _refuse_future_events(
    writer: FactWriter, entries: Sequence[Entry[SessionFact] | Entry[ViewFact]], reason: str
) -> None:
    _refuse_future(writer, max(entry.row.event_time for entry in entries), reason)
    latest = max(entry.row.last_activity_at for entry in entries)
    _refuse_future(writer, latest, "last-activity-at-in-the-future")


def _refuse_future(writer: FactWriter, latest: datetime, reason: str) -> None:
    if not writer.is_past(latest - FUTURE_TOLERANCE):
        raise Poison(reason)


def _distinct(entries: Sequence[Entry[Made]]) -> dict[str, Made]:
    """Return the rows by where they came from; of a repeated message the first."""
    # By the number: UUID's own hash is Python.
    first = {entry.record.message_id.int: entry for entry in reversed(entries)}
    return {
        f"{record.topic}/{record.partition}/{record.offset}": entry.row
        for entry in reversed(first.values())
        for record in (entry.record,)
    }


def _observe_lag(group: str, entries: Sequence[Entry[Made]]) -> None:
    now = datetime.now(UTC)
    lags = [(now - entry.record.created_at).total_seconds() for entry in entries]
    DEV_STATS_INGEST_LAG.labels(group).observe_all([max(lag, 0.0) for lag in lags])


def _limits() -> BatchLimits:
    options = settings.DEV_STATS
    return BatchLimits(rows=options.batch_size, age=options.flush_interval)


for _group, _topic, _handler in (
    (_SESSION_ENDED_GROUP, SESSION_ENDED, SessionFactsHandler),
    (_VIEW_ENDED_GROUP, PROPERTY_OBJECT_VIEW_ENDED, ViewFactsHandler),
    (_PROPERTY_OBJECTS_GROUP, PROPERTY_OBJECT_CHANGED, PropertyObjectsHandler),
):
    register(
        ConsumerSpec(
            name=_group,
            topics=(_topic,),
            group=_group,
            handler=_handler,
            limits=_limits,
            extra_metrics=(DEV_STATS,),
        )
    )
