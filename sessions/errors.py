"""What can go wrong with a session."""

from pinactivity.errors import ServiceError


class SessionActiveRace(ServiceError):
    """The device's session changed under this request three times; send it again."""

    code = "USER_ACTIVITY_SESSION_ACTIVE_RACE"
