"""Counts ended views into the statistics of their property objects."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from pinactivity.kafka.entry import Entry
from pinactivity.kafka.payload import Payload
from pinactivity.kafka.record import Poison, Record
from pinactivity.kafka.spec import ConsumerSpec, register
from pinactivity.kafka.topics import PROPERTY_OBJECT_VIEW_ENDED
from pinactivity.postgres.clock import statement_time
from views.stats import EndedView, count_views

_FUTURE_TOLERANCE = timedelta(hours=1)
_MOST_SECONDS = 2**31 - 1
"""The greatest `int` of the contract: 68 years."""


class ViewStatsHandler:
    """Handles `property-object-view-ended`, one transaction a batch."""

    def decode(self, record: Record) -> EndedView:
        """Read the fields of an ended view that the statistics need.

        Raises:
            Poison: PropertyObjectViewId, PropertyObjectId, ViewedAt or DurationSeconds is missing
                or invalid; DurationSeconds is not from 0 to 2^31 - 1.
        """
        payload = Payload(record)
        return EndedView(
            view_id=payload.id("PropertyObjectViewId"),
            property_object_id=payload.id("PropertyObjectId"),
            viewed_at=payload.time("ViewedAt"),
            duration_seconds=payload.whole_number("DurationSeconds", most=_MOST_SECONDS),
            recorded_at=record.created_at,
        )

    def flush(self, entries: Sequence[Entry[EndedView]], while_waiting: Callable[[], None]) -> None:
        """Count the views that were not counted yet.

        Raises:
            Poison: a ViewedAt is more than an hour ahead of the database's clock. It would
                remain the object's LastViewedAt until that time.
        """
        now = statement_time()
        if any(entry.row.viewed_at > now + _FUTURE_TOLERANCE for entry in entries):
            raise Poison("viewed-at-in-the-future")
        count_views([entry.row for entry in entries], now=now)

    def close(self) -> None:
        """Do nothing: the handler has no resources."""


register(
    ConsumerSpec(
        name="view-stats",
        topics=(PROPERTY_OBJECT_VIEW_ENDED,),
        group="user-activity-property-object-view-stats",
        handler=ViewStatsHandler,
    )
)
