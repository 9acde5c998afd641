"""Commands and statements of docs/runbook.md: they are needed when nobody has time to mend them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from django.conf import settings
from django.core.management import get_commands, load_command_class
from django.db import connection

from pinactivity.celery import app
from pinactivity.postgres.locks import CLOSER, REPLAY, advisory_lock

ROOT = Path(settings.BASE_DIR)
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
WITH_VALUE = {"--since", "--tail", "--scale"}


def _compose_commands() -> Iterator[str]:
    for command in re.findall(r"docker compose ([^`\n]+)", RUNBOOK):
        yield re.split(r" [|&]", command)[0]


COMPOSE = sorted(set(_compose_commands()))
STATEMENTS = re.findall(r"```sql\n(.+?)```", RUNBOOK, re.DOTALL)


def split(command: str) -> tuple[list[str], list[str]]:
    """Split a command of Compose into the services that it names and what runs in one."""
    verb, *words = shlex.split(command)
    services: list[str] = []
    while words:
        word = words.pop(0)
        if word in WITH_VALUE:
            value = words.pop(0)
            if word == "--scale":
                services.append(value.partition("=")[0])
        elif not word.startswith("-"):
            services.append(word)
            if verb in {"exec", "run"}:
                break
    return services, words


@pytest.mark.parametrize("command", COMPOSE)
def test_command_names_services_and_programs_that_exist(command: str) -> None:
    services, program = split(command)
    assert set(services) - {"SERVICE"} <= SERVICES.keys()
    if program[:2] == ["python", "manage.py"]:
        name, *arguments = program[2:]
        parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
        parser.parse_args([re.sub("^(PARTITION|OFFSET)$", "0", each) for each in arguments])
    elif program[:1] == ["python"]:
        assert (ROOT / program[1]).exists()
    elif program[:1] == ["celery"]:
        app.loader.import_default_modules()
        assert program[-1] in app.tasks


@pytest.mark.django_db
@pytest.mark.parametrize("statement", STATEMENTS)
def test_statement_runs(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.django_db
def test_whoever_keeps_the_closer_out_is_found() -> None:
    (statement,) = (each for each in STATEMENTS if CLOSER in each)
    with advisory_lock(CLOSER), advisory_lock(REPLAY), connection.cursor() as cursor:
        cursor.execute(statement)
        assert len(cursor.fetchall()) == 2


def test_options_named_are_those_of_the_environment() -> None:
    named = set(re.findall(r"`([A-Z]+_[A-Z_]+)(?:=[^`]+)?`", RUNBOOK))
    assert len(named) > 5
    settings = (ROOT / "pinactivity/settings.py").read_text()
    assert named <= set(re.findall(r"env\.\w+\(\s*\"([A-Z_]+)\"", settings))


def test_something_is_found() -> None:
    assert len(COMPOSE) > 20
    assert len(STATEMENTS) > 3
