"""What can go wrong with a session."""

from pinactivity.core.errors import ServiceError


class SessionActiveRace(ServiceError):
    """The device's session changed under this request three times; send it again."""

    code = "USER_ACTIVITY_SESSION_ACTIVE_RACE"


class SessionNotFound(ServiceError):
    """The device has no Active session: start one, then link again."""

    code = "USER_ACTIVITY_SESSION_NOT_FOUND"
