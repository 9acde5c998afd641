"""Every metric of the service: name, kind and meaning, declared once (design, section 15)."""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram


class BulkHistogram(Histogram):
    """A histogram that takes many values in one go."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe each of them: one by one a thousand take a millisecond."""
        self._sum.inc(sum(amounts))
        counts = Counts([bisect_left(self._upper_bounds, amount) for amount in amounts])
        for number, count in counts.items():
            self._buckets[number].inc(count)


SESSIONS_STARTED = Counter(
    "activity_sessions_started_total", "Sessions created by start, restart or switch."
)

TOKENS_REJECTED = Counter(
    "activity_tokens_rejected_total",
    "Tokens that were not valid where a guest may call: the caller was taken for one.",
    ["reason"],
)
REQUESTS_LIMITED = Counter(
    "activity_requests_limited_total", "Requests answered with 429, by limit.", ["limit"]
)
SIGN_INS = Counter(
    "activity_sign_ins_total", "Sign-ins of either path, by what they did.", ["source", "outcome"]
)

# -- ActivityCloserJob: names of the specification -----------------------------------------

CLOSER_RUN_DURATION = Histogram(
    "activity_closer_run_duration_ms",
    "Duration of a run, milliseconds.",
    buckets=(10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 15_000, 60_000, 300_000),
)
CLOSER_SESSIONS_CLOSED = Counter(
    "activity_closer_sessions_closed_total", "Sessions closed by the job."
)
CLOSER_VIEWS_CLOSED = Counter("activity_closer_views_closed_total", "Views closed by the job.")
CLOSER_BACKLOG = Gauge(
    "activity_closer_batch_backlog",
    "Active rows past the cutoff at the end of the last run, counted to 100,000.",
    multiprocess_mode="mostrecent",
)
CLOSER_ERRORS = Counter(
    "activity_closer_errors_total", "Transactions that failed, and rows set aside after it."
)
CLOSER_CLOSE_LAG = Histogram(
    "activity_closer_close_lag_seconds",
    "EndedAt - LastActivityAt of a row closed by the job, seconds.",
    buckets=(*range(600, 1801, 30), 3600, 86_400),
)

# -- ActivityRetentionJob -----------------------------------------------------------------

RETENTION_RUNS = Counter("activity_retention_runs_total", "Runs, by how they ended.", ["outcome"])
RETENTION_SESSIONS_DELETED = Counter(
    "activity_retention_sessions_deleted_total", "Sessions that the job has deleted."
)
RETENTION_VIEWS_DELETED = Counter(
    "activity_retention_views_deleted_total", "Views that the job has deleted."
)
RETENTION_ERRORS = Counter("activity_retention_errors_total", "Transactions and runs that failed.")

# -- view statistics -----------------------------------------------------------------------

VIEW_STATS_EVENTS = Counter(
    "activity_view_stats_events_total",
    "Events of ended views, by what they did to the statistics: Counted, Repeated (its view was"
    " counted before), TooOld (it may have been, so it was skipped).",
    ["outcome"],
)
VIEW_STATS_SEEN_PURGED = Counter(
    "activity_view_stats_seen_purged_total", "Views that are no longer remembered as counted."
)

# -- outbox --------------------------------------------------------------------------------

OUTBOX_PUBLISHED = Counter("outbox_published_total", "Messages that Kafka acknowledged.")
OUTBOX_ERRORS = Counter(
    "outbox_errors_total", "Batches of the relay that met a fault, by its class.", ["fault"]
)
OUTBOX_PUBLISH_LATENCY = BulkHistogram(
    "outbox_publish_latency_seconds",
    "From the enqueuing transaction's statement to Kafka's acknowledgement.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 3600),
)

OUTBOX_WAKE_UPS = Counter(
    "outbox_wake_ups_total",
    "Commits that told the relay: Sent, Waiting (the queue held a tick already), Failed.",
    ["outcome"],
)
OUTBOX_PURGED = Counter("outbox_purged_total", "Published messages that are no longer kept.")

