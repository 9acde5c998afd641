"""The topics that are reconciled: what each one's events are in every store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from devstats.backfill import backfill_sessions, backfill_views
from devstats.tables import SESSION_FACTS, VIEW_FACTS, Table
from devstats.writer import FactWriter
from pinactivity.kafka.spec import registered_consumers
from sessions.selectors import ended_session_chunks, existing_sessions
from views.selectors import ended_view_chunks, existing_views


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciledTopic:
    """A topic of ended sessions or views.

    Args:
        topic: Of the events.
        group: The consumer group that stores them.
        table: Of their facts.
        id_column: What the facts are counted by.
        ended: Yields chunks of closed rows of a period, each with `id` and `ended_at`.
        existing: Returns those of some ids that have a row.
        backfill: Adds the facts of rows.
    """

    topic: str
    group: str
    table: Table
    id_column: str
    ended: Callable[..., Iterator[Sequence[Any]]]
    existing: Callable[[Iterable[UUID]], set[UUID]]
    backfill: Callable[[FactWriter, Sequence[Any]], None]


def reconciled_topics() -> tuple[ReconciledTopic, ...]:
    """Return the topics whose events become facts: ended sessions and ended views."""
    sessions = registered_consumers()["dev-stats-session-ended"]
    views = registered_consumers()["dev-stats-property-object-view-ended"]
    return (
        ReconciledTopic(
            topic=sessions.topics[0],
            group=sessions.group,
            table=SESSION_FACTS,
            id_column="SessionId",
            ended=ended_session_chunks,
            existing=existing_sessions,
            backfill=backfill_sessions,
        ),
        ReconciledTopic(
            topic=views.topics[0],
            group=views.group,
            table=VIEW_FACTS,
            id_column="PropertyObjectViewId",
            ended=ended_view_chunks,
            existing=existing_views,
            backfill=backfill_views,
        ),
    )
