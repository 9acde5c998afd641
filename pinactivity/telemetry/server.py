"""/metrics and /healthz of a Celery process or a consumer.

/healthz reports progress, which a process that merely exists may not make.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client

Report = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns whether the process is healthy, and the report that is answered as JSON."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


def start_serving(report: Report, *, host: str, port: int) -> Callable[[], None] | None:
    """Serve /metrics and /healthz from a thread; port 0 serves nothing.

    Returns:
        A function that ends the serving, or None for port 0.

    Raises:
        OSError: the port is not free.
    """
    if not port:
        return None
    metrics: Any = prometheus_client.make_wsgi_app()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            lines: Iterable[bytes] = metrics(environ, start_response)
            return lines
        if environ["PATH_INFO"] == "/healthz":
            alive, body = report()
            return _json(start_response, "200 OK" if alive else "503 Service Unavailable", body)
        return _json(start_response, "404 Not Found", {"Status": "not found"})

    server = make_server(host, port, answer, server_class=_Server, handler_class=_Quiet)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


@contextmanager
def serving(report: Report, *, host: str, port: int) -> Iterator[None]:
    """Serve while the block runs; arguments and errors as in `start_serving`."""
    stop = start_serving(report, host=host, port=port)
    try:
        yield
    finally:
        if stop:
            stop()


def _json(start_response: Any, status: str, body: dict[str, Any]) -> Sequence[bytes]:
    start_response(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
    return [json.dumps(body).encode()]
