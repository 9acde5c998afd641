"""Who calls: JSON web tokens of identity (design, section 13).

Explicit algorithms; issuer, audience and expiry checked; `sub` is a UUID. Keys come from a JWKS
URL or a PEM; HS256 only from an explicit secret in development.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import jwt
from django.conf import settings
from django.http import HttpRequest

from pinactivity.errors import KeysUnavailable, Unauthorized
from pinactivity.ids import parse_id
from pinactivity.metrics import TOKENS_REJECTED

ALGORITHMS = ("RS256", "ES256")
_LEEWAY_SECONDS = 30
_REFRESH_SECONDS = 30.0
"""A token may name any key: how often one that is not known makes us ask identity."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who a valid token says calls."""

    user_id: UUID
    claims: Mapping[str, Any]


def required_actor(request: HttpRequest) -> Actor:
    """Read the caller from the bearer token.

    Raises:
        Unauthorized: no token, or not a valid one.
        KeysUnavailable: identity's keys cannot be had now.
    """
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized
    return _verify(token.strip())


def optional_user(request: HttpRequest) -> UUID | None:
    """Read the user where a guest may call too: a token that is not valid means a guest.

    Such tokens are counted, by reason, not answered with an error.
    """
    if "Authorization" not in request.headers:
        return None
    try:
        return required_actor(request).user_id
    except (Unauthorized, KeysUnavailable) as fault:
        TOKENS_REJECTED.labels(fault.reason).inc()
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
        return Actor(parse_id(claims["sub"]), claims)
    except jwt.ExpiredSignatureError as fault:
        raise Unauthorized("expired") from fault
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as fault:
        # Beyond PyJWT's own errors: what its parsers let through of a hostile token.
        raise Unauthorized("invalid") from fault


def _key_for(token: str) -> tuple[Any, list[str]]:
    if settings.JWT_DEVELOPMENT_SECRET:
        return settings.JWT_DEVELOPMENT_SECRET, ["HS256"]
    if settings.JWT_PUBLIC_KEY:
        return settings.JWT_PUBLIC_KEY, list(ALGORITHMS)
    if settings.JWT_JWKS_URL:
        return _keys(settings.JWT_JWKS_URL).get(jwt.get_unverified_header(token).get("kid")), list(
            ALGORITHMS
        )
    raise Unauthorized("unconfigured")


class SigningKeys:
    """Identity's keys by `kid`, kept, and asked for again when a token names another.

    Not PyJWKClient's own look-up: that one asks the network for every unknown `kid`, so anybody
    could make every request wait for it.
    """

    def __init__(self, url: str) -> None:
        self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=3)
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._asked_at = float("-inf")

    def get(self, kid: object) -> jwt.PyJWK:
        """Return the key.

        Raises:
            jwt.PyJWTError: identity has no such key.
            KeysUnavailable: identity does not answer, and no key is known yet.
        """
        if not isinstance(kid, str):
            raise jwt.InvalidTokenError("no kid")
        if kid not in self._keys:
            self._refresh(kid)
        if kid not in self._keys:
            if not self._keys:
                raise KeysUnavailable
            raise jwt.InvalidTokenError("unknown kid")
        return self._keys[kid]

    def _refresh(self, kid: str) -> None:
        with self._lock:
            if kid in self._keys or time.monotonic() - self._asked_at < _REFRESH_SECONDS:
                return
            try:
                keys = self._client.get_signing_keys()
            except jwt.PyJWTError:
                # Wait a little before the next try, less than after an answer.
                self._asked_at = time.monotonic() - _REFRESH_SECONDS + 3
                return
            self._asked_at = time.monotonic()
            self._keys = {key.key_id: key for key in keys if key.key_id}


@cache
def _keys(url: str) -> SigningKeys:
    return SigningKeys(url)
