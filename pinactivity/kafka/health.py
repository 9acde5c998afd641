"""/metrics and /healthz of a process that consumes: health is progress, not a pid."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client

STUCK_AFTER = timedelta(minutes=2)
"""Longer than any call that a handler bounds: one that takes longer will not come back."""


class Progress(Protocol):
    """What a consumer tells of itself."""

    @property
    def silent_seconds(self) -> float: ...
    @property
    def waits_for(self) -> str | None: ...


def report(consumers: Mapping[str, Progress]) -> tuple[bool, dict[str, Any]]:
    """Tell how consumers do.

    Returns:
        Whether all get on, and the report. A consumer that waits for its storage to come back
        is alive: it is reported, and a restart would not help it.
    """
    bound = STUCK_AFTER.total_seconds()
    parts = {
        name: {
            "Status": _status(consumer, bound),
            "WaitsFor": consumer.waits_for,
            "SilentSeconds": round(consumer.silent_seconds, 1),
        }
        for name, consumer in consumers.items()
    }
    alive = all(part["Status"] != "stuck" for part in parts.values())
    return alive, {"Status": "live" if alive else "stuck", "Consumers": parts}


def _status(consumer: Progress, bound: float) -> str:
    if consumer.silent_seconds > bound:
        return "stuck"
    return "waiting" if consumer.waits_for else "working"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


@contextmanager
def serving(consumers: Mapping[str, Progress], *, host: str, port: int) -> Iterator[None]:
    """Answer /metrics and /healthz on a port while the block runs; port 0 answers nothing.

    Raises:
        OSError: the port is not free.
    """
    if not port:
        yield
        return
    metrics: Any = prometheus_client.make_wsgi_app()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            lines: Iterable[bytes] = metrics(environ, start_response)
            return lines
        if environ["PATH_INFO"] == "/healthz":
            alive, body = report(consumers)
            return _json(start_response, "200 OK" if alive else "503 Service Unavailable", body)
        return _json(start_response, "404 Not Found", {"Status": "not found"})

    server = make_server(host, port, answer, server_class=_Server, handler_class=_Quiet)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _json(start_response: Any, status: str, body: dict[str, Any]) -> Sequence[bytes]:
    start_response(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
    return [json.dumps(body).encode()]
