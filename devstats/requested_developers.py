"""Whose statistics a request asks for, if it names anybody."""

from uuid import UUID

from django.http import QueryDict

from pinactivity.core.ids import parse_id


def requested_developers(query: QueryDict) -> set[UUID]:
    """Read the developers that a query names, in any spelling of `DeveloperId`.

    Whoever asks may see one of them at most: what is named is compared with what they may see, so
    that nobody takes one developer's answer for another's.

    Raises:
        ValueError: one is no id.
    """
    return {
        parse_id(value)
        for name, values in query.lists()
        if name.replace("_", "").replace("-", "").lower() == "developerid"
        for value in values
    }
