"""Reads on views."""

from uuid import UUID

from django.db.models import QuerySet

from views.models import PropertyObjectView


def views_of_user(user_id: UUID) -> QuerySet[PropertyObjectView]:
    """Return a user's views by the reading rule (design, section 6): those of his sessions.

    Never by the views' own user, which is a snapshot of the opening: so what a guest saw before
    signing in is in the user's history without any change of rows (AC7).
    """
    return PropertyObjectView.objects.filter(session__user_id=user_id)
