"""Tokens as identity issues them, or as somebody else would like them to be."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from django.conf import settings

SECRET = "for-tests-only-0123456789-abcdefghijklmnopqrstuvwxyz"
"""The development secret of tests that need no key pair."""

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def claims(user_id: UUID | str, **changes: Any) -> dict[str, Any]:
    """Return the claims of a valid token; a change to None leaves its claim out."""
    now = datetime.now(UTC)
    sound = {
        "iss": settings.JWT_ISSUER,
        "aud": settings.JWT_AUDIENCE,
        "sub": str(user_id),
        "iat": now,
        "exp": now + timedelta(hours=1),
    }
    return {name: value for name, value in (sound | changes).items() if value is not None}


def development_token(user_id: UUID | str, **changes: Any) -> str:
    """Sign a token with the development secret."""
    return jwt.encode(claims(user_id, **changes), SECRET, algorithm="HS256")


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries a token."""
    return {"Authorization": f"Bearer {token}"}


def segment(document: object) -> str:
    """Encode one part of a token, or of a key, whatever it is."""
    if not isinstance(document, bytes):
        document = json.dumps(document).encode()
    return base64.urlsafe_b64encode(document).rstrip(b"=").decode()


def pem(key: PrivateKey) -> str:
    """Write the public half of a key as identity's operators do."""
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )
