"""Tokens of identity (design, section 13): which are valid, and where the keys come from."""

import hashlib
import hmac
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from django.conf import settings as django_settings
from django.core.management import CommandError, call_command
from django.test import Client
from prometheus_client import REGISTRY

from pinactivity.core.ids import new_id
from pinactivity.http import auth
from sessions.models import Session
from tests.api import LINK, MARKER, NIL, OWN_SESSIONS, START, assert_unavailable, problem
from tests.concurrency import run_together
from tests.factories import make_session
from tests.tokens import SECRET, PrivateKey, bearer, claims, development_token, pem, segment

pytestmark = pytest.mark.django_db

USER = UUID("0190a0b0-0000-7000-8000-00000000000a")


@pytest.fixture(scope="session")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="session")
def other_rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="session")
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def jwk(key: PrivateKey, kid: str, **changes: Any) -> dict[str, Any]:
    """Write the public half of a key as a member of a JWKS."""
    algorithm: Any = (
        jwt.algorithms.RSAAlgorithm
        if isinstance(key, rsa.RSAPrivateKey)
        else jwt.algorithms.ECAlgorithm
    )
    public = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": kid, "use": "sig", **changes}


def sign(key: PrivateKey, kid: str | None = None, **changes: Any) -> str:
    """Sign a token for USER; `changes` as in `tests.tokens.claims`."""
    return jwt.encode(
        claims(changes.pop("user_id", USER), **changes),
        key,
        algorithm="RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256",
        headers=None if kid is None else {"kid": kid},
    )


class Identity:
    """Identity's key server on the loopback: publishes keys, and counts who asks."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Callable[[BaseHTTPRequestHandler], object] = self.publish()
        identity = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                identity.asked += 1
                identity.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def publish(self, *keys: dict[str, Any]) -> Callable[[BaseHTTPRequestHandler], object]:
        """Answer with a JWKS from now on."""
        self.answer = answering(json.dumps({"keys": keys}).encode())
        return self.answer

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def answering(body: bytes, status: int = 200, **headers: str) -> Callable[[Any], object]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def writing(raw: bytes) -> Callable[[Any], object]:
    """Answer with bytes that need not be HTTP at all, and hang up."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(raw)
        handler.close_connection = True

    return answer


@pytest.fixture
def identity(settings: Any) -> Iterator[Identity]:
    """A key server that the service is told of, and has asked nothing yet."""
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


@pytest.fixture
def secret(settings: Any) -> None:
    """Development: tokens are signed with the secret of the tests."""
    settings.JWT_DEVELOPMENT_SECRET = SECRET


def own_sessions(api: Client, token: str) -> Any:
    return api.get(OWN_SESSIONS, headers=bearer(token))


def link(api: Client, token: str | None) -> Any:
    anonymous_id = str(make_session().anonymous_id)
    headers = {} if token is None else bearer(token)
    return api.post(LINK, headers={"X-Anonymous-Id": anonymous_id, **headers})


def rejected(reason: str) -> float:
    """Return how many tokens were taken for a guest's for this reason."""
    name = "activity_tokens_rejected_total"
    return REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


def assert_unauthorized(response: Any) -> None:
    """Hold an answer to 401 with the challenge of a token that came and was not valid."""
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHORIZED")
    challenge = response.headers["WWW-Authenticate"]
    assert challenge == 'Bearer realm="pinactivity", error="invalid_token"'


# -- keys from a URL -----------------------------------------------------------------------


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


# -- a key from the environment ------------------------------------------------------------


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


def forge(payload: dict[str, Any], key: bytes, **header: Any) -> str:
    """Sign with HMAC by hand: PyJWT refuses a public key for a secret, an attacker does not."""
    times = {
        name: int(value.timestamp()) if isinstance(value, datetime) else value
        for name, value in payload.items()
    }
    signed = f"{segment({'alg': 'HS256', 'typ': 'JWT', **header})}.{segment(times)}"
    return f"{signed}.{segment(hmac.new(key, signed.encode(), hashlib.sha256).digest())}"


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


# -- the development secret ----------------------------------------------------------------


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


# -- claims --------------------------------------------------------------------------------


def at(**delta: float) -> datetime:
    return datetime.now(UTC) + timedelta(**delta)


