"""Which users may open the page of dev-stats, for staff who may decide it."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from devstats.models import DeveloperAccess
from pinactivity.core.ids import parse_id


@admin.register(DeveloperAccess)
class DeveloperAccessAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    list_display = ("user", "developer_id")
    list_select_related = ("user",)
    ordering = ("user__username", "developer_id")
    autocomplete_fields = ("user",)
    search_fields = ("user__username",)
    search_help_text = "A part of a user's name, or a developer's whole id."

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        try:
            return queryset.filter(developer_id=parse_id(search_term.strip())), False
        except ValueError:
            return super().get_search_results(request, queryset, search_term)
