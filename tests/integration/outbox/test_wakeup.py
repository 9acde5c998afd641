"""The wake-up of the relay after a commit."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from celery import current_app
from django.db import transaction

from outbox.models import OutboxMessage
from outbox.services import enqueue
from outbox.wakeup import _Waker
from pinactivity.telemetry import metrics
from tests.outbox import (
    enqueue_committed,
    session_ended,
)

pytestmark = pytest.mark.django_db(transaction=True)


def queued_ticks() -> int:
    with current_app.connection_for_read() as broker:
        channel: Any = broker.default_channel
        return int(channel.client.llen("relay"))


@pytest.fixture
def empty_queue() -> Iterator[None]:
    current_app.control.purge()
    yield
    current_app.control.purge()


def wake_ups(outcome: str) -> float:
    return float(metrics.OUTBOX_WAKE_UPS.labels(outcome)._value.get())


def test_commits_wake_the_relay_once_and_fill_no_queue(
    empty_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic():
        enqueue([session_ended()])
        transaction.set_rollback(True)
    assert queued_ticks() == 0

    for _ in range(20):
        monkeypatch.setattr("outbox.wakeup._waker", _Waker())  # as in another process
        with transaction.atomic():
            enqueue([session_ended()])
            enqueue([session_ended()])
            assert queued_ticks() <= 1
    assert queued_ticks() == 1


@pytest.mark.parametrize("answers", [False, True], ids=["refused", "hanging"])
def test_broker_of_celery_that_is_away_delays_one_commit_and_fails_none(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()  # it accepts connections, and never answers
        monkeypatch.setattr("outbox.wakeup._waker", _Waker())
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        monkeypatch.setattr(current_app.conf, "broker_write_url", url)
        failed = wake_ups("Failed")

        enqueue_committed(session_ended())
        enqueue_committed(session_ended())

    assert wake_ups("Failed") == failed + 1
    assert OutboxMessage.objects.count() == 2
