"""manage.py load_property_objects FILE"""

import csv
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from tqdm import tqdm

from devstats.management.storage import opened_writer
from devstats.ownership import PropertyObject
from devstats.property_objects import store_objects
from pinactivity.core.ids import parse_id
from pinactivity.core.times import parse_time

_REQUIRED = ["PropertyObjectId", "DeveloperId"]
_OPTIONAL = ["BrandId", "UpdatedAt"]


class UnreadableObjects(Exception):
    """What is wrong with a file of property objects, and in which line."""


class Command(BaseCommand):
    help = (
        "Load whose property objects are, from a CSV file with a heading: PropertyObjectId,"
        " DeveloperId, and if wanted BrandId and UpdatedAt (from when on; now where it is empty)."
        " Nothing is loaded of a file with an error; what is known already is left out."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)

    def handle(self, *args: Any, file: Path, **options: Any) -> None:
        now = datetime.now(UTC)
        try:
            objects = read_objects(file, now=now)
        except UnreadableObjects as exc:
            raise CommandError(f"{file}: {exc}") from exc
        except OSError as exc:
            raise CommandError(f"{file} cannot be read: {type(exc).__name__}") from exc
        with (
            opened_writer() as writer,
            tqdm(total=len(objects), desc="load", unit=" objects", disable=None) as bar,
        ):
            added = store_objects(writer, objects, now=now, advance=bar.update)
        self.stdout.write(f"{added} loaded, {len(objects) - added} known already")


def read_objects(path: Path, *, now: datetime) -> list[PropertyObject]:
    """Read a file as a whole; a line that repeats another is left out.

    Args:
        now: For an UpdatedAt that is empty.

    Raises:
        UnreadableObjects: the first error, with its line.
        OSError: no such file.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(_read(csv.DictReader(file, strict=True), now))
    except (UnicodeDecodeError, csv.Error) as exc:
        raise UnreadableObjects("is not CSV in UTF-8") from exc


def _read(rows: "csv.DictReader[str]", now: datetime) -> Iterator[PropertyObject]:
    heading = rows.fieldnames or []
    unknown = set(heading) - {*_REQUIRED, *_OPTIONAL}
    if unknown or not set(_REQUIRED) <= set(heading) or len(set(heading)) != len(heading):
        raise UnreadableObjects(
            f"the first line must name the columns {', '.join(_REQUIRED)}, and if wanted"
            f" {', '.join(_OPTIONAL)}"
        )
    read: dict[tuple[UUID, datetime], PropertyObject] = {}
    for row in rows:
        if None in row or None in row.values():
            raise UnreadableObjects(f"line {rows.line_num}: not as many fields as the heading")
        try:
            version = PropertyObject(
                property_object_id=parse_id(row["PropertyObjectId"]),
                developer_id=parse_id(row["DeveloperId"]),
                brand_id=parse_id(row["BrandId"]) if row.get("BrandId") else None,
                updated_at=_past(row["UpdatedAt"], now) if row.get("UpdatedAt") else now,
            )
        except ValueError as exc:
            raise UnreadableObjects(f"line {rows.line_num}: {exc}") from exc
        moment = version.property_object_id, version.updated_at
        if moment not in read:
            read[moment] = version
            yield version
        elif read[moment] != version:
            raise UnreadableObjects(
                f"line {rows.line_num}: a line before names another owner of this moment"
            )


def _past(text: str, now: datetime) -> datetime:
    moment = parse_time(text)
    if not datetime(1970, 1, 1, tzinfo=UTC) <= moment <= now:
        raise ValueError("UpdatedAt must be from 1970 to now.")
    return moment
