"""own_visited_objects gives the objects of recorded visits owners, and a user access to one."""

from io import StringIO
from pathlib import Path

import pytest
from clickhouse_connect.driver.client import Client
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from devstats.models import DeveloperAccess
from pinactivity.demo.replay import developer_id, property_object_id
from tests.dev_stats import rows_of


def own_visited_objects(file: Path, reader: str) -> str:
    output = StringIO()
    call_command("own_visited_objects", str(file), "--reader", reader, stdout=output)
    return output.getvalue()


@pytest.mark.django_db
def test_replayed_objects_are_somebodys_and_the_reader_may_see_the_first(
    clickhouse: Client, tmp_path: Path
) -> None:
    file = tmp_path / "visits.csv"
    file.write_text("seconds,device,page\n0,1,1\n1,1,21\n2,2,22\n3,2,\n4,1,1\n5,3,2\n")
    user = User.objects.create_user("admin")

    printed = [own_visited_objects(file, "admin") for _ in range(2)]

    assert printed == [
        "3 objects given owners, 0 had theirs\n",
        "0 objects given owners, 3 had theirs\n",
    ]
    stored = rows_of(clickhouse, "property_objects")
    assert {row["PropertyObjectId"]: row["DeveloperId"] for row in stored} == {
        property_object_id(1): developer_id(1),
        property_object_id(22): developer_id(1),
        property_object_id(2): developer_id(2),
    }
    (access,) = DeveloperAccess.objects.all()
    assert (access.user, access.developer_id) == (user, developer_id(1))


@pytest.mark.django_db
def test_owners_of_replayed_objects_need_visits_and_a_reader_that_exists(
    clickhouse: Client, tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        own_visited_objects(tmp_path / "none.csv", "admin")
    file = tmp_path / "visits.csv"
    file.write_text("seconds,device,page\n0,1,1\n")
    with pytest.raises(CommandError, match="no user of this name"):
        own_visited_objects(file, "nobody")
