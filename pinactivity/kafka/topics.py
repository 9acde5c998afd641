"""The names of the topics of this service and of its neighbours (design, section 8)."""

from collections.abc import Iterable
from typing import Protocol

SESSION_LINKED = "pin.user-activity.session-linked.v1"
SESSION_ENDED = "pin.user-activity.session-ended.v1"
PROPERTY_OBJECT_VIEW_ENDED = "pin.user-activity.property-object-view-ended.v1"
USER_SIGNED_IN = "pin.identity.user-signed-in"
PROPERTY_OBJECT_CHANGED = "pin.catalog.property-object-changed.v1"

TOPICS = (
    SESSION_LINKED,
    SESSION_ENDED,
    PROPERTY_OBJECT_VIEW_ENDED,
    USER_SIGNED_IN,
    PROPERTY_OBJECT_CHANGED,
)

DEAD_LETTER_SUFFIX = ".dlq"


class Subscription(Protocol):
    """What a consumer reads."""

    @property
    def topics(self) -> tuple[str, ...]: ...
    @property
    def group(self) -> str: ...


def dead_letter_topic(topic: str, group: str) -> str:
    """Name the topic that gets what a group cannot handle of a topic."""
    return f"{topic}.{group}{DEAD_LETTER_SUFFIX}"


def dead_letter_topics(consumers: Iterable[Subscription]) -> tuple[str, ...]:
    """Name the dead-letter topics of consumers, in order."""
    return tuple(
        dead_letter_topic(topic, consumer.group)
        for consumer in consumers
        for topic in consumer.topics
    )
