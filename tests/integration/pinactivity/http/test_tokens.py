"""Tokens (design, section 13): claims, spellings of the header, and what is no token."""

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings as django_settings
from django.test import Client

from sessions.models import Session
from tests.api import MARKER, NIL, OWN_SESSIONS, START, problem
from tests.identity import (
    USER,
    Identity,
    assert_unauthorized,
    at,
    forge,
    jwk,
    link,
    own_sessions,
    rejected,
)
from tests.tokens import SECRET, bearer, claims, development_token, pem, segment

pytestmark = pytest.mark.django_db


def now_seconds() -> int:
    return int(time.time())


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
    "an expiry in milliseconds": lambda: {"exp": now_seconds() * 1_000},
    "an expiry in microseconds": lambda: {"exp": now_seconds() * 1_000_000},
    "the year 9999": lambda: {"exp": 253_402_300_799},
    "beyond any year": lambda: {"exp": 10**300},
    "two days": lambda: {"exp": at(hours=48)},
    "digits in a text": lambda: {"exp": str(now_seconds() + 3600)},
    "true": lambda: {"exp": True},
    "issued in milliseconds": lambda: {"iat": now_seconds() * 1_000},
    "issued two days ago": lambda: {"iat": at(hours=-48)},
    "issued when, as text": lambda: {"iat": str(now_seconds())},
    "valid since 1970": lambda: {"nbf": 0},
    "valid since a text": lambda: {"nbf": str(now_seconds())},
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
        {"exp": 1.5 + int(time.time()) + 3600},
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
def test_call_without_a_token_is_asked_for_one(
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
