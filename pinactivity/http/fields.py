"""Fields of our JSON, stricter than Django REST's."""

from datetime import datetime
from typing import Any
from uuid import UUID

from rest_framework import serializers

from pinactivity.core.errors import ValidationFailed
from pinactivity.core.ids import parse_id
from pinactivity.core.times import iso_utc


class IdField(serializers.UUIDField):
    """A UUID as text in any legal spelling; not nil, not a number."""

    def to_internal_value(self, data: Any) -> UUID:
        try:
            return parse_id(data)
        except ValueError as exc:
            raise serializers.ValidationError(str(exc)) from None


class UtcField(serializers.DateTimeField):
    """A time as ISO 8601 in UTC, with microseconds and `Z`."""

    def to_representation(self, value: datetime) -> str:
        return iso_utc(value)


def read_id(body: object, field: str) -> UUID:
    """Read one id of a JSON object; bodies that have nothing else need no serializer.

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
