"""What the events of all apps are made of: one declaration of their fields."""

from typing import Any

import msgspec


class EventFields(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """An event for other services. Its fields, in their order, are the payload's."""

    version: int
    """The row's version after the change; a header, not a part of the payload."""

    def payload(self) -> dict[str, Any]:
        """Return the payload in types that JSON has: ids are text."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["Version"]
        return fields
