"""Keys and key servers."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from pinactivity.http import auth
from tests.identity import Identity


@pytest.fixture(scope="session")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="session")
def other_rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="session")
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def identity(settings: Any) -> Iterator[Identity]:
    """A key server that the service is configured with and has not asked yet."""
    auth._keys.cache_clear()
    with closing(Identity()) as server:
        settings.JWT_JWKS_URL = server.url
        yield server
    auth._keys.cache_clear()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two questions to identity is over at once."""
    monkeypatch.setattr(auth, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(auth, "_RETRY_SECONDS", 0.0)
