"""Options of the HTTP API, validated where they are built."""

from dataclasses import dataclass, fields

from pinactivity.core.errors import InvalidOptions

_MOST = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitOptions:
    """Requests a minute; 0 is off. `RATE_LIMIT_<FIELD>` in the environment.

    Raises:
        InvalidOptions: one or more fields are out of bounds; each is named.
    """

    start_per_address: int = 30
    """Starts, and heartbeats and openings that start a session."""
    """Starts, and heartbeats and openings that start a session."""
    per_anonymous_id: int = 60
    """Of link and of open, each."""
    per_address: int = 600
    """Of link and of open, each."""
    heartbeats: int = 20
    """Of a session, and of each view; every web process counts its own."""

    def __post_init__(self) -> None:
        reasons = {
            field.name: f"Must be from 0 to {_MOST}."
            for field in fields(self)
            if not 0 <= getattr(self, field.name) <= _MOST
        }
        if reasons:
            raise InvalidOptions(reasons)
