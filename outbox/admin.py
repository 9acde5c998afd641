"""Outbox messages for support staff; read-only."""

import json
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from outbox.models import OutboxMessage
from pinactivity.admin import ReadOnlyAdmin


class DeliveryFilter(admin.SimpleListFilter):
    title = "delivery"
    parameter_name = "delivery"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("pending", "Pending"), ("published", "Published"), ("parked", "Parked")]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[OutboxMessage]
    ) -> QuerySet[OutboxMessage]:
        match self.value():
            case "pending":
                return queryset.filter(published_at__isnull=True, parked_at__isnull=True)
            case "published":
                return queryset.filter(published_at__isnull=False)
            case "parked":
                return queryset.filter(parked_at__isnull=False)
        return queryset


class TopicFilter(admin.SimpleListFilter):
    """The topics by name: asking the table for its distinct values would scan it."""

    title = "topic"
    parameter_name = "topic"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        from pinactivity.kafka import topics  # noqa: PLC0415 - loads kafka-python, 100 ms

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

    @admin.display(description="Delivery")
    def delivery(self, message: OutboxMessage) -> str:
        return message.delivery

    @admin.display(description="Headers")
    def readable_headers(self, message: OutboxMessage) -> str:
        return json.dumps(json.loads(message.headers), indent=2, ensure_ascii=False)

    @admin.display(description="Payload")
    def readable_payload(self, message: OutboxMessage) -> str:
        return json.dumps(json.loads(message.payload), indent=2, ensure_ascii=False)