WRONG_CLAIMS: dict[str, Callable[[], dict[str, Any]]] = {
    "another issuer": lambda: {"iss": "somebody-else"},
    "a part of the issuer": lambda: {"iss": "pin"},
    "a list of issuers": lambda: {"iss": [django_settings.JWT_ISSUER]},
    "no issuer": lambda: {"iss": None},
    "another audience": lambda: {"aud": "favorites"},
    "a part of the audience": lambda: {"aud": "pin"},
    "other audiences": lambda: {"aud": ["favorites", "crm"]},
    "no audience": lambda: {"aud": None},
    "an empty audience": lambda: {"aud": []},
    "an object for an audience": lambda: {"aud": {django_settings.JWT_AUDIENCE: 1}},
    "expired": lambda: {"exp": at(seconds=-60)},
    "expired long ago": lambda: {"exp": 0},
    "no expiry": lambda: {"exp": None},
    "an expiry that is text": lambda: {"exp": "tomorrow"},
    "an endless expiry": lambda: {"exp": float("inf")},
    "an expiry that is no number": lambda: {"exp": float("nan")},
    "not valid yet": lambda: {"nbf": at(minutes=5)},
    "issued in the future": lambda: {"iat": at(minutes=5)},
    "no subject": lambda: {"sub": None},
    "an empty subject": lambda: {"sub": ""},
    "a name": lambda: {"sub": "auth0|5f7c8ec7c33c6c004bbafe82"},
    "nil": lambda: {"sub": NIL},
    "almost an id": lambda: {"sub": f"{USER}0"},
    "blanks around": lambda: {"sub": f" {USER} "},
    "NUL": lambda: {"sub": f"{USER}\x00"},
    "a lone surrogate": lambda: {"sub": "\ud83d"},
    "100 KB": lambda: {"sub": "a" * 10_000},
}


@pytest.mark.parametrize("wrong", WRONG_CLAIMS.values(), ids=WRONG_CLAIMS.keys())
def test_token_with_wrong_claims_is_unauthorized(
    api: Client, secret: None, wrong: Callable[[], dict[str, Any]]
) -> None:
    payload = claims(USER, **wrong())
    assert_unauthorized(link(api, forge(payload, SECRET.encode())))
    assert Session.objects.get().user_id is None


@pytest.mark.parametrize("subject", [12, True, [str(USER)], {"id": str(USER)}, 1.5])
def test_subject_of_another_type_is_unauthorized(
    api: Client, secret: None, subject: object
) -> None:
    assert_unauthorized(own_sessions(api, forge(claims(USER, sub=subject), SECRET.encode())))


@pytest.mark.parametrize("payload", [[], "text", 1, None, True, [["iss", "pin-identity"]]])
def test_payload_that_is_no_object_is_unauthorized(
    api: Client, secret: None, payload: object
) -> None:
    signed = f"{segment({'alg': 'HS256'})}.{segment(payload)}"
    signature = hmac.new(SECRET.encode(), signed.encode(), hashlib.sha256).digest()
    assert_unauthorized(own_sessions(api, f"{signed}.{segment(signature)}"))


@pytest.mark.parametrize(
    "change",
    [
        {"aud": ["favorites", "pinactivity"]},
        {"exp": 4_102_444_800},
        {"sub": str(USER).upper()},
        {"sub": f"{{{USER}}}"},
        {"sub": USER.hex},
        {"iat": None},
        {"roles": ["investor"], "name": "Ж" * 100},
    ],
)
def test_sound_variants_of_the_claims_name_the_user(
    api: Client, secret: None, change: dict[str, Any]
) -> None:
    assert link(api, development_token(USER, **change)).status_code == 200
    assert Session.objects.get().user_id == USER


def test_clock_of_identity_may_be_a_little_off(api: Client, secret: None) -> None:
    for change in ({"exp": at(seconds=-10)}, {"iat": at(seconds=10)}, {"nbf": at(seconds=10)}):
        assert own_sessions(api, development_token(USER, **change)).status_code == 200


