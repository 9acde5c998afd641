"""The publisher of a relay, on the real broker."""

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from pinactivity.kafka.producer import KafkaPublisher


@pytest.fixture
def publisher(kafka_topics: None) -> Any:
    publisher = KafkaPublisher(
        bootstrap_servers=settings.KAFKA_BOOTSTRAP_SERVERS, delivery_timeout=timedelta(seconds=8)
    )
    yield publisher
    publisher.close()
