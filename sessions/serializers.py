"""Bodies of the sessions API; names as the front end writes them."""

from rest_framework import serializers

from pinactivity.fields import IdField


class HeartbeatRequest(serializers.Serializer[None]):
    SessionId = IdField()
