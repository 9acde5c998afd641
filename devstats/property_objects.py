"""Versions of property objects in ClickHouse: whose each one is, from when on."""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from uuid import UUID

from clickhouse_connect.driver.client import Client

from devstats.clickhouse import MOST_IDS, translated_errors
from devstats.ownership import PropertyObject, owner_at
from devstats.tables import PROPERTY_OBJECTS
from devstats.writer import FactWriter

Versions = dict[UUID, list[PropertyObject]]

_VERSIONS = """
    SELECT PropertyObjectId, DeveloperId, BrandId, UpdatedAt, Revision FROM property_objects
    WHERE PropertyObjectId IN {ids:Array(UUID)}
    ORDER BY PropertyObjectId, UpdatedAt, Revision DESC, DeveloperId
    LIMIT 1 BY PropertyObjectId, UpdatedAt
"""


def find_versions(client: Client, object_ids: Iterable[UUID]) -> Versions:
    """Read what is known of objects, the oldest version first; unknown ones are left out.

    Of several versions from one moment on, only the last reported one is returned.

    Raises:
        StorageUnavailable: ClickHouse is away.
    """
    versions: Versions = defaultdict(list)
    wanted = list(set(object_ids))
    for start in range(0, len(wanted), MOST_IDS):
        with translated_errors():
            rows = client.query(
                _VERSIONS, parameters={"ids": wanted[start : start + MOST_IDS]}
            ).result_rows
        for row in rows:
            version = PropertyObject(*row)
            versions[version.property_object_id].append(version)
    return versions


def store_objects(
    writer: FactWriter,
    objects: Sequence[PropertyObject],
    *,
    now: datetime | None = None,
    advance: Callable[[int], object] = lambda _: None,
    while_waiting: Callable[[], None] | None = None,
) -> int:
    """Add versions of objects, except those that are known already.

    Of two owners from the same moment on, the one reported later is the owner, whether in one
    call, in a later one, or again after the other.

    Args:
        objects: In the order in which they were reported.
        now: Versions of this moment report the present owner, not since when: one that changes
            nothing is left out. Any other is left out only if exactly it is known. That its owner
            was the owner before is not enough: a change between the two may still arrive.
        while_waiting: See `FactWriter.append`.

    Returns:
        How many were added.

    Raises:
        RowRefused, StorageUnavailable: see `FactWriter.append`; what was added stays.
    """
    added = 0
    objects = sorted(objects, key=_moment)
    for start in range(0, len(objects), MOST_IDS):
        chunk = objects[start : start + MOST_IDS]
        known = find_versions(writer.client, (each.property_object_id for each in chunk))
        new = []
        for each in chunk:
            versions = known[each.property_object_id]
            if not _is_known(each, versions, now):
                revised = _revised(each, versions)
                new.append(revised)
                insort(versions, revised, key=_moment)
        if new:
            writer.append(
                PROPERTY_OBJECTS,
                # By the owner too: where a lagging replica hides the first owner of a moment, the
                # next one gets the same revision, and is no repetition.
                {
                    f"{each.updated_at} {each.revision} {each.developer_id} {each.brand_id}"
                    f" {each.property_object_id}": each
                    for each in new
                },
                while_waiting=while_waiting,
            )
        added += len(new)
        advance(len(chunk))
    return added


def _moment(version: PropertyObject) -> datetime:
    return version.updated_at


def _is_known(
    version: PropertyObject, known: Sequence[PropertyObject], now: datetime | None
) -> bool:
    owner = owner_at(known, version.updated_at)
    if owner is None or owner[1:3] != version[1:3]:
        return False
    return version.updated_at in (now, owner.updated_at)


def _revised(version: PropertyObject, known: Sequence[PropertyObject]) -> PropertyObject:
    """Let a version win over the one that is known from its moment on, if there is any."""
    before = owner_at(known, version.updated_at)
    if before is None or before.updated_at != version.updated_at:
        return version
    return version._replace(revision=before.revision + 1)
