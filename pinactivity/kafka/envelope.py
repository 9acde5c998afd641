"""The headers that every message of ours carries, decoded strictly."""

import structlog

from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time
from pinactivity.kafka.record import Poison, Record

log = structlog.get_logger(__name__)

CONTRACT_VERSION = b"1"
_OURS = frozenset(
    {
        "MessageId",
        "EventType",
        "AggregateType",
        "AggregateId",
        "ContractVersion",
        "Version",
        "CreatedAt",
        "CorrelationId",
        "traceparent",
    }
)


def read_envelope(record: Record) -> None:
    """Set a record's `message_id` and `created_at`, by its headers.

    Headers of ours must be UTF-8; those of others that are not are ignored. Of a repeated
    header the last counts. A ContractVersion other than 1 is a warning (specification).

    Raises:
        Poison: `header-not-text`, `message-id-missing` or `message-id-invalid`.
    """
    headers = dict(record.headers)
    try:
        # One look at all of them. Of a repeated header each needs a look of its own.
        is_plain = b"".join(headers.values()).isascii() and len(headers) == len(record.headers)  # type: ignore[arg-type]  # a null raises TypeError
    except TypeError:
        is_plain = False
    if not is_plain:
        headers = _decode_each(record)
    content = headers.get("MessageId")
    if content is None:
        raise Poison("message-id-missing")
    try:
        message_id = parse_id(content.decode())
    except ValueError:
        raise Poison("message-id-invalid") from None
    try:
        record.created_at = parse_time((headers.get("CreatedAt") or b"").decode())
    except ValueError:
        record.created_at = record.broker_time
    record.message_id = message_id
    if headers.get("ContractVersion", CONTRACT_VERSION) != CONTRACT_VERSION:
        log.warning(
            "contract version differs",
            SourceEventId=str(message_id),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
        )


def _decode_each(record: Record) -> dict[str, bytes | None]:
    """Return the headers that are UTF-8; of a repeated name the last.

    Raises:
        Poison: `header-not-text`: one of ours is not.
    """
    headers: dict[str, bytes | None] = {}
    for name, content in record.headers:
        if content is None:
            continue
        try:
            content.decode()
        except UnicodeDecodeError:
            if name in _OURS:
                raise Poison("header-not-text") from None
        else:
            headers[name] = content
    return headers
