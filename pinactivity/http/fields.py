"""Fields of our JSON that Django REST has no strict form of."""

from datetime import datetime
from typing import Any
from uuid import UUID

from rest_framework import serializers

from pinactivity.core.errors import ValidationFailed
from pinactivity.core.ids import parse_id
from pinactivity.core.times import iso_utc


class IdField(serializers.UUIDField):
    """A UUID as text in any legal spelling, not nil; numbers are not ids."""

    def to_internal_value(self, data: Any) -> UUID:
        try:
            return parse_id(data)
        except ValueError as exc:
            raise serializers.ValidationError(str(exc)) from None


class UtcField(serializers.DateTimeField):
    """A time as everywhere else here: ISO 8601 in UTC, microseconds, `Z`."""

    def to_representation(self, value: datetime) -> str:
        return iso_utc(value)


def read_id(body: object, field: str) -> UUID:
    """Read one id of a JSON object, without a serializer: for bodies that have nothing else.

    Raises:
        ValidationFailed: the body is no object, or the field is missing or not an id.
    """
    if not isinstance(body, dict):
        raise ValidationFailed({"body": ["Must be an object."]})
    if body.get(field) is None:
        raise ValidationFailed({field: ["This field is required."]})
    try:
        return parse_id(body[field])
    except ValueError as exc:
        raise ValidationFailed({field: [str(exc)]}) from None
