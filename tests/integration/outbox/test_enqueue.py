"""Enqueueing events: only with their transaction, unchanged, with their trace."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.db import transaction
from django.test import Client

from outbox.models import OutboxMessage
from outbox.services import NotInTransaction, enqueue
from pinactivity.core.ids import new_id
from sessions.events import SessionEnded, SessionLinked
from tests.factories import make_session
from tests.outbox import (
    enqueue_committed,
    make_relay,
    session_ended,
)
from tests.tokens import SECRET, bearer, development_token

pytestmark = pytest.mark.django_db(transaction=True)


def test_enqueue_outside_a_transaction_raises() -> None:
    with pytest.raises(NotInTransaction):
        enqueue([session_ended()])
    assert not OutboxMessage.objects.exists()


def test_rolled_back_change_leaves_no_event() -> None:
    with transaction.atomic():
        enqueue([session_ended()])
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()


def test_text_of_any_kind_survives_the_way_into_the_table() -> None:
    class Odd(SessionEnded, frozen=True, kw_only=True):
        def payload(self) -> dict[str, Any]:
            return {"Text": 'tab\t newline\n return\r backslash\\ "quotes" \\N Ж 🏠', "None": None}

    event = session_ended()
    odd = Odd(**msgspec.structs.asdict(event))
    enqueue_committed(odd)
    assert json.loads(OutboxMessage.objects.get().payload) == odd.payload()


def test_trace_of_a_request_goes_through_the_row_into_the_header(
    publisher: Any, read_topic: Callable[[str], list[Any]], settings: Any
) -> None:
    settings.JWT_DEVELOPMENT_SECRET = SECRET
    trace_id, request_id = "4bf92f3577b34da6a3ce929d0e0e4736", new_id()
    session = make_session()
    response = Client(
        headers={
            "X-Anonymous-Id": str(session.anonymous_id),
            **bearer(development_token(new_id())),
            "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
            "X-Request-Id": str(request_id),
        }
    ).post("/api/user-activity/sessions/link")
    assert response.status_code == 200

    make_relay(publisher).run()

    (record,) = read_topic(SessionLinked.TOPIC)
    headers = {name: value.decode() for name, value in record.headers}
    assert headers["CorrelationId"] == str(request_id)
    assert headers["traceparent"].split("-")[1] == trace_id
