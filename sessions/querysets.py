"""Queries on rows that have a LastActivityAt and a status: sessions and views."""

from collections.abc import Collection
from datetime import datetime
from typing import Self, TypeVar
from uuid import UUID

from django.db import models
from django.db.models.expressions import Combinable

from sessions.lifecycle import Status

Row_co = TypeVar("Row_co", bound=models.Model, covariant=True)


class ActivityQuerySet(models.QuerySet[Row_co]):
    """Rows of sessions or of views."""

    def active(self) -> Self:
        return self.filter(status=Status.ACTIVE)

    def due(self, *, cutoff: datetime | Combinable) -> Self:
        """Active and silent since before `cutoff`, oldest first."""
        return self.active().filter(last_activity_at__lt=cutoff).order_by("last_activity_at")

    def claim(
        self,
        *,
        cutoff: datetime,
        limit: int,
        since: datetime | None = None,
        row_id: UUID | None = None,
        set_aside: Collection[UUID] = (),
    ) -> list[tuple[UUID, datetime]]:
        """Lock due rows until the transaction ends, skipping rows that are locked already.

        Args:
            cutoff: As in `due`.
            limit: The most rows to lock.
            since: Only rows whose LastActivityAt is not before it.
            row_id: Only this row, if it is still due.
            set_aside: Never these rows.

        Returns:
            (id, LastActivityAt) of each row, oldest first.
        """
        rows = self.due(cutoff=cutoff).exclude(id__in=set_aside)
        if since is not None:
            rows = rows.filter(last_activity_at__gte=since)
        if row_id is not None:
            rows = rows.filter(id=row_id)
        locked = rows.select_for_update(skip_locked=True, no_key=True)
        return list(locked.values_list("id", "last_activity_at")[:limit])
