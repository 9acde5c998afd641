"""Fields of our JSON that Django REST has no strict form of."""

from datetime import datetime
from typing import Any
from uuid import UUID

from rest_framework import serializers

from pinactivity.clock import iso_utc
from pinactivity.ids import parse_id


class IdField(serializers.UUIDField):
    """A UUID as text in any legal spelling, not nil; numbers are not ids."""

    def to_internal_value(self, data: Any) -> UUID:
        try:
            return parse_id(data)
        except ValueError as fault:
            raise serializers.ValidationError(str(fault)) from None


class UtcField(serializers.DateTimeField):
    """A time as everywhere else here: ISO 8601 in UTC, microseconds, `Z`."""

    def to_representation(self, value: datetime) -> str:
        return iso_utc(value)
