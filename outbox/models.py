"""The table of the transactional outbox (design, section 9)."""

from django.db import connection, models, transaction
from django.db.models import Q
from django.db.models.functions import Now

INDEX_SCANS_ONLY = ", ".join(
    f"set_config('{setting}', '{value}', true)"
    for setting, value in (
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("enable_sort", "off"),
        ("max_parallel_workers_per_gather", "0"),
    )
)
"""A SELECT of this makes the rest of the transaction read in the order of an index. After an
ANALYZE of the empty table the planner would read and sort all of it (docs/adr/0009)."""


def scan_indexes_only() -> None:
    """Restrict the rest of the transaction to index scans; see INDEX_SCANS_ONLY."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {INDEX_SCANS_ONLY}")


class OutboxMessageQuerySet(models.QuerySet["OutboxMessage"]):
    def pending(self) -> "OutboxMessageQuerySet":
        """Neither published nor parked, in the relay's order."""
        return self.filter(published_at__isnull=True, parked_at__isnull=True).order_by(
            "shard", "id"
        )

    def fresh(self) -> "OutboxMessageQuerySet":
        """Pending, without a retry time."""
        return self.pending().filter(next_attempt_at__isnull=True)

    def to_retry(self) -> "OutboxMessageQuerySet":
        """Pending with a retry time, `next_attempt_at`: after a failure or a redrive.

        Until that time the message is backing off; then it is due.
        """
        return self.pending().filter(next_attempt_at__isnull=False)

    def retry_now(self) -> int:
        """Make messages due; return how many.

        Leaves out what a relay has locked: to wait for that relay could end in a deadlock.
        """
        with transaction.atomic():
            free = self.select_for_update(no_key=True, skip_locked=True).values("id")
            return self.model.objects.filter(id__in=free).update(next_attempt_at=Now())

    def outside(self, shards: range) -> "tuple[OutboxMessageQuerySet, ...]":
        """Pending in other shards: those below `shards`, if there can be any, and those above.

        Two queries, because one with OR has no range in the index and would read all of it.
        """
        below = self.pending().filter(shard__lt=shards.start)
        above = self.pending().filter(shard__gte=shards.stop)
        return (below, above) if shards.start else (above,)

    def parked(self) -> "OutboxMessageQuerySet":
        """Set aside because Kafka can never take it, until a person redrives it."""
        return self.filter(parked_at__isnull=False)


class OutboxMessage(models.Model):
    """One event, written in the transaction that made it true, until Kafka has it.

    The headers MessageId and CreatedAt are `message_id` and `created_at`; `headers` holds the
    others. Headers and payload are text: the bytes that Kafka gets, untouched by jsonb.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField()
    shard = models.SmallIntegerField(db_default=0)
    topic = models.TextField()
    key = models.TextField(help_text="The AggregateId.")
    headers = models.TextField()
    payload = models.TextField()
    created_at = models.DateTimeField(db_default=Now())
    # The time of the mark. The relay marks a batch while it sends it, so this lies shortly
    # before Kafka's acknowledgement; the mark is committed after it.
    published_at = models.DateTimeField(null=True, blank=True)
    attempts = models.IntegerField(
        db_default=0,
        help_text="Deliveries of this message that failed while its topic's others did not.",
    )
    next_attempt_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="After a failure: not sent before this time. Until then the messages of its key"
        " are blocked; with no attempts spent, those of its topic.",
    )
    parked_at = models.DateTimeField(null=True, blank=True)
    last_error = models.TextField(blank=True, db_default="", help_text="Class and code only.")

    objects = OutboxMessageQuerySet.as_manager()

    class Meta:
        db_table = "outbox_messages"
        indexes = (
            models.Index(
                fields=["shard", "id"],
                name="ix_outbox_messages_pending",
                condition=Q(published_at__isnull=True, parked_at__isnull=True),
            ),
            models.Index(fields=["key"], name="ix_outbox_messages_key"),
            models.Index(
                fields=["parked_at"],
                name="ix_outbox_messages_parked",
                condition=Q(parked_at__isnull=False),
            ),
            models.Index(
                fields=["shard", "id"],
                name="ix_outbox_messages_waiting",
                condition=Q(
                    published_at__isnull=True, parked_at__isnull=True, next_attempt_at__isnull=False
                ),
            ),
        )
        permissions = (("redrive_outboxmessage", "Can send parked messages again"),)
        constraints = (
            models.UniqueConstraint(fields=["message_id"], name="ux_outbox_messages_message_id"),
            models.CheckConstraint(
                name="chk_outbox_messages_published_or_parked",
                condition=Q(published_at__isnull=True) | Q(parked_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return str(self.message_id)

    @property
    def delivery(self) -> str:
        """How far the message got, for a person; with the error if it failed."""
        if self.published_at:
            return "Published"
        if self.parked_at:
            return f"Parked ({self.last_error})"
        return f"Retrying ({self.last_error})" if self.next_attempt_at else "Pending"
