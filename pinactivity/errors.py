"""Errors that callers can tell apart; `problems.py` gives each its HTTP form.

The docstring of a class is its default message. Every message is safe to show: it never
quotes a value that came in.
"""

from collections.abc import Mapping
from typing import ClassVar


class InvalidOptions(ValueError):
    """Say which fields of an options class are out of bounds: {field: reason}."""

    def __init__(self, faults: dict[str, str]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in faults.items()))


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
