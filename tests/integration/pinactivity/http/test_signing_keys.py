"""Signing keys that identity publishes (design, section 13): found, kept, withdrawn."""

import hashlib
import hmac
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from django.test import Client

from pinactivity.http import auth
from sessions.models import Session
from tests.api import START, assert_unavailable
from tests.concurrency import run_together
from tests.identity import (
    USER,
    Identity,
    answering,
    assert_unauthorized,
    jwk,
    link,
    own_sessions,
    rejected,
    sign,
    writing,
)
from tests.tokens import bearer, claims, segment

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("kind", ["rsa_key", "ec_key"])
def test_token_of_a_published_key_names_the_user(
    api: Client, identity: Identity, request: pytest.FixtureRequest, kind: str
) -> None:
    key = request.getfixturevalue(kind)
    identity.publish(jwk(key, "first"))

    response = link(api, sign(key, "first"))

    assert (response.status_code, response.json()["Outcome"]) == (200, "Linked")
    assert Session.objects.get().user_id == USER


def test_keys_are_asked_for_once_for_many_requests(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey, ec_key: ec.EllipticCurvePrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "a"), jwk(ec_key, "b"))
    for _ in range(3):
        assert own_sessions(api, sign(rsa_key, "a")).status_code == 200
        assert own_sessions(api, sign(ec_key, "b")).status_code == 200
    assert identity.asked == 1


def test_key_published_later_is_found(
    api: Client,
    identity: Identity,
    impatient: None,
    rsa_key: rsa.RSAPrivateKey,
    other_rsa_key: rsa.RSAPrivateKey,
) -> None:
    identity.publish(jwk(rsa_key, "old"))
    assert own_sessions(api, sign(rsa_key, "old")).status_code == 200

    identity.publish(jwk(rsa_key, "old"), jwk(other_rsa_key, "new"))

    assert own_sessions(api, sign(other_rsa_key, "new")).status_code == 200
    assert own_sessions(api, sign(rsa_key, "old")).status_code == 200
    assert identity.asked == 2


