"""Every error as `application/problem+json` (RFC 9457): one table of codes, one handler."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from django.core.exceptions import RequestDataTooBig
from django.db import Error
from django.http import Http404, HttpRequest, HttpResponse
from rest_framework import exceptions

from pinactivity.core.error_info import describe_error
from pinactivity.core.errors import (
    PayloadTooLarge,
    RateLimited,
    ServiceError,
    Unauthorized,
    ValidationFailed,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    title: str
    retry_after: int | None = None
    """Seconds, for the Retry-After header."""


PROBLEMS: Mapping[str, Problem] = {
    "VALIDATION_FAILED": Problem(400, "The request is not valid."),
    "USER_ACTIVITY_ANONYMOUS_ID_REQUIRED": Problem(400, "X-Anonymous-Id is required."),
    "UNAUTHORIZED": Problem(401, "A valid bearer token is required."),
    "DEV_STATS_FORBIDDEN": Problem(403, "The token names no developer."),
    "USER_ACTIVITY_SESSION_NOT_FOUND": Problem(404, "The device has no Active session."),
    "NOT_FOUND": Problem(404, "There is nothing here."),
    "METHOD_NOT_ALLOWED": Problem(405, "This method is not allowed here."),
    "USER_ACTIVITY_SESSION_ACTIVE_RACE": Problem(409, "Send the request again.", 1),
    "PAYLOAD_TOO_LARGE": Problem(413, "The body is too large."),
    "UNSUPPORTED_MEDIA_TYPE": Problem(415, "Send application/json."),
    "RATE_LIMITED": Problem(429, "Too many requests."),
    "INTERNAL_ERROR": Problem(500, "The service failed."),
    "USER_ACTIVITY_STORAGE_UNAVAILABLE": Problem(503, "The storage is not available.", 2),
    "DEV_STATS_STORAGE_UNAVAILABLE": Problem(503, "The statistics are not available.", 10),
}


def answer(
    code: str,
    *,
    detail: str | None = None,
    errors: Mapping[str, list[str]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """Build the answer for a code of the table.

    Args:
        code: A key of PROBLEMS.
        detail: What to do, for a person; never a value that came in.
        errors: {field or header: reasons}, for validation.
        headers: Added to the answer, such as Allow.
    """
    problem = PROBLEMS[code]
    body: dict[str, Any] = {"type": "about:blank", "title": problem.title, "status": problem.status}
    if detail:
        body["detail"] = detail
    body["code"] = code
    if errors:
        body["errors"] = errors
    response = HttpResponse(
        json.dumps(body),
        content_type="application/problem+json",
        status=problem.status,
        headers=dict(headers or {}),
    )
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(problem.retry_after)
    return response


def answer_exception(  # noqa: C901, PLR0911, PLR0912 - a table of answers
    exc: Exception, context: Mapping[str, Any]
) -> HttpResponse:
    """Answer an exception of a view; Django REST's EXCEPTION_HANDLER."""
    match exc:
        case ValidationFailed():
            return answer(exc.code, detail=str(exc), errors=exc.errors)
        case Unauthorized():
            challenge = 'Bearer realm="pinactivity"'
            if exc.reason != "absent":
                challenge += ', error="invalid_token"'
            return answer(exc.code, detail=str(exc), headers={"WWW-Authenticate": challenge})
        case RateLimited():
            return answer(exc.code, detail=str(exc), headers={"Retry-After": str(exc.retry_after)})
        case ServiceError():
            return answer(exc.code, detail=str(exc))
        case exceptions.ValidationError():
            return answer("VALIDATION_FAILED", errors=_flatten(exc.detail))
        case exceptions.ParseError():
            return answer("VALIDATION_FAILED", errors={"body": [str(exc.detail)]})
        case Http404():
            return answer("NOT_FOUND")
        case exceptions.MethodNotAllowed():
            allowed = ", ".join(context["view"].allowed_methods)
            return answer("METHOD_NOT_ALLOWED", headers={"Allow": allowed})
        case exceptions.UnsupportedMediaType():
            return answer("UNSUPPORTED_MEDIA_TYPE")
        case RequestDataTooBig():
            return answer(PayloadTooLarge.code)
        case Error():
            # It is PostgreSQL's, or of the way to it. A constraint violation that has a meaning is
            # translated by the service that knows it.
            log.error("storage unavailable", **describe_error(exc))
            return answer("USER_ACTIVITY_STORAGE_UNAVAILABLE")
        case _:
            raise exc


def _flatten(detail: Any, prefix: str = "") -> dict[str, list[str]]:
    """Turn Django REST's nested detail into {dotted field: reasons}."""
    if isinstance(detail, Mapping):
        errors: dict[str, list[str]] = {}
        for name, part in detail.items():
            errors.update(_flatten(part, f"{prefix}.{name}" if prefix else str(name)))
        return errors
    return {
        "body" if prefix in {"", "non_field_errors"} else prefix: [str(reason) for reason in detail]
    }


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Django's handler404."""
    return answer("NOT_FOUND")


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Django's handler400: a host, header or cookie that Django itself refuses."""
    return answer("VALIDATION_FAILED")


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's handler500. Django logs the error, without its text (conf/logs.py)."""
    return answer("INTERNAL_ERROR")
