"""Queries on rows that have a LastActivityAt and a status: sessions and views."""

from collections.abc import Collection
from datetime import datetime
from typing import Self, TypeVar

from django.db import models
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from pinactivity.core.ids import Id
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
        since: str | None = None,
        row_id: Id | None = None,
        set_aside: Collection[Id] = (),
    ) -> list[tuple[str, str]]:
        """Lock due rows until the transaction ends, skipping rows that are locked already.

        Args:
            cutoff: As in `due`.
            limit: The most rows to lock.
            since: Only rows whose LastActivityAt, as returned here, is not before it.
            row_id: Only this row, if it is still due.
            set_aside: Never these rows.

        Returns:
            (id, LastActivityAt) of each row as text, oldest first. Reading them as Python objects
            takes as long as the rest of the claim (docs/adr/0002).
        """
        rows = self.due(cutoff=cutoff).exclude(id__in=set_aside)
        if since is not None:
            rows = rows.filter(last_activity_at__gte=since)
        if row_id is not None:
            rows = rows.filter(id=row_id)
        locked = rows.select_for_update(skip_locked=True, no_key=True)
        texts = locked.values_list(
            Cast("id", models.TextField()), Cast("last_activity_at", models.TextField())
        )
        return list(texts[:limit])
