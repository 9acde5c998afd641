"""The caller, by JSON web tokens of identity (design, section 13).

The algorithms are explicit. Issuer, audience and expiry are checked; `sub` is a UUID. Keys come
from a JWKS URL or a PEM. HS256 needs an explicit secret, which only development has.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import jwt
import structlog
from django.conf import settings
from django.http import HttpRequest

from pinactivity.core.error_info import describe_error
from pinactivity.core.errors import KeysUnavailable, Unauthorized
from pinactivity.core.ids import parse_id
from pinactivity.telemetry.metrics import TOKENS_REJECTED

ALGORITHMS = ["RS256", "ES256"]
_LEEWAY_SECONDS = 30
_REFRESH_SECONDS = 30.0
"""Between two requests for the keys. A token may name any key, and not each may cause a request."""
_RETRY_SECONDS = 3.0
"""The same after a request that identity did not answer."""
_LIFESPAN_SECONDS = 600.0
"""For how long a key is trusted before it is requested again: identity may have withdrawn it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Actor:
    """The caller that a valid token names."""

    user_id: UUID
    claims: Mapping[str, Any]


def required_actor(request: HttpRequest) -> Actor:
    """Read the caller from the bearer token.

    Raises:
        Unauthorized: there is no token, or it is not valid.
        KeysUnavailable: identity does not answer, so the token cannot be checked.
    """
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized
    return _verify(token.strip())


def optional_user(request: HttpRequest) -> UUID | None:
    """Read the user where a guest may call too.

    A caller whose token is not valid is a guest; the token is counted by its reason.
    """
    if "HTTP_AUTHORIZATION" not in request.META:
        return None
    try:
        return required_actor(request).user_id
    except (Unauthorized, KeysUnavailable) as exc:
        TOKENS_REJECTED.labels(exc.reason).inc()
        return None


def _verify(token: str) -> Actor:
    try:
        key, algorithms = _key_for(token)
        claims = jwt.decode(
            token,
            key,
            algorithms=algorithms,
            issuer=settings.JWT_ISSUER,
            audience=settings.JWT_AUDIENCE,
            leeway=_LEEWAY_SECONDS,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )
        _check_times(claims)
        return Actor(parse_id(claims["sub"]), claims)
    except jwt.ExpiredSignatureError as exc:
        raise Unauthorized("expired") from exc
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as exc:
        # PyJWT lets errors of its parsers through when a token is hostile.
        raise Unauthorized("invalid") from exc


def _check_times(claims: Mapping[str, Any]) -> None:
    """Hold the claims of time to numbers, and to a token's longest lifetime around now.

    PyJWT also reads digits in a text, and takes an expiry in milliseconds for the far future.

    Raises:
        jwt.InvalidTokenError: a claim is no number, or is too far from now.
    """
    farthest = settings.JWT_MAX_LIFETIME.total_seconds() + _LEEWAY_SECONDS
    for name in ("exp", "iat", "nbf"):
        seconds = claims.get(name, time.time())
        if type(seconds) not in (int, float) or not abs(seconds - time.time()) <= farthest:
            raise jwt.InvalidTokenError(f"{name} is no time of a token")


def _key_for(token: str) -> tuple[Any, list[str]]:
    if settings.JWT_DEVELOPMENT_SECRET:
        return settings.JWT_DEVELOPMENT_SECRET, ["HS256"]
    if settings.JWT_PUBLIC_KEY:
        return settings.JWT_PUBLIC_KEY, ALGORITHMS
    if settings.JWT_JWKS_URL:
        kid = jwt.get_unverified_header(token).get("kid")
        return _keys(settings.JWT_JWKS_URL).get(kid), ALGORITHMS
    raise Unauthorized("unconfigured")


class SigningKeys:
    """Identity's keys by `kid`, cached.

    They are requested again when a token names an unknown key, and when they are old; in both
    cases at most once in a while. PyJWKClient's own cache requests them for every unknown `kid`,
    so anybody could make each of our requests wait for identity. Known keys stay in use while
    identity does not answer.
    """

    def __init__(self, url: str) -> None:
        self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=3)
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._requested_at = self._answered_at = float("-inf")

    def get(self, kid: object) -> jwt.PyJWK:
        """Return the key.

        Raises:
            jwt.PyJWTError: identity has no such key.
            KeysUnavailable: the key is unknown, and identity does not answer.
        """
        if not isinstance(kid, str):
            raise jwt.InvalidTokenError("no kid")
        if self._must_refresh(kid):
            self._refresh(kid)
        key = self._keys.get(kid)
        if key is not None:
            return key
        if self._is_unanswered:
            raise KeysUnavailable
        raise jwt.InvalidTokenError("unknown kid")

    @property
    def _is_unanswered(self) -> bool:
        return self._answered_at < self._requested_at

    def _must_refresh(self, kid: str) -> bool:
        now = time.monotonic()
        if kid in self._keys:
            return (
                now - self._answered_at >= _LIFESPAN_SECONDS
                and now - self._requested_at >= _REFRESH_SECONDS
            )
        return now - self._requested_at >= (
            _RETRY_SECONDS if self._is_unanswered else _REFRESH_SECONDS
        )

    def _refresh(self, kid: str) -> None:
        # A token with a known key does not wait for the request of another thread.
        if not self._lock.acquire(blocking=kid not in self._keys):
            return
        try:
            if self._must_refresh(kid):
                self._fetch()
        finally:
            self._lock.release()

    def _fetch(self) -> None:
        try:
            keys = {key.key_id: key for key in self._client.get_signing_keys() if key.key_id}
        except Exception as exc:  # whatever identity, or what stands before it, may answer
            log.warning("signing keys unavailable", **describe_error(exc))
            self._requested_at = time.monotonic()
            return
        self._keys = keys
        self._answered_at = self._requested_at = time.monotonic()


@cache
def _keys(url: str) -> SigningKeys:
    return SigningKeys(url)
