"""Times as ISO 8601 in UTC, as all our interfaces write them, and durations for people."""

import re
from datetime import UTC, datetime

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_LONG_FRACTION = re.compile(r"(\.\d{6})\d+")
_OUR_LENGTH = len("2026-03-01T12:00:00.123456Z")
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def parse_time(text: object) -> datetime:
    """Read an ISO 8601 time with its offset (`Z` included), any number of fraction digits.

    Digits beyond microseconds are cut off; other platforms write seven.

    Returns:
        The time in UTC.

    Raises:
        ValueError: it is not a string, not ISO 8601, has no offset, or is beyond years 1 to 9999.
    """
    if not isinstance(text, str) or len(text) > 64:
        raise ValueError("Must be an ISO 8601 time with an offset.")
    try:
        # A text as `iso_utc` writes it has six digits, so it needs no search for a long fraction.
        if len(text) != _OUR_LENGTH or text[19] != ".":
            text = _LONG_FRACTION.sub(r"\1", text)
        moment = datetime.fromisoformat(text)
        in_utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("Must be an ISO 8601 time with an offset.") from None
    if moment.tzinfo is None:
        raise ValueError("Must be an ISO 8601 time with an offset.")
    return in_utc


def iso_utc(moment: datetime) -> str:
    """Write an aware time as ISO 8601 in UTC with microseconds and `Z` (design, section 8)."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def iso_utc_sql(moment: str) -> str:
    """Write SQL that gives a timestamptz as `iso_utc` writes it; `moment` is SQL."""
    return f"""to_char({moment} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""


def say_duration(seconds: float) -> str:
    """Write a duration for people, in its two greatest units: `4 min 20 s`, `2 d 3 h`.

    Args:
        seconds: Rounded to whole seconds.
    """
    rest = round(seconds)
    counts = []
    for unit, length in _UNITS:
        count, rest = divmod(rest, length)
        counts.append((count, unit))
    while len(counts) > 1 and not counts[0][0]:
        del counts[0]
    greatest = [counts[0], *(each for each in counts[1:2] if each[0])]
    return " ".join(f"{count} {unit}" for count, unit in greatest)
