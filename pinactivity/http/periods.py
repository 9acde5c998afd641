"""Periods that reads ask for by `From` and `To`: half-open, in UTC (C23)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pinactivity.core.errors import ValidationFailed
from pinactivity.core.times import parse_time

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Period:
    """From `since`, included, to `until`, excluded; None leaves that side open."""

    since: datetime | None
    until: datetime | None


def parse_period(query: Mapping[str, str]) -> Period:
    """Read `From` and `To`: each a date, which is its midnight in UTC, or a time with an offset.

    Raises:
        ValidationFailed: one is neither, or `From` is not before `To`.
    """
    bounds: dict[str, datetime] = {}
    errors: dict[str, list[str]] = {}
    for name in ("From", "To"):
        if name in query:
            try:
                bounds[name] = parse_moment(query[name])
            except ValueError:
                errors[name] = ["Must be a date, or an ISO 8601 time with an offset."]
    period = Period(bounds.get("From"), bounds.get("To"))
    if period.since and period.until and period.since >= period.until:
        errors["From"] = ["Must be before To."]
    if errors:
        raise ValidationFailed(errors)
    return period


def parse_whole_period(query: Mapping[str, str], *, longest: timedelta) -> Period:
    """Read a period that must have both sides, and be no longer than `longest`.

    Raises:
        ValidationFailed: as in `parse_period`; or a side is missing, or it is too long.
    """
    period = parse_period(query)
    missing = {
        name: ["This parameter is required."] for name in ("From", "To") if name not in query
    }
    if missing:
        raise ValidationFailed(missing)
    if period.since and period.until and period.until - period.since > longest:
        raise ValidationFailed({"To": [f"Must be at most {longest.days} days after From."]})
    return period


def parse_moment(text: str) -> datetime:
    """Read a date, which is its midnight in UTC, or an ISO 8601 time with an offset.

    Raises:
        ValueError: it is neither.
    """
    if _DATE.fullmatch(text):
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    return parse_time(text)
