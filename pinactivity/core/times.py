"""Times as text: ISO 8601 in UTC, on every wire; and durations, for people."""

import re
from datetime import UTC, datetime

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_LONG_FRACTION = re.compile(r"(\.\d{6})\d+")
_OUR_LENGTH = len("2026-03-01T12:00:00.123456Z")
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def parse_time(text: object) -> datetime:
    """Read an ISO 8601 time with its offset (`Z` included), any number of fraction digits.

    Fractions beyond microseconds are cut off: other platforms write seven digits.

    Returns:
        The time in UTC.

    Raises:
        ValueError: not a string, not ISO 8601, without an offset, or beyond years 1 to 9999.
    """
    if not isinstance(text, str) or len(text) > 64:
        raise ValueError("Must be an ISO 8601 time with an offset.")
    try:
        # Six digits and a Z, as `iso_utc` writes it: there is no long fraction to look for.
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
    """Say a duration as a person does, by its two greatest units: `4 min 20 s`, `2 d 3 h`."""
    rest = round(seconds)
    counts = []
    for unit, length in _UNITS:
        count, rest = divmod(rest, length)
        counts.append((count, unit))
    while len(counts) > 1 and not counts[0][0]:
        del counts[0]
    told = [counts[0], *(each for each in counts[1:2] if each[0])]
    return " ".join(f"{count} {unit}" for count, unit in told)
