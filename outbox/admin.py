"""Outbox messages for support staff: read-only, but parked ones can be sent again."""

import json
from typing import Any

from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest

from outbox.models import OutboxMessage
from outbox.selectors import count_backlog
from outbox.services import redrive
from pinactivity.admin.read_only import ReadOnlyAdmin


class DeliveryFilter(admin.SimpleListFilter):
    title = "delivery"
    parameter_name = "delivery"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            ("pending", "Pending"),
            ("retrying", "Retrying after a failure"),
            ("published", "Published"),
            ("parked", "Parked"),
        ]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[OutboxMessage]
    ) -> QuerySet[OutboxMessage]:
        # Not the model's pending() and so on, which order: the page orders by id.
        pending = {"published_at__isnull": True, "parked_at__isnull": True}
        match self.value():
            case "pending":
                return queryset.filter(**pending)
            case "retrying":
                return queryset.filter(**pending, next_attempt_at__isnull=False)
            case "published":
                return queryset.filter(published_at__isnull=False)
            case "parked":
                return queryset.filter(parked_at__isnull=False)
        return queryset


class TopicFilter(admin.SimpleListFilter):
    """Lists the topics of the code: the distinct ones of the table would take a scan of it."""

    title = "topic"
    parameter_name = "topic"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        # Importing kafka-python takes 100 ms, which no process without Kafka should pay.
        from pinactivity.kafka import topics  # noqa: PLC0415 - see above

        ours = (topics.SESSION_LINKED, topics.SESSION_ENDED, topics.PROPERTY_OBJECT_VIEW_ENDED)
        return [(topic, topic) for topic in ours]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[OutboxMessage]
    ) -> QuerySet[OutboxMessage]:
        topic = self.value()
        return queryset.filter(topic=topic) if topic else queryset


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    id_fields = ("message_id", "key")
    list_display = ("id", "created_at", "topic", "key", "delivery", "published_at")
    list_filter = (DeliveryFilter, TopicFilter)
    actions = ("redrive",)
    fields = (
        "id",
        "message_id",
        "topic",
        "key",
        "delivery",
        "created_at",
        "published_at",
        "parked_at",
        "last_error",
        "attempts",
        "next_attempt_at",
        "shard",
        "readable_headers",
        "readable_payload",
    )

    def has_redrive_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may redrive; the admin calls it by the permission's name."""
        return request.user.has_perm("outbox.redrive_outboxmessage")

    @admin.action(description="Send parked messages again", permissions=["redrive"])
    def redrive(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> None:
        """Redrive the parked ones among the selected messages; each gets a log entry."""
        assert request.user.pk is not None  # nobody else has the permission
        parked = list(queryset.filter(parked_at__isnull=False).order_by("id"))
        with transaction.atomic():
            count = redrive(OutboxMessage.objects.filter(id__in=[each.id for each in parked]))
            LogEntry.objects.log_actions(
                request.user.pk,
                parked,
                CHANGE,
                "Sent again after it was parked.",
            )
        self.message_user(
            request,
            f"{count} on their way. A message arrives after later messages of its key that were"
            " sent meanwhile. One that Kafka still refuses is parked again.",
        )

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Show the sizes of the backlog above the list."""
        pending, parked = count_backlog()
        subtitle = f"{pending} pending, {parked} parked"
        return super().changelist_view(request, {**(extra_context or {}), "subtitle": subtitle})

    @admin.display(description="Delivery")
    def delivery(self, message: OutboxMessage) -> str:
        return message.delivery

    @admin.display(description="Headers")
    def readable_headers(self, message: OutboxMessage) -> str:
        return json.dumps(json.loads(message.headers), indent=2, ensure_ascii=False)

    @admin.display(description="Payload")
    def readable_payload(self, message: OutboxMessage) -> str:
        return json.dumps(json.loads(message.payload), indent=2, ensure_ascii=False)
