"""Rows as tests want them: devices that fell silent some time ago, by the database's clock."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import factory
from django.db import connection
from factory.django import DjangoModelFactory

from pinactivity.core.ids import earliest_id, new_id
from pinactivity.postgres.clock import statement_time
from sessions.device import Device, DeviceType
from sessions.models import Session
from views.lifecycle import ViewSource
from views.models import PropertyObjectView, PropertyObjectViewStats
from views.services import OpenedView, open_view

DEVICE = Device("Mozilla/5.0 (test)", "203.0.113.7", "Firefox 120", "Linux", DeviceType.DESKTOP)
MINUTE = timedelta(minutes=1)


class SessionFactory(DjangoModelFactory[Session]):
    """An Active session: `lasted` long, then `silent` until now (of the database)."""

    class Meta:
        model = Session

    class Params:
        silent = timedelta(0)
        lasted = 5 * MINUTE

    id = factory.LazyFunction(new_id)
    anonymous_id = factory.LazyFunction(new_id)
    last_activity_at: Any = factory.LazyAttribute(lambda row: statement_time() - row.silent)
    created_at: Any = factory.LazyAttribute(lambda row: row.last_activity_at - row.lasted)
    linked_at: Any = factory.LazyAttribute(lambda row: row.user_id and row.created_at)
    user_id = None
    status = "Active"
    version = 1
    user_agent = DEVICE.user_agent
    ip_address = DEVICE.ip_address
    browser = DEVICE.browser
    os = DEVICE.os
    device_type = DEVICE.device_type


class PropertyObjectViewFactory(DjangoModelFactory[PropertyObjectView]):
    """An Active view of its session, dated as its session unless given otherwise."""

    class Meta:
        model = PropertyObjectView

    class Params:
        silent = None
        lasted = MINUTE

    id = factory.LazyFunction(new_id)
    session: Any = factory.SubFactory(SessionFactory)
    property_object_id = factory.LazyFunction(new_id)
    user_id: Any = factory.LazyAttribute(lambda row: row.session.user_id)
    last_activity_at: Any = factory.LazyAttribute(
        lambda row: (
            row.session.last_activity_at if row.silent is None else statement_time() - row.silent
        )
    )
    created_at: Any = factory.LazyAttribute(lambda row: row.last_activity_at - row.lasted)
    view_source = "Catalog"
    filter_snapshot = None
    status = "Active"
    version = 1


def make_session(**fields: Any) -> Session:
    """Make an Active session; fields and parameters as in `SessionFactory`."""
    session: Session = SessionFactory.create(**fields)
    return session


def make_view(**fields: Any) -> PropertyObjectView:
    """Make an Active view; fields and parameters as in `PropertyObjectViewFactory`."""
    view: PropertyObjectView = PropertyObjectViewFactory.create(**fields)
    return view


def silent_session(*, minutes: float, views: int = 0, **fields: Any) -> Session:
    """Make a session that has been silent for so many minutes, with open views likewise."""
    session = make_session(silent=timedelta(minutes=minutes), **fields)
    for _ in range(views):
        make_view(session=session)
    return session


def open_in(session: Session) -> OpenedView:
    """Open a view of a new object by the service, as the session's own device."""
    return open_view(
        session_id=session.id,
        anonymous_id=session.anonymous_id,
        device=DEVICE,
        property_object_id=new_id(),
        view_source=ViewSource.MAP,
        filter_snapshot=None,
    )


def make_stats(**fields: Any) -> PropertyObjectViewStats:
    """Make an object's totals, those of one view of a minute unless given otherwise."""
    return PropertyObjectViewStats.objects.create(
        **{
            "property_object_id": new_id(),
            "views_count": 1,
            "total_duration_seconds": 60,
            "last_viewed_at": statement_time(),
            **fields,
        }
    )


def make_due_sessions(sessions: int, *, views: int = 0) -> None:
    """Insert thousands, all silent for longer than the threshold, each with so many open views."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH new AS (
                INSERT INTO sessions (id, anonymous_id, created_at, last_activity_at, user_agent,
                                      browser, os, device_type)
                SELECT gen_random_uuid(), gen_random_uuid(), moment - interval '5 min', moment,
                       'test', '', '', 'Unknown'
                FROM (SELECT statement_timestamp() - interval '13 min' - n * interval '1 ms'
                      FROM generate_series(1, %s) AS n) AS silent (moment)
                RETURNING id, created_at, last_activity_at
            )
            INSERT INTO property_object_views (id, session_id, property_object_id, view_source,
                                               created_at, last_activity_at)
            SELECT gen_random_uuid(), id, gen_random_uuid(), 'Map', created_at, last_activity_at
            FROM new, generate_series(1, %s)
            """,
            [sessions, views],
        )


def id_of_age(age: timedelta) -> UUID:
    """Return an id (UUID v7) that was created `age` ago."""
    return UUID(int=earliest_id(statement_time() - age).int | (new_id().int & ((1 << 76) - 1)))
