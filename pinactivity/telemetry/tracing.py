"""Correlation and trace context, from a request, a run or a message to the events it makes.

Spans are OpenTelemetry's. Without an endpoint nothing is sampled or sent; trace ids are still
made, so that every event has a `traceparent` (design, section 8).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

import structlog
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pinactivity.core.ids import new_id, parse_id

_correlation_id: ContextVar[UUID | None] = ContextVar("correlation_id", default=None)
_propagator = TraceContextTextMapPropagator()
tracer = trace.get_tracer("pinactivity")
_spans_are_sent = False


def configure(endpoint: str) -> None:
    """Set up spans for this process.

    Args:
        endpoint: URL that spans are sent to by OTLP over HTTP; empty sends none.
    """
    global _spans_are_sent  # noqa: PLW0603 - one configuration a process, as OpenTelemetry has it
    _spans_are_sent = bool(endpoint)
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON) if endpoint else ALWAYS_OFF,
        resource=Resource.create({"service.name": "pinactivity"}),
    )
    if endpoint:
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces"))
        )
    trace.set_tracer_provider(provider)


def are_spans_sent() -> bool:
    """Return whether the spans of this process are sent."""
    return _spans_are_sent


@contextmanager
def correlate(correlation_id: UUID) -> Iterator[None]:
    """Set the CorrelationId of all events and log lines of the block."""
    token = _correlation_id.set(correlation_id)
    try:
        with structlog.contextvars.bound_contextvars(correlationId=str(correlation_id)):
            yield
    finally:
        _correlation_id.reset(token)


@contextmanager
def continued_span(
    name: str, headers: Mapping[str, str], attributes: Mapping[str, str | int]
) -> Iterator[Context]:
    """Work inside a span that continues the trace of a message's `traceparent`.

    Yields:
        The context with the span in it, for spans that follow from it. Without an endpoint it has
        no span but only the trace, because spans took half of a consumer's time for a message.
    """
    parent = _propagator.extract(headers)
    if not _spans_are_sent:
        yield parent
        return
    with _consumer_span(name, parent=parent, attributes=attributes):
        yield context.get_current()


@contextmanager
def gathering_span(
    name: str, sources: Sequence[Context], attributes: Mapping[str, str | int]
) -> Iterator[None]:
    """Work inside a span that several traces lead to: the child of one, or linked to many."""
    links = [trace.Link(trace.get_current_span(source).get_span_context()) for source in sources]
    if len(links) == 1:
        with _consumer_span(name, parent=sources[0], attributes=attributes):
            yield
    else:
        with _consumer_span(name, parent=None, attributes=attributes, links=links):
            yield


def _consumer_span(
    name: str,
    *,
    parent: Context | None,
    attributes: Mapping[str, str | int],
    links: Sequence[trace.Link] = (),
) -> AbstractContextManager[trace.Span]:
    return open_span(
        name,
        context=parent,
        kind=trace.SpanKind.CONSUMER,
        attributes=dict(attributes),
        links=links,
    )


@contextmanager
def open_span(name: str, **options: Any) -> Iterator[trace.Span]:
    """Open a span that records only the class of an exception, because its text may quote a row.

    Args:
        name: What is done inside.
        options: Of OpenTelemetry's `start_as_current_span`.
    """
    with tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False, **options
    ) as span:
        try:
            yield span
        except Exception as exc:
            span.set_attribute("error.type", type(exc).__qualname__)
            span.set_status(trace.StatusCode.ERROR)
            raise


def correlation_id() -> UUID:
    """Return the CorrelationId that is set, or a new one."""
    return _correlation_id.get() or new_id()


def traceparent() -> str:
    """Return the W3C `traceparent` of the current span, or of a new trace if there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    if not carrier:
        with tracer.start_as_current_span("root"):
            _propagator.inject(carrier)
    return carrier["traceparent"]


class RequestContextMiddleware:
    """Take the caller's `X-Request-Id` (a UUID, else a new one) and `traceparent`."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if any("\x00" in value for value in request.COOKIES.values()):
            raise BadRequest  # PostgreSQL, which has the admin's sessions, refuses NUL in text
        try:
            request_id = parse_id(request.headers.get("X-Request-Id"))
        except ValueError:
            request_id = new_id()
        # tracestate is left out: nothing uses it, and its parser logs a malformed one.
        carrier = {
            name: request.headers[name] for name in ("traceparent",) if name in request.headers
        }
        token = context.attach(_propagator.extract(carrier))
        try:
            with correlate(request_id):
                response = self.get_response(request)
        finally:
            context.detach(token)
        response.headers["X-Request-Id"] = str(request_id)
        return response
