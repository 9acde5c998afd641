"""docker-compose.yml against what only this repository knows: settings, queues, commands, files.

Its form is checked by `check-jsonschema` with the Compose specification's schema (`make check`).
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.apps import apps
from django.conf import settings
from django.core.management import get_commands

from pinactivity.settings import env

ROOT = Path(settings.BASE_DIR)
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
    "services"
]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
EXAMPLE = dict(
    re.findall(
        r"^#?([A-Z][A-Z0-9_]*)=(.*)$", (ROOT / "deploy/.env.example").read_text(), re.MULTILINE
    )
)

INTERPOLATION = re.compile(r"\$\{(\w+)[^}]*\}")
REQUIRED = re.compile(r"\$\{\w+:\?[^}]+\}")
SCRIPT = re.compile(r"[\w/]+\.(?:py|sh)\b")

each_service = pytest.mark.parametrize("name", SERVICES)
each_of_ours = pytest.mark.parametrize("name", OURS)


def is_secret(variable: str) -> bool:
    """NAME_FILE only says where the secret is."""
    words = set(variable.split("_"))
    return bool(words & {"SECRET", "PASSWORD", "TOKEN", "KEY"}) and not variable.endswith("_FILE")


def is_one_shot(service: dict[str, Any]) -> bool:
    return service["restart"] == "no" and "healthcheck" not in service


def command_of(name: str) -> str:
    """Return what a service of ours runs, with the text of the shell scripts that it runs."""
    command = OURS[name].get("command") or json.loads(DOCKERFILE.rpartition("\nCMD ")[2])
    text = command if isinstance(command, str) else " ".join(command)
    for script in re.findall(r"[\w/]+\.sh\b", text):
        text += " " + (ROOT / script).read_text().replace("\\\n", " ")
    return text


def interpolated(text: str) -> set[str]:
    return set(INTERPOLATION.findall(text))


# -- variables and secrets -----------------------------------------------------------------


@each_of_ours
def test_variables_of_a_service_are_read_by_the_settings_or_by_its_script(name: str) -> None:
    given = {variable.removesuffix("_FILE") for variable in OURS[name]["environment"]}
    assert given - env.variables - interpolated(command_of(name)) == set()


def test_example_describes_the_variables_that_the_services_ask_for_and_no_other() -> None:
    asked = interpolated(json.dumps(SERVICES))
    for service in SERVICES.values():
        environment = service.get("environment", {})
        asked |= {variable for variable, value in environment.items() if value is None}
    assert asked == EXAMPLE.keys()


@each_service
def test_secrets_of_a_service_are_required_from_outside(name: str) -> None:
    service = SERVICES[name]
    for variable, value in service.get("environment", {}).items():
        password = re.search(r"://[^:@/]*:(.+)@[^@]*$", str(value))
        secret = password[1] if password else value if is_secret(variable) else None
        assert secret is None or REQUIRED.fullmatch(secret), variable
    for found in INTERPOLATION.finditer(json.dumps(service)):
        assert not is_secret(found[1]) or REQUIRED.fullmatch(found[0]), found[1]


def test_no_secret_is_written_in_the_example_or_in_the_image() -> None:
    assert [name for name, value in EXAMPLE.items() if is_secret(name) and value] == []
    lines = re.findall(r"^(?:ENV|ARG) .*", DOCKERFILE, re.MULTILINE)
    assert [
        word for line in lines for word in re.findall(r"[A-Z_]+", line) if is_secret(word)
    ] == []


# -- what runs -----------------------------------------------------------------------------


@each_of_ours
def test_service_of_ours_runs_a_command_or_a_module_that_exists(name: str) -> None:
    text = command_of(name)
    commands = re.findall(r"\bmanage\.py (\w+)", text)
    modules = re.findall(r"\bcelery -A ([\w.]+)", text)
    modules += re.findall(r"\bgranian .*?\s([\w.]+):application\b", text)
    assert commands or modules
    assert set(commands) <= get_commands().keys()
    assert all(importlib.util.find_spec(module) for module in modules)


@each_of_ours
def test_scripts_of_a_service_and_of_its_health_check_exist(name: str) -> None:
    probe = OURS[name].get("healthcheck", {}).get("test", [])
    scripts = SCRIPT.findall(" ".join([command_of(name), *probe]))
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_every_queue_has_a_worker_and_every_worker_a_queue() -> None:
    served = {
        queue
        for name in OURS
        for queues in re.findall(r"--queues[ =]([\w,-]+)", command_of(name))
        for queue in queues.split(",")
    }
    assert served == {queue.name for queue in settings.CELERY_TASK_QUEUES}


@each_service
def test_service_has_a_health_check_or_ends_and_is_awaited_accordingly(name: str) -> None:
    service = SERVICES[name]
    assert "healthcheck" in service or is_one_shot(service)
    for other, dependency in service.get("depends_on", {}).items():
        ends = is_one_shot(SERVICES[other])
        condition = "service_completed_successfully" if ends else "service_healthy"
        assert dependency["condition"] == condition, other


# -- images and files ----------------------------------------------------------------------


@each_service
def test_image_has_a_version_and_names_no_registry(name: str) -> None:
    repository, _, tag = SERVICES[name]["image"].partition(":")
    assert "." not in repository.partition("/")[0]
    assert re.search(r"\d", tag) or name in OURS


def test_image_of_ours_has_all_of_the_service_and_does_not_run_as_root() -> None:
    copies = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {source.rstrip("/") for sources in copies for source in sources.split()}
    ignore = (ROOT / "deploy/Dockerfile.dockerignore").read_text()
    let_in = {path.rstrip("/") for path in re.findall(r"^!(\S+)$", ignore, re.MULTILINE)}
    own_apps = {Path(app.path) for app in apps.get_app_configs() if ROOT in Path(app.path).parents}
    own_apps = {path for path in own_apps if ".venv" not in path.parts}

    assert copied == let_in
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {path.name for path in own_apps} <= copied
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE)[-1] not in {"root", "0", "0:0"}


@each_service
def test_files_that_are_mounted_exist(name: str) -> None:
    sources = [volume.partition(":")[0] for volume in SERVICES[name].get("volumes", [])]
    assert [path for path in sources if path.startswith(".") and not (ROOT / path).exists()] == []


def test_prometheus_scrapes_services_that_exist() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    names = {
        name
        for job in config["scrape_configs"]
        for discovery in job.get("dns_sd_configs", [])
        for name in discovery["names"]
    }
    assert names <= SERVICES.keys()
