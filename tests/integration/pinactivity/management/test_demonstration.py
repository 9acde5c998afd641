"""The commands of the demonstration stay out of a database that is not for development."""

from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from sessions.models import Session

COMMANDS = ("replay_visits", "own_visited_objects")


@pytest.fixture
def visits(tmp_path: Path, settings: Any) -> str:
    settings.DEVELOPMENT = False
    file = tmp_path / "visits.csv"
    file.write_text("seconds,device,page\n0,1,\n")
    return str(file)


@pytest.mark.django_db
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("options", [{}, {"database_name": "another"}], ids=["none", "another"])
def test_production_gets_no_invented_visits(
    visits: str, command: str, options: dict[str, str]
) -> None:
    with pytest.raises(CommandError, match=f"--database-name {connection.settings_dict['NAME']}"):
        call_command(command, visits, **options)
    assert not Session.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_whoever_names_the_database_means_it(visits: str) -> None:
    call_command("replay_visits", visits, database_name=connection.settings_dict["NAME"])
    connection.close()  # the replay has changed its settings
    assert Session.objects.count() == 1
