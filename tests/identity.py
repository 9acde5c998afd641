"""Identity as tests need it: its key server, the tokens it signs, and calls that bring them."""

import hashlib
import hmac
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from django.test import Client
from prometheus_client import REGISTRY

from tests.api import LINK, OWN_SESSIONS, problem
from tests.factories import make_session
from tests.tokens import PrivateKey, bearer, claims, segment

USER = UUID("0190a0b0-0000-7000-8000-00000000000a")


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


def forge(payload: dict[str, Any], key: bytes, **header: Any) -> str:
    """Sign with HMAC by hand: PyJWT refuses a public key for a secret, an attacker does not."""
    times = {
        name: int(value.timestamp()) if isinstance(value, datetime) else value
        for name, value in payload.items()
    }
    signed = f"{segment({'alg': 'HS256', 'typ': 'JWT', **header})}.{segment(times)}"
    return f"{signed}.{segment(hmac.new(key, signed.encode(), hashlib.sha256).digest())}"


def at(**delta: float) -> datetime:
    return datetime.now(UTC) + timedelta(**delta)
