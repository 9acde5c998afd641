"""The table of the transactional outbox (design, section 9)."""

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class OutboxMessageQuerySet(models.QuerySet["OutboxMessage"]):
    def pending(self) -> "OutboxMessageQuerySet":
        """Neither published nor parked, in the relay's order."""
        return self.filter(published_at__isnull=True, parked_at__isnull=True).order_by(
            "shard", "id"
        )

    def due(self, *, shard: int) -> "OutboxMessageQuerySet":
        """Pending in one shard."""
        return self.pending().filter(shard=shard)


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
    published_at = models.DateTimeField(null=True, blank=True)
    attempts = models.IntegerField(db_default=0)
    next_attempt_at = models.DateTimeField(null=True, blank=True)
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
        )
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
        """Where the message is, for a person: Pending, Published, or Parked with its reason."""
        if self.published_at:
            return "Published"
        return f"Parked ({self.last_error})" if self.parked_at else "Pending"
