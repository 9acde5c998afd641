"""A key from the environment, and the development secret (design, section 13)."""

import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from django.test import Client

from sessions.models import Session
from tests.identity import USER, Identity, assert_unauthorized, forge, jwk, link, own_sessions, sign
from tests.tokens import SECRET, claims, development_token, pem, segment

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("kind", ["rsa_key", "ec_key"])
def test_token_of_the_pem_key_names_the_user(
    api: Client, settings: Any, request: pytest.FixtureRequest, kind: str
) -> None:
    key = request.getfixturevalue(kind)
    settings.JWT_PUBLIC_KEY = pem(key)

    assert link(api, sign(key)).json()["Outcome"] == "Linked"
    assert Session.objects.get().user_id == USER
    assert link(api, sign(key, "any kid")).status_code == 200


def test_token_of_another_key_than_the_pem_is_unauthorized(
    api: Client,
    settings: Any,
    rsa_key: rsa.RSAPrivateKey,
    other_rsa_key: rsa.RSAPrivateKey,
    ec_key: ec.EllipticCurvePrivateKey,
) -> None:
    settings.JWT_PUBLIC_KEY = pem(rsa_key)
    assert_unauthorized(own_sessions(api, sign(other_rsa_key)))
    assert_unauthorized(own_sessions(api, sign(ec_key)))


@pytest.mark.parametrize("algorithm", ["RS512", "PS256"])
def test_algorithm_that_is_not_named_is_unauthorized_even_with_the_right_key(
    api: Client, settings: Any, rsa_key: rsa.RSAPrivateKey, algorithm: str
) -> None:
    settings.JWT_PUBLIC_KEY = pem(rsa_key)
    assert_unauthorized(own_sessions(api, jwt.encode(claims(USER), rsa_key, algorithm=algorithm)))


@pytest.mark.parametrize("source", ["PEM", "URL"])
def test_public_key_used_as_a_shared_secret_is_unauthorized(
    api: Client, settings: Any, identity: Identity, rsa_key: rsa.RSAPrivateKey, source: str
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    if source == "PEM":
        settings.JWT_JWKS_URL, settings.JWT_PUBLIC_KEY = "", pem(rsa_key)
    written = pem(rsa_key)
    for key in (written, written.strip(), json.dumps(jwk(rsa_key, "first"))):
        assert_unauthorized(own_sessions(api, forge(claims(USER), key.encode(), kid="first")))


@pytest.mark.parametrize("source", ["PEM", "URL", "secret"])
@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", "", None, 1, ["none"]])
def test_unsigned_token_is_unauthorized(
    api: Client,
    settings: Any,
    identity: Identity,
    rsa_key: rsa.RSAPrivateKey,
    source: str,
    alg: object,
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    if source != "URL":
        settings.JWT_JWKS_URL = ""
    if source == "PEM":
        settings.JWT_PUBLIC_KEY = pem(rsa_key)
    if source == "secret":
        settings.JWT_DEVELOPMENT_SECRET = SECRET
    forged = forge(claims(USER), b"", alg=alg, kid="first").rpartition(".")[0]
    for signature in ("", segment(b"x")):
        assert_unauthorized(own_sessions(api, f"{forged}.{signature}"))


def test_token_of_the_development_secret_names_the_user(api: Client, secret: None) -> None:
    assert link(api, development_token(USER)).json()["Outcome"] == "Linked"
    assert Session.objects.get().user_id == USER


@pytest.mark.parametrize("algorithm", ["HS384", "HS512"])
def test_other_algorithm_with_the_development_secret_is_unauthorized(
    api: Client, secret: None, algorithm: str
) -> None:
    assert_unauthorized(own_sessions(api, jwt.encode(claims(USER), SECRET * 2, algorithm)))
    assert_unauthorized(own_sessions(api, jwt.encode(claims(USER), SECRET * 2, "HS256")))


def test_token_of_a_shared_secret_is_unauthorized_where_none_is_set(
    api: Client, settings: Any
) -> None:
    assert settings.JWT_DEVELOPMENT_SECRET == ""
    for key in (SECRET.encode(), b"", settings.SECRET_KEY.encode()):
        assert_unauthorized(own_sessions(api, forge(claims(USER), key)))
