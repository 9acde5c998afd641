"""The signed-in consumer's handler: identity's events on the device's session (A4)."""

from datetime import timedelta
from typing import Any

import pytest

from outbox.models import OutboxMessage
from pinactivity.core.ids import NIL, new_id
from pinactivity.core.times import iso_utc
from pinactivity.kafka.entry import Entry
from pinactivity.kafka.record import Poison
from pinactivity.kafka.spec import registered_consumers
from pinactivity.kafka.testing import record
from pinactivity.kafka.topics import USER_SIGNED_IN
from pinactivity.postgres.clock import statement_time
from sessions.consumers import SignedInHandler
from sessions.models import Session
from tests.factories import make_session, silent_session

pytestmark = pytest.mark.django_db(transaction=True)


def handle(payload: Any) -> bool:
    """Pass one message to the handler; return False when it skips the message."""
    handler = SignedInHandler()
    message = record(topic=USER_SIGNED_IN, value=payload)
    sign_in = handler.decode(message)
    if sign_in is not None:
        handler.flush([Entry(message, sign_in)], lambda: None)
    return sign_in is not None


def signed_in(**changes: Any) -> dict[str, Any]:
    return {
        "UserId": str(new_id()),
        "AnonymousId": str(new_id()),
        "SignedInAt": iso_utc(statement_time()),
        **changes,
    }


def test_consumer_is_registered_under_its_group() -> None:
    spec = registered_consumers()["signed-in"]
    assert (spec.topics, spec.group) == ((USER_SIGNED_IN,), "user-activity-identity-signed-in")


def test_event_links_the_devices_session_whatever_the_case_of_its_names() -> None:
    session = make_session()
    user_id = new_id()

    handle(
        {
            "userid": str(user_id).upper(),
            "ANONYMOUSID": f"{{{session.anonymous_id}}}",
            "signedInAt": statement_time().strftime("%Y-%m-%dT%H:%M:%S.%f7+00:00"),
        }
    )

    assert Session.objects.get().user_id == user_id
    assert OutboxMessage.objects.count() == 1


def test_repeated_event_changes_nothing_more() -> None:
    session = make_session()
    event = signed_in(AnonymousId=str(session.anonymous_id))
    for _ in range(3):
        assert handle(event)
    assert Session.objects.get().version == 2
    assert OutboxMessage.objects.count() == 1


def test_event_without_a_device_is_skipped() -> None:
    make_session()
    assert not handle(signed_in(AnonymousId=None))
    assert Session.objects.get().user_id is None


def test_event_of_a_device_without_a_session_is_skipped() -> None:
    assert handle(signed_in())
    assert not Session.objects.exists()


def test_event_closes_an_abandoned_session_and_links_nothing() -> None:
    session = silent_session(minutes=60)
    handle(signed_in(AnonymousId=str(session.anonymous_id)))
    row = Session.objects.get()
    assert (row.close_reason, row.user_id) == ("Abandoned", None)


def test_late_event_does_not_undo_a_newer_sign_in_c14() -> None:
    session = make_session()
    earlier = iso_utc(statement_time() - timedelta(seconds=1))
    newer = signed_in(AnonymousId=str(session.anonymous_id))
    handle(newer)
    handle(signed_in(AnonymousId=str(session.anonymous_id), SignedInAt=earlier))
    assert str(Session.objects.get(status="Active").user_id) == newer["UserId"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"UserId": None}, "user-id-missing"),
        ({"UserId": str(NIL)}, "user-id-invalid"),
        ({"UserId": 7}, "user-id-invalid"),
        ({"AnonymousId": "undefined"}, "anonymous-id-invalid"),
        ({"AnonymousId": str(NIL)}, "anonymous-id-invalid"),
        ({"SignedInAt": None}, "signed-in-at-missing"),
        ({"SignedInAt": 1700000000}, "signed-in-at-invalid"),
        ({"SignedInAt": "yesterday"}, "signed-in-at-invalid"),
        ({"SignedInAt": "2026-11-29T10:00:00"}, "signed-in-at-invalid"),
        ({"SignedInAt": "2999-01-01T00:00:00Z"}, "signed-in-at-in-the-future"),
        ({"userId": str(new_id())}, "value-repeats-a-field"),
    ],
)
def test_broken_contract_is_poison_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Poison) as poison:
        handle(signed_in(**changes))
    assert poison.value.reason == reason


@pytest.mark.parametrize("value", [[], "text", 1, True])
def test_value_that_is_no_object_is_poison(value: Any) -> None:
    with pytest.raises(Poison):
        handle(value)
