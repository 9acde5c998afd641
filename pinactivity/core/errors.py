"""Errors that callers distinguish; `http/problems.py` gives each its HTTP form.

The docstring of a class is its default message. A message never quotes a value that came in, so
it is safe to show.
"""

from collections.abc import Mapping
from typing import ClassVar


class InvalidOptions(ValueError):
    """Names the fields of an options class that are out of bounds.

    Args:
        reasons: {field: what it must be}.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in reasons.items()))


class ServiceError(Exception):
    """The request could not be served."""

    code: ClassVar[str]

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class ValidationFailed(ServiceError):
    """The request is not valid."""

    code = "VALIDATION_FAILED"

    def __init__(
        self, errors: Mapping[str, list[str]] | None = None, message: str | None = None
    ) -> None:
        super().__init__(message)
        self.errors = dict(errors or {})


class AnonymousIdRequired(ValidationFailed):
    """The header X-Anonymous-Id must carry the id that starting a session answered."""

    code = "USER_ACTIVITY_ANONYMOUS_ID_REQUIRED"


class PayloadTooLarge(ServiceError):
    """The body is larger than this service reads."""

    code = "PAYLOAD_TOO_LARGE"


class Unauthorized(ServiceError):
    """A valid bearer token is required."""

    code = "UNAUTHORIZED"

    def __init__(self, reason: str = "absent") -> None:
        super().__init__()
        self.reason = reason
        """absent, expired, invalid or unconfigured: for a metric, and for WWW-Authenticate."""


class KeysUnavailable(ServiceError):
    """The keys that tokens are checked with cannot be had now; send the request again."""

    code = "USER_ACTIVITY_STORAGE_UNAVAILABLE"
    reason = "keys_unavailable"


class RateLimited(ServiceError):
    """Too many requests; wait for as long as Retry-After says."""

    code = "RATE_LIMITED"

    def __init__(self, retry_after: int) -> None:
        super().__init__()
        self.retry_after = retry_after
        """Seconds."""
