"""The base of every admin: it changes nothing, and never counts a whole table."""

from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest, ValidationError
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from pinactivity.core.ids import parse_id

_COUNTED_TO = 10_000


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """Counts to 10,000 and no further; rows beyond that are found by searching."""

    @cached_property
    def count(self) -> int:
        rows: QuerySet[Any] = self.object_list  # type: ignore[assignment]  # always one in an admin
        return rows.order_by()[:_COUNTED_TO].count()


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """Shows rows and changes none. A search finds a UUID, in any spelling, in `id_fields`."""

    id_fields: tuple[str, ...] = ("id",)
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each would count the whole table
    sortable_by = ()  # only the primary key's order has an index
    ordering = ("-id",)  # v7: the newest first
    list_per_page = 50
    search_fields = ("pk",)  # shows the search box; get_search_results searches

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        if any("\x00" in value for _, values in request.GET.lists() for value in values):
            raise BadRequest  # PostgreSQL refuses NUL in text
        for chosen in request.POST.getlist(ACTION_CHECKBOX_NAME):
            try:
                self.opts.pk.to_python(chosen)
            except ValidationError as exc:  # Django's filter by it would fail
                raise BadRequest from exc
        return super().changelist_view(request, extra_context)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term.strip():
            return queryset, False
        try:
            wanted: UUID = parse_id(search_term.strip())
        except ValueError:
            return queryset.none(), False
        found = Q()
        for field in self.id_fields:
            found |= Q(**{field: wanted})
        return queryset.filter(found), False