# -- spellings of the header ---------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {}", "  Bearer {}  "],
)
def test_scheme_is_read_in_any_case_and_with_blanks_around(
    api: Client, secret: None, spelling: str
) -> None:
    header = spelling.format(development_token(USER))
    assert api.get(OWN_SESSIONS, headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("header", [None, "", " ", "Bearer", "Bearer ", "Bearer   "])
def test_call_without_a_token_is_told_to_bring_one(
    api: Client, secret: None, header: str | None
) -> None:
    response = api.get(OWN_SESSIONS, headers={} if header is None else {"Authorization": header})
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHORIZED")
    assert response.headers["WWW-Authenticate"] == 'Bearer realm="pinactivity"'


@pytest.mark.parametrize("spelling", ["Basic {}", "Token {}", "{}", "Bearer{}", "Bearer:{}"])
def test_other_scheme_is_unauthorized(api: Client, secret: None, spelling: str) -> None:
    header = spelling.format(development_token(USER))
    assert api.get(OWN_SESSIONS, headers={"Authorization": header}).status_code == 401


def strange_tokens() -> dict[str, str]:
    good = development_token(USER)
    header, payload, signature = good.split(".")
    opening, digits = b'{"a":' * 100_000, b'{"alg":' + b"9" * 10_000 + b"}"
    return {
        "two parts": f"{header}.{payload}",
        "four parts": f"{good}.{signature}",
        "no parts": "abc",
        "dots": "..",
        "padding": f"{header}.{payload}.{signature}==",
        "a changed payload": f"{header}.{segment({'sub': str(USER)})}.{signature}",
        "half a signature": f"{header}.{payload}.{signature[:20]}",
        "twice": f"{good}, {good}",
        "with a comma": f"{good},",
        "a megabyte": "a" * 1_000_000,
        "a megabyte in three parts": f"{'a' * 1_000_000}.{'b' * 10}.{'c' * 10}",
        "a header of a megabyte": f"{segment({'alg': 'HS256', 'x': 'y' * 700_000})}.e30.AA",
        "a deep header": f"{segment(b'[' * 100_000)}.e30.AA",
        "a deep header that opens": f"{segment(opening)}.e30.AA",
        "a header that is no object": f"{segment([1])}.{payload}.{signature}",
        "a header that is no JSON": f"{segment(b'x')}.{payload}.{signature}",
        "a header in UTF-16": f"{segment('{}'.encode('utf-16'))}.{payload}.{signature}",
        "no algorithm": f"{segment({'typ': 'JWT'})}.{payload}.{signature}",
        "a critical extension": f"{segment({'alg': 'HS256', 'crit': ['x']})}.{payload}.{signature}",
        "b64 false": f"{segment({'alg': 'HS256', 'b64': False})}.{payload}.{signature}",
        "a huge number": f"{segment(digits)}.e30.AA",
        "Latin-1": "Bearer-ÿ.é.è",
        "UTF-8 read as Latin-1": "😀.ж.ж".encode().decode("latin-1"),
        "NUL": f"{header}.{payload}.\x00",
        "every byte": "".join(map(chr, range(33, 256))),
        "a format string": "%s.%n.{0}",
    }


@pytest.mark.parametrize("source", ["PEM", "URL", "secret", "none"])
def test_strange_token_is_unauthorized_and_nobody_fails(
    api: Client, settings: Any, identity: Identity, rsa_key: rsa.RSAPrivateKey, source: str
) -> None:
    identity.publish(jwk(rsa_key, "first"))
    tokens = strange_tokens() if source != "none" else {"a": "a.b.c"}
    settings.JWT_JWKS_URL = identity.url if source == "URL" else ""
    settings.JWT_PUBLIC_KEY = pem(rsa_key) if source == "PEM" else ""
    settings.JWT_DEVELOPMENT_SECRET = SECRET if source == "secret" else ""
    answers = {name: own_sessions(api, token).status_code for name, token in tokens.items()}
    assert answers == dict.fromkeys(tokens, 401)


def test_strange_token_is_not_quoted(api: Client, secret: None) -> None:
    response = own_sessions(api, f"{MARKER}.{MARKER}.{MARKER}")
    assert MARKER not in response.content.decode()
    assert MARKER not in str(response.headers)


@pytest.mark.parametrize(
    ("reason", "token"),
    [
        ("invalid", lambda: "a.b.c"),
        ("expired", lambda: development_token(USER, exp=at(seconds=-60))),
        ("absent", lambda: " "),
    ],
)
def test_start_takes_a_token_that_is_not_valid_for_a_guests_and_counts_why(
    api: Client, secret: None, reason: str, token: Callable[[], str]
) -> None:
    before = rejected(reason)
    response = api.post(START, headers=bearer(token()))
    assert (response.status_code, Session.objects.get().user_id) == (201, None)
    assert rejected(reason) == before + 1


def test_start_without_a_token_counts_none(api: Client, secret: None) -> None:
    before = [rejected(reason) for reason in ("absent", "invalid", "expired", "unconfigured")]
    assert api.post(START).status_code == 201
    assert before == [
        rejected(reason) for reason in ("absent", "invalid", "expired", "unconfigured")
    ]


# -- the environment -----------------------------------------------------------------------


def settings_faults(**variables: str) -> str:
    """Read the settings in a process of its own; return what it says when it refuses, or ""."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JWT_")}
    production = {
        "PINACTIVITY_DEVELOPMENT": "false",
        "SECRET_KEY": "0123456789" * 6,
        "ALLOWED_HOSTS": "api.example",
        "JWT_ISSUER": "pin-identity",
        "JWT_AUDIENCE": "pinactivity",
    }
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import pinactivity.settings"],
        cwd=django_settings.BASE_DIR,
        env={**kept, **production, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode == 0) == (found.stderr == "")
    return found.stderr


URL = "https://identity.example/keys"


@pytest.mark.parametrize(
    "variables",
    [
        {"JWT_JWKS_URL": URL},
        {"JWT_PUBLIC_KEY": "a key"},
        {"PINACTIVITY_DEVELOPMENT": "true"},
        {"PINACTIVITY_DEVELOPMENT": "true", "JWT_DEVELOPMENT_SECRET": SECRET},
        {"PINACTIVITY_DEVELOPMENT": "true", "JWT_JWKS_URL": "http://127.0.0.1:1/keys"},
    ],
)
def test_one_source_of_keys_is_sound(variables: dict[str, str]) -> None:
    assert settings_faults(**variables) == ""


@pytest.mark.parametrize(
    ("named", "variables"),
    [
        ("JWT_JWKS_URL", {}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": URL, "JWT_PUBLIC_KEY": "a key"}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": "http://identity.example/keys"}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": "file:///etc/passwd"}),
        ("JWT_DEVELOPMENT_SECRET", {"JWT_DEVELOPMENT_SECRET": SECRET}),
        ("JWT_DEVELOPMENT_SECRET", {"JWT_DEVELOPMENT_SECRET": SECRET, "JWT_JWKS_URL": URL}),
        (
            "JWT_DEVELOPMENT_SECRET",
            {"JWT_DEVELOPMENT_SECRET": "short", "PINACTIVITY_DEVELOPMENT": "true"},
        ),
        (
            "JWT_JWKS_URL",
            {
                "JWT_DEVELOPMENT_SECRET": SECRET,
                "PINACTIVITY_DEVELOPMENT": "true",
                "JWT_PUBLIC_KEY": "a key",
            },
        ),
    ],
    ids=[
        "no source",
        "two sources",
        "keys without TLS",
        "keys of a file",
        "a secret in production",
        "a secret beside a URL in production",
        "a short secret",
        "a secret beside a key",
    ],
)
def test_unsound_sources_of_keys_refuse_the_start_and_are_named(
    named: str, variables: dict[str, str]
) -> None:
    told = settings_faults(**variables)
    assert "The environment is not valid:" in told
    assert f"  {named}: " in told
    assert SECRET not in told


# -- tokens for development ----------------------------------------------------------------


def issue(*arguments: str) -> str:
    output = io.StringIO()
    call_command("issue_dev_token", *arguments, stdout=output)
    return output.getvalue().strip()


def test_issued_token_is_valid_and_carries_its_claims(api: Client, secret: None) -> None:
    developer = new_id()
    token = issue(str(USER).upper(), "--developer-id", str(developer), "--minutes", "5")

    assert link(api, token).status_code == 200
    assert Session.objects.get().user_id == USER
    payload = jwt.decode(token, options={"verify_signature": False})
    assert payload["developer_id"] == str(developer)
    assert payload["exp"] - payload["iat"] == 300


@pytest.mark.parametrize("minutes", ["0", "-5", "99999999999", "x"])
def test_lifetime_that_is_no_date_is_refused(secret: None, minutes: str) -> None:
    with pytest.raises(CommandError, match="--minutes"):
        issue(str(USER), "--minutes", minutes)


@pytest.mark.parametrize("user_id", ["", "somebody", NIL])
def test_token_for_nobody_is_not_issued(secret: None, user_id: str) -> None:
    with pytest.raises(CommandError, match="not valid"):
        issue(user_id)


@pytest.mark.parametrize(("development", "key"), [(False, SECRET), (True, ""), (False, "")])
def test_token_is_not_issued_outside_development_or_without_the_secret(
    settings: Any, development: bool, key: str
) -> None:
    settings.DEVELOPMENT, settings.JWT_DEVELOPMENT_SECRET = development, key
    with pytest.raises(CommandError, match="JWT_DEVELOPMENT_SECRET"):
        issue(str(USER))
