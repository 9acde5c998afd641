"""Publishing to Kafka: every message is acknowledged on its own."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from kafka import KafkaProducer
from kafka.errors import (
    BrokerResponseError,
    InvalidRecordError,
    InvalidTimestampError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
)

from pinactivity.kafka.partitions import BatchPartitioner


class Message(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class DeliveryError:
    """Why a message was not acknowledged."""

    code: str
    """The class of the error, never its text."""
    is_permanent: bool
    """True: sending it again cannot help. False: send it again later."""
    was_refused: bool = False
    """The broker refused this message. False: it did not answer, or got no request."""


class Publisher(Protocol):
    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        """Send messages in order and wait for the acknowledgement of each.

        Returns:
            One entry a message: None is acknowledged. Never raises for an error of broker or
            message.
        """

    def close(self) -> None:
        """Give up the connection within a bounded time."""


class ProbingPublisher(Publisher, Protocol):
    """A publisher that can be asked for the broker without publishing."""

    def is_reachable(self) -> bool:
        """Return whether the broker answers, within about a second; never raises."""


_PROBE_SECONDS = 1.0

_PERMANENT_ERRORS = (
    MessageSizeTooLargeError,
    InvalidRecordError,
    InvalidTimestampError,
    # What send() raises at once for values that it cannot put on the wire.
    TypeError,
    ValueError,
)


class KafkaPublisher:
    """Publishes by kafka-python's idempotent producer, made at the first use.

    Args:
        bootstrap_servers: host:port each.
        delivery_timeout: Bound of one `publish`, and of `close`.
        client_id: What the broker's logs call it.
        most_bytes: Of one message; more is the message's fault.
    """

    def __init__(
        self,
        *,
        bootstrap_servers: list[str],
        delivery_timeout: timedelta,
        client_id: str = "pinactivity-relay",
        most_bytes: int = 1024 * 1024,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._client_id = client_id
        self._most_bytes = most_bytes
        self._timeout = delivery_timeout.total_seconds()
        self._producer: KafkaProducer | None = None
        self._partitioner = BatchPartitioner()

    def publish(self, messages: Sequence[Message]) -> list[DeliveryError | None]:
        """See `Publisher`. After an error of the broker the next call makes a new producer."""
        deadline = time.monotonic() + self._timeout
        try:
            producer = self._connect(self._timeout)
        except (KafkaError, OSError) as exc:
            return [_describe(exc)] * len(messages)
        self._partitioner.expect(message.key for message in messages)
        futures: list[Any] = []
        unsendable: dict[str, DeliveryError] = {}
        for message in messages:
            if message.topic in unsendable:
                futures.append(unsendable[message.topic])
                continue
            try:
                futures.append(
                    producer.send(
                        message.topic,
                        key=message.key,
                        value=message.value,
                        headers=list(message.headers),
                    )
                )
            except (KafkaError, TypeError, ValueError) as exc:
                futures.append(_describe(exc))
                if not isinstance(exc, _PERMANENT_ERRORS):
                    # The topic is not there, or the broker: asking for each of its messages
                    # would wait as often. Other topics go on.
                    unsendable[message.topic] = _describe(exc)
        # This sends at once what would wait for more. Only the futures prove a delivery.
        with suppress(KafkaError):
            producer.flush(max(deadline - time.monotonic(), 0.001))
        answers = [
            future if isinstance(future, DeliveryError) else _answer(future) for future in futures
        ]
        if any(answer and not answer.is_permanent for answer in answers):
            self.close()
        return answers

    def is_reachable(self) -> bool:
        """See `ProbingPublisher`. After an error it needs a new connection."""
        try:
            self._connect(_PROBE_SECONDS)
        except (KafkaError, OSError):
            return False
        return True

    def close(self) -> None:
        """See `Publisher`. What is not acknowledged by then stays with the caller."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.close(timeout=1)
        except (KafkaError, OSError):
            # It raises before it stops its thread, which would go on and might send much later.
            producer._sender.force_close()  # noqa: SLF001 - no public way ends it
            with suppress(KafkaError, OSError):
                producer.close(timeout=1)

    def _connect(self, seconds: float) -> KafkaProducer:
        if self._producer is None:
            self._producer = KafkaProducer(
                **producer_settings(self._timeout, most_bytes=self._most_bytes),
                bootstrap_servers=self._bootstrap_servers,
                client_id=self._client_id,
                partitioner=self._partitioner,
                bootstrap_timeout_ms=int(seconds * 1000),
            )
        return self._producer


def producer_settings(timeout: float, *, most_bytes: int) -> dict[str, Any]:
    """Return the settings of `KafkaPublisher`'s producer, which its bench takes too.

    The partitioner is not among them: the publisher announces to it what it is about to send.

    Args:
        timeout: Seconds until a message is given up.
        most_bytes: Of one message.
    """
    milliseconds = int(timeout * 1000)
    return {
        "acks": "all",
        "enable_idempotence": True,
        "allow_auto_create_topics": False,
        # Until the flush that follows, or until there is a request's worth: few large requests.
        "linger_ms": 100,
        "batch_size": 128 * 1024,
        "max_request_size": most_bytes,
        "max_block_ms": milliseconds // 4,
        "request_timeout_ms": milliseconds // 2,
        "delivery_timeout_ms": milliseconds,
        # Nobody reads them, and they are a part of each request's time.
        "metrics_enabled": False,
    }


def _answer(future: Any) -> DeliveryError | None:
    """Return why a message is not acknowledged; no answer by now counts as not delivered."""
    if not future.is_done:
        return DeliveryError(KafkaTimeoutError.__name__, is_permanent=False)
    return _describe(future.exception) if future.exception else None


def _describe(error: Exception) -> DeliveryError:
    return DeliveryError(
        type(error).__name__,
        is_permanent=isinstance(error, _PERMANENT_ERRORS),
        was_refused=isinstance(error, BrokerResponseError),
    )
