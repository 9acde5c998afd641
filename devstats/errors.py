"""The errors that a reader of dev-stats can distinguish."""

from pinactivity.core.errors import ServiceError


class DevStatsForbidden(ServiceError):
    """The token names no developer, or another one than is asked for."""

    code = "DEV_STATS_FORBIDDEN"
