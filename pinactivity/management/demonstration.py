"""Keeps the commands of the demonstration out of a production database."""

from argparse import ArgumentParser

from django.conf import settings
from django.core.management import CommandError
from django.db import connection


def add_database_argument(parser: ArgumentParser) -> None:
    """Add `--database-name`, which `require_demonstration` compares."""
    parser.add_argument(
        "--database-name",
        metavar="NAME",
        help="Outside development: the database that gets invented visits, if you mean it.",
    )


def require_demonstration(database_name: str | None) -> None:
    """Refuse to write invented visits into a database that is not for development.

    Args:
        database_name: What `--database-name` says.

    Raises:
        CommandError: PINACTIVITY_DEVELOPMENT is off, and the name is not that of the database.
    """
    name = connection.settings_dict["NAME"]
    if not settings.DEVELOPMENT and database_name != name:
        raise CommandError(
            "This writes invented visits, and keeps the closer waiting meanwhile. It is for"
            f" development. If you mean this database, add --database-name {name}."
        )
