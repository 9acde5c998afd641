"""One clock, the database's (INV-SES-004): no host's own time decides anything.

Services take `now: datetime | None`. None is the database's clock; a value is for tests and
for the replay. SQL that we write takes the same choice: `coalesce(%(now)s, statement_timestamp())`.
The statement's time, because the transaction's is older than what a lock wait let pass.
"""

from datetime import datetime

from django.db import connection
from django.db.models import DateTimeField, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Now


def statement_time(now: datetime | None = None) -> datetime:
    """Return `now`, or the database's time, asked for in a statement of its own."""
    if now is not None:
        return now
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (moment,) = cursor.fetchone()
    assert isinstance(moment, datetime)
    return moment


def time_expression(now: datetime | None = None) -> Combinable:
    """Express `now`, or the time of the statement that this stands in, for the ORM."""
    return Now() if now is None else Value(now, output_field=DateTimeField())
