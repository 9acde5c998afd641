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
"""What to SELECT so that the transaction reads in the order of an index, whatever the statistics
say: an ANALYZE that met the table empty makes the planner read and sort all of it
(docs/adr/0009)."""


def scan_indexes_only() -> None:
    """Hold the rest of the transaction to index scans; see INDEX_SCANS_ONLY."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {INDEX_SCANS_ONLY}")


class OutboxMessageQuerySet(models.QuerySet["OutboxMessage"]):
    def pending(self) -> "OutboxMessageQuerySet":
        """Neither published nor parked, in the relay's order."""
        return self.filter(published_at__isnull=True, parked_at__isnull=True).order_by(
            "shard", "id"
        )

    def fresh(self) -> "OutboxMessageQuerySet":
        """Pending, and not met by a fault so far."""
        return self.pending().filter(next_attempt_at__isnull=True)

    def waiting(self) -> "OutboxMessageQuerySet":
        """Pending after a fault, or sent again by a person: until or since `next_attempt_at`."""
        return self.pending().filter(next_attempt_at__isnull=False)

    def end_waits(self) -> int:
        """Make waiting messages due; return how many.

        Those that a relay is at are left to it: waiting for it could end in a deadlock.
        """
        with transaction.atomic():
            free = self.select_for_update(no_key=True, skip_locked=True).values("id")
            return self.model.objects.filter(id__in=free).update(next_attempt_at=Now())

    def outside(self, shards: range) -> "tuple[OutboxMessageQuerySet, ...]":
        """Pending in shards of another layout: those below, if there can be any, and those above.

        Two queries, because for one with OR the index has no range: it would be read as a whole.
        """
        below = self.pending().filter(shard__lt=shards.start)
        above = self.pending().filter(shard__gte=shards.stop)
        return (below, above) if shards.start else (above,)

    def parked(self) -> "OutboxMessageQuerySet":
        """Set aside, each at fault itself, until a person sends it again."""
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
    # The mark's moment: a batch is marked while it is sent, and told when Kafka has it all.
    published_at = models.DateTimeField(null=True, blank=True)
    attempts = models.IntegerField(
        db_default=0,
        help_text="Deliveries of this message that failed while its topic's others did not.",
    )
    next_attempt_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="After a fault: until then this message waits, and with it those of its key;"
        " with no attempts spent, those of its topic.",
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
        """Where the message is, for a person; with the reason if it is not on its way."""
        if self.published_at:
            return "Published"
        if self.parked_at:
            return f"Parked ({self.last_error})"
        return f"Waiting ({self.last_error})" if self.next_attempt_at else "Pending"
