"""The API of dev-stats: developers read what was done with their own objects, never others'."""

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from devstats.errors import DevStatsForbidden
from devstats.requested_developers import requested_developers
from devstats.selectors import (
    LONGEST_PERIOD,
    SessionStatistics,
    ViewStatistics,
    summarise_objects,
    summarise_sessions,
)
from devstats.serializers import PropertyObjectsSummaryResponse, SessionsSummaryResponse
from pinactivity.core.ids import parse_id
from pinactivity.core.times import iso_utc
from pinactivity.http.auth import required_actor
from pinactivity.http.base import ApiView
from pinactivity.http.openapi import ANSWER_HEADERS, BEARER, WHOLE_PERIOD, problems
from pinactivity.http.periods import Period, parse_whole_period

_CLAIM = "developer_id"


def calling_developer(request: Request) -> UUID:
    """Read the developer whose statistics the caller may see: the claim of their token.

    A query may name a developer; it can narrow nothing, and another one than the claim's is
    refused.

    Raises:
        Unauthorized, KeysUnavailable: see `required_actor`.
        DevStatsForbidden: the claim is missing, malformed or nil, or the query names another.
    """
    actor = required_actor(request)
    try:
        developer_id = parse_id(actor.claims.get(_CLAIM))
        named = requested_developers(request.query_params)
    except ValueError:
        raise DevStatsForbidden from None
    if named - {developer_id}:
        raise DevStatsForbidden
    return developer_id


_SCOPE = OpenApiParameter(
    "DeveloperId", OpenApiTypes.UUID, description="May be given, and must be the token's own."
)


_PARAMETERS = [*WHOLE_PERIOD, _SCOPE, *ANSWER_HEADERS]
_PROBLEMS = problems(
    "VALIDATION_FAILED", "UNAUTHORIZED", "DEV_STATS_FORBIDDEN", "DEV_STATS_STORAGE_UNAVAILABLE"
)


# These are one developer's statistics: nobody on the way keeps a copy.
_sealed = method_decorator(never_cache, name="dispatch")


@_sealed
class SessionsSummaryView(ApiView):
    @extend_schema(
        operation_id="summarise_sessions",
        parameters=_PARAMETERS,
        responses={200: SessionsSummaryResponse, **_PROBLEMS},
        auth=BEARER,
    )
    def get(self, request: Request) -> Response:
        """Summarise the sessions in which objects of the token's developer were viewed.

        A session belongs to the period, and to the day in UTC, of the first view of one of these
        objects in it within the period; the whole of its Duration counts.
        """
        developer_id = calling_developer(request)
        period = parse_whole_period(request.query_params, longest=LONGEST_PERIOD)
        summary = summarise_sessions(developer_id, period)
        return Response(
            {
                **_head(period, summary.fresh_as_of),
                "Total": _sessions(summary.total),
                "ByViewerKind": [
                    {"ViewerKind": kind, **_sessions(statistics)}
                    for kind, statistics in summary.by_viewer_kind
                ],
                "ByDay": [
                    {"Day": day.isoformat(), **_sessions(statistics)}
                    for day, statistics in summary.by_day
                ],
            }
        )


@_sealed
class PropertyObjectsSummaryView(ApiView):
    @extend_schema(
        operation_id="summarise_property_objects",
        parameters=_PARAMETERS,
        responses={200: PropertyObjectsSummaryResponse, **_PROBLEMS},
        auth=BEARER,
    )
    def get(self, request: Request) -> Response:
        """Summarise the views of the developer's objects that were opened within the period."""
        developer_id = calling_developer(request)
        period = parse_whole_period(request.query_params, longest=LONGEST_PERIOD)
        summary = summarise_objects(developer_id, period)
        return Response(
            {
                **_head(period, summary.fresh_as_of),
                "Items": [
                    {
                        "PropertyObjectId": str(item.property_object_id),
                        **_views(item.statistics),
                        "ByViewerKind": [
                            {"ViewerKind": kind, **_views(statistics)}
                            for kind, statistics in item.by_viewer_kind
                        ],
                    }
                    for item in summary.objects
                ],
            }
        )


def _head(period: Period, fresh_as_of: datetime | None) -> Mapping[str, str | None]:
    return {
        name: iso_utc(moment) if moment else None
        for name, moment in zip(
            ("From", "To", "FreshAsOf"), (period.since, period.until, fresh_as_of), strict=True
        )
    }


def _sessions(statistics: SessionStatistics) -> Mapping[str, float | None]:
    return {
        "Sessions": statistics.sessions,
        "AvgDurationSeconds": statistics.average,
        "MedianDurationSeconds": statistics.median,
        "P95DurationSeconds": statistics.percentile_95,
    }


def _views(statistics: ViewStatistics) -> Mapping[str, float]:
    return {
        "Views": statistics.views,
        "UniqueViewers": statistics.unique_viewers,
        "TotalDurationSeconds": statistics.total,
        "AvgDurationSeconds": statistics.average,
    }
