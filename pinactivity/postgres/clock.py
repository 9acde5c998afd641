"""The database's clock, which alone gives times (INV-SES-004); no host's clock decides anything.

Services take `now: datetime | None`. None is the database's clock; tests and the demo's replay give
a value. Our SQL makes the same choice: `coalesce(%(now)s, statement_timestamp())`. It is the
statement's time, because the transaction's lies before what happened while it waited for a lock.
"""

from datetime import datetime

from django.db import connection
from django.db.models import DateTimeField, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Now


def statement_time(now: datetime | None = None) -> datetime:
    """Return `now`, or the database's time, which takes a statement of its own."""
    if now is not None:
        return now
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (moment,) = cursor.fetchone()
    assert isinstance(moment, datetime)
    return moment


def time_expression(now: datetime | None = None) -> Combinable:
    """Return an ORM expression for `now`, or for the time of the statement that contains it."""
    return Now() if now is None else Value(now, output_field=DateTimeField())