# -- consumers -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMetrics:
    """What the consumers' loop feeds; a specification that has names of its own declares them."""

    batch_size: Histogram
    """Labelled by group, as all of them."""
    retries: Counter
    dead_lettered: Counter
    """By group and reason."""
    oldest_unstored: Gauge


CONSUMER = ConsumerMetrics(
    batch_size=Histogram(
        "kafka_consumer_batch_size",
        "Rows that a flush wrote.",
        ["group"],
        buckets=(1, 10, 50, 100, 250, 500, 750, 1000, 10_000),
    ),
    retries=Counter(
        "kafka_consumer_retries_total", "Times that a batch was kept for a retry.", ["group"]
    ),
    dead_lettered=Counter(
        "kafka_consumer_dead_lettered_total",
        "Messages that the dead-letter topic acknowledged, by reason.",
        ["group", "reason"],
    ),
    oldest_unstored=Gauge(
        "kafka_consumer_oldest_unstored_seconds",
        "Age by header CreatedAt of the oldest message read but not committed, else 0.",
        ["group"],
    ),
)
CONSUMER_CONSUMED = Counter(
    "kafka_consumer_consumed_total", "Messages read, those read again included.", ["group"]
)
CONSUMER_TOMBSTONES = Counter(
    "kafka_consumer_tombstones_total", "Messages without a value, which are skipped.", ["group"]
)
CONSUMER_FLUSH_SECONDS = Histogram(
    "kafka_consumer_flush_seconds",
    "Time that the handler took to write a batch, or to fail at it; reading the next one while it"
    " waits included.",
    ["group"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60),
)
CONSUMER_LAG = Gauge(
    "kafka_consumer_lag",
    "Messages that wait in the partitions of this process behind what it has read.",
    ["group"],
)

# -- dev-stats: names of the specification ---------------------------------------------------

DEV_STATS = ConsumerMetrics(
    batch_size=Histogram(
        "dev_stats_ingest_batch_size",
        "Rows that a flush wrote.",
        ["group"],
        buckets=(1, 10, 50, 100, 250, 500, 750, 1000),
    ),
    retries=Counter(
        "dev_stats_ingest_retries_total", "Times that a batch was kept for a retry.", ["group"]
    ),
    dead_lettered=Counter(
        "dev_stats_dlq_total",
        "Messages that the dead-letter topic acknowledged, by reason.",
        ["group", "reason"],
    ),
    oldest_unstored=Gauge(
        "dev_stats_oldest_unstored_seconds",
        "Age by header CreatedAt of the oldest message read but not committed, else 0.",
        ["group"],
    ),
)
DEV_STATS_SESSION_FACTS_INGESTED = Counter(
    "dev_stats_session_facts_ingested_total",
    "Rows added to session_facts, those added again included.",
)
DEV_STATS_VIEW_FACTS_INGESTED = Counter(
    "dev_stats_property_object_view_facts_ingested_total",
    "Rows added to property_object_view_facts, those added again included.",
)
DEV_STATS_INGEST_LAG = BulkHistogram(
    "dev_stats_ingest_lag_seconds",
    "From the event's header CreatedAt to the insert's acknowledgement.",
    ["group"],
    buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 150, 300, 900, 3600, 86_400),
)
DEV_STATS_RECONCILE_LOST = Gauge(
    "dev_stats_reconcile_lost",
    "What ended and is neither in ClickHouse nor on its way, by a worker's last reconciliation.",
    ["topic"],
    multiprocess_mode="mostrecent",
)
DEV_STATS_RECONCILE_LAST_SUCCESS = Gauge(
    "dev_stats_reconcile_last_success_timestamp_seconds",
    "When a worker last finished a reconciliation, Unix time; 0 before it has.",
    multiprocess_mode="mostrecent",
)