def test_unknown_kids_do_not_make_every_request_ask_again(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    for number in range(20):
        assert_unauthorized(own_sessions(api, sign(rsa_key, f"unknown-{number}")))
    assert identity.asked == 1
    assert own_sessions(api, sign(rsa_key, "first")).status_code == 200


def test_20_parallel_first_tokens_ask_once(identity: Identity, rsa_key: rsa.RSAPrivateKey) -> None:
    identity.publish(jwk(rsa_key, "first"))
    keys = auth.SigningKeys(identity.url)
    found = run_together([lambda: keys.get("first")] * 20)
    assert {key.key_id for key in found} == {"first"}
    assert identity.asked == 1


def test_key_that_identity_has_withdrawn_is_refused_after_its_time(
    api: Client,
    identity: Identity,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    rsa_key: rsa.RSAPrivateKey,
    other_rsa_key: rsa.RSAPrivateKey,
) -> None:
    identity.publish(jwk(rsa_key, "stolen"), jwk(other_rsa_key, "kept"))
    assert own_sessions(api, sign(rsa_key, "stolen")).status_code == 200
    identity.publish(jwk(other_rsa_key, "kept"))
    assert own_sessions(api, sign(rsa_key, "stolen")).status_code == 200

    monkeypatch.setattr(auth, "_LIFESPAN_SECONDS", 0.0)

    assert_unauthorized(own_sessions(api, sign(rsa_key, "stolen")))
    assert own_sessions(api, sign(other_rsa_key, "kept")).status_code == 200


def test_known_key_outlives_an_identity_that_does_not_answer(
    api: Client,
    identity: Identity,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    rsa_key: rsa.RSAPrivateKey,
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    assert own_sessions(api, sign(rsa_key, "first")).status_code == 200
    identity.answer = answering(b"", 500)
    monkeypatch.setattr(auth, "_LIFESPAN_SECONDS", 0.0)

    assert own_sessions(api, sign(rsa_key, "first")).status_code == 200
    assert identity.asked == 2


def test_known_key_does_not_wait_while_another_request_asks(
    identity: Identity, monkeypatch: pytest.MonkeyPatch, rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    keys = auth.SigningKeys(identity.url)
    keys.get("first")
    published = identity.answer
    asked, answered = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        assert answered.wait(30)
        published(handler)

    identity.answer = hang
    monkeypatch.setattr(auth, "_LIFESPAN_SECONDS", 0.0)
    monkeypatch.setattr(auth, "_REFRESH_SECONDS", 0.0)
    asking = threading.Thread(target=lambda: keys.get("first"))
    asking.start()
    try:
        assert asked.wait(30)
        assert keys.get("first").key_id == "first"
    finally:
        answered.set()
        asking.join()
    assert identity.asked == 2


SILENCES: dict[str, Callable[[Any], object]] = {
    "500": answering(b"{}", 500),
    "404": answering(b"{}", 404),
    "a redirect": answering(b"", 302, Location="http://127.0.0.1:1/"),
    "a page": answering(b"<html>maintenance</html>"),
    "nothing": answering(b""),
    "not UTF-8": answering(b"\xff\xfe\xfd"),
    "another shape": answering(b"[]"),
    "no list": answering(b'{"keys": 1}'),
    "no keys": answering(b'{"keys": []}'),
    "keys that are none": answering(b'{"keys": [1, null, {}, {"kty": "RSA", "kid": "first"}]}'),
    "a kid that is none": answering(b'{"keys": [{"kty": "oct", "kid": ["first"], "k": "AAAA"}]}'),
    "deep nesting": answering(b"[" * 100_000),
    "no HTTP": writing(b"SSH-2.0-OpenSSH\r\n"),
    "a hang-up": writing(b""),
    "half a body": writing(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
}


@pytest.mark.parametrize("silence", SILENCES.values(), ids=SILENCES.keys())
def test_link_answers_503_while_identity_has_no_keys_to_give(
    api: Client,
    identity: Identity,
    impatient: None,
    rsa_key: rsa.RSAPrivateKey,
    silence: Callable[[Any], object],
) -> None:
    identity.answer = silence
    assert_unavailable(link(api, sign(rsa_key, "first")))

    identity.publish(jwk(rsa_key, "first"))
    assert link(api, sign(rsa_key, "first")).status_code == 200


@pytest.mark.parametrize("silence", SILENCES.values(), ids=SILENCES.keys())
def test_identity_that_fails_is_not_asked_by_every_request(
    api: Client,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
    rsa_key: rsa.RSAPrivateKey,
    silence: Callable[[Any], object],
) -> None:
    monkeypatch.setattr(auth, "_RETRY_SECONDS", 60.0)
    identity.answer = silence
    for number in range(5):
        assert_unavailable(own_sessions(api, sign(rsa_key, f"kid-{number}")))
    assert identity.asked == 1


def test_link_answers_503_while_nobody_listens_where_identity_was(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.close()
    assert_unavailable(link(api, sign(rsa_key, "first")))
    assert Session.objects.get().user_id is None


def test_link_answers_503_while_identity_hangs(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    answered = threading.Event()
    identity.answer = lambda _: answered.wait(60)
    auth._keys(identity.url)._client.timeout = 0.2
    try:
        assert_unavailable(link(api, sign(rsa_key, "first")))
    finally:
        answered.set()


def test_start_takes_the_caller_for_a_guest_while_identity_is_down_and_counts_it(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.close()
    before = rejected("keys_unavailable")

    response = api.post(START, headers=bearer(sign(rsa_key, "first")))

    assert response.status_code == 201
    assert Session.objects.get().user_id is None
    assert rejected("keys_unavailable") == before + 1


def test_new_key_is_not_called_invalid_while_identity_does_not_answer(
    api: Client,
    identity: Identity,
    impatient: None,
    rsa_key: rsa.RSAPrivateKey,
    other_rsa_key: rsa.RSAPrivateKey,
) -> None:
    """A 401 would make the front end sign its user in again."""
    identity.publish(jwk(rsa_key, "old"))
    assert own_sessions(api, sign(rsa_key, "old")).status_code == 200
    identity.answer = answering(b"", 500)

    assert_unavailable(own_sessions(api, sign(other_rsa_key, "new")))
    assert own_sessions(api, sign(rsa_key, "old")).status_code == 200


def test_token_without_a_kid_is_unauthorized_and_asks_nobody(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    assert_unauthorized(own_sessions(api, sign(rsa_key)))
    kids: list[Any] = [None, 1, ["first"], {}, ""]
    for kid in kids:
        header = {"alg": "RS256", "typ": "JWT", "kid": kid}
        assert own_sessions(api, f"{segment(header)}.{segment({})}.AA").status_code == 401
    assert identity.asked <= 1  # the empty one is a kid, if nobody's


def test_key_of_another_kid_does_not_verify(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey, other_rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "a"), jwk(other_rsa_key, "b"))
    assert_unauthorized(own_sessions(api, sign(rsa_key, "b")))


def test_shared_secret_among_the_published_keys_verifies_nothing(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    shared = b"published-by-mistake-0123456789abcdef"
    identity.publish(jwk(rsa_key, "first"), {"kty": "oct", "kid": "shared", "k": segment(shared)})
    signed = jwt.encode(claims(USER), shared, algorithm="HS256", headers={"kid": "shared"})
    _, payload, _ = signed.split(".")
    relabelled = segment({"alg": "RS256", "kid": "shared"})
    forged = hmac.new(shared, f"{relabelled}.{payload}".encode(), hashlib.sha256).digest()

    assert_unauthorized(own_sessions(api, signed))
    assert_unauthorized(own_sessions(api, f"{relabelled}.{payload}.{segment(forged)}"))


def test_key_for_encryption_verifies_nothing(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey, other_rsa_key: rsa.RSAPrivateKey
) -> None:
    identity.publish(jwk(rsa_key, "first"), jwk(other_rsa_key, "secrets", use="enc"))
    assert_unauthorized(own_sessions(api, sign(other_rsa_key, "secrets")))


def test_key_of_another_curve_verifies_nothing(
    api: Client, identity: Identity, rsa_key: rsa.RSAPrivateKey
) -> None:
    curve = ec.generate_private_key(ec.SECP384R1())
    identity.publish(jwk(rsa_key, "first"), jwk(curve, "long"))
    for algorithm in ("ES384", "RS256", "ES256"):
        token = jwt.encode(claims(USER), curve, algorithm="ES384", headers={"kid": "long"})
        header = segment({"alg": algorithm, "kid": "long"})
        assert_unauthorized(own_sessions(api, ".".join([header, *token.split(".")[1:]])))
