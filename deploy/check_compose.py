"""Check docker-compose.yml without an engine: `python deploy/check_compose.py [ROOT]`.

Three passes, each only when the one before found nothing: the form (compose.schema.json, which
knows just the keys in use), the meaning (the file against itself and against the code), and
Compose's own `config` where its plugin is installed. One line a fault, and exit code 1.
"""

import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships none

COMPOSE = "docker-compose.yml"
SECRET = re.compile(r"(?:^|_)(?:SECRET|PASSWORD|TOKEN|KEY)(?:_|$)")
INTERPOLATION = re.compile(r"(?<!\$)\$\{(?P<name>\w+)[^}]*\}")
REQUIRED = re.compile(r"\$\{\w+:\?[^}]+\}")
SCRIPT = re.compile(r"[\w/]+\.(?:py|sh)\b")

Service = dict[str, Any]
Services = dict[str, Service]


class _Loader(yaml.SafeLoader):
    """PyYAML's, but a key given twice is a fault, as it is for Compose."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1 and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", node.start_mark
                )
        self.flatten_mapping(node)
        return yaml.SafeLoader.construct_mapping(self, node, deep)


class Repository:
    """What the code says of itself, read as text: nothing of it is imported."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = (root / "pinactivity" / "settings.py").read_text()
        self.dockerfile = (root / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
        example = (root / "deploy" / ".env.example").read_text()
        self.documented = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", example, re.MULTILINE))
        project = tomllib.loads((root / "pyproject.toml").read_text())
        self.packages: list[str] = project["tool"]["importlinter"]["root_packages"]

    def variables(self) -> set[str]:
        """Name the environment's variables that the settings read."""
        return set(re.findall(r"\benv\.(?!options\b)\w+\(\s*\"([A-Z][A-Z0-9_]*)\"", self.settings))

    def command(self, service: Service) -> str:
        """Return what the service runs, scripts of the repository written out."""
        command = service.get("command")
        if command is None and "build" in service:
            (image,) = re.findall(r"^CMD (\[.*\])$", self.dockerfile, re.MULTILINE)
            command = json.loads(image)
        text = command if isinstance(command, str) else "\n".join(command or [])
        for script in SCRIPT.findall(text):
            path = self.root / script
            if path.suffix == ".sh" and path.is_file():
                text += "\n" + path.read_text()
        return text.replace("\\\n", " ")

    def has_module(self, name: str) -> bool:
        path = self.root.joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()

    def has_command(self, name: str) -> bool:
        own = self.root.glob(f"*/management/commands/{name}.py")
        return name == "migrate" or any(own)


def form(document: Any, schema: Any) -> Iterator[str]:
    """Compare with the schema."""
    for error in Draft202012Validator(schema).iter_errors(document):
        path = ".".join(str(part) for part in error.absolute_path)
        # Other messages quote the value, which may be a secret.
        names_a_key = error.validator in {"required", "additionalProperties"}
        reason = error.message if names_a_key else f"{error.validator} {error.validator_value}"
        yield f"{path or 'top level'}: {reason}"


def is_secret(variable: str) -> bool:
    """NAME_FILE only says where the secret is."""
    return SECRET.search(variable) is not None and not variable.endswith("_FILE")


def one_shot(service: Service) -> bool:
    return service["restart"] == "no" and "healthcheck" not in service


def watching(services: Services, _: Repository) -> Iterator[str]:
    """Each service tells its health or ends, and is waited for in the way that fits."""
    for name, service in services.items():
        if "healthcheck" not in service and not one_shot(service):
            yield f"{name}: has no healthcheck and is no one-shot (restart: no)"
        for other, wait in service.get("depends_on", {}).items():
            if other not in services:
                yield f"{name}: depends on {other}, which is no service"
                continue
            ends = one_shot(services[other])
            fitting = "service_completed_successfully" if ends else "service_healthy"
            if wait["condition"] != fitting:
                yield f"{name}: depends on {other} by {wait['condition']} instead of {fitting}"
    try:
        graph = {name: service.get("depends_on", {}) for name, service in services.items()}
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as exc:
        yield f"services wait for each other: {' -> '.join(exc.args[1])}"


def images(services: Services, repository: Repository) -> Iterator[str]:
    """Each image has a version, and its registry is the engine's choice."""
    bases = re.findall(r"^FROM (\S+)", repository.dockerfile, re.MULTILINE)
    named = [("deploy/Dockerfile", image, False) for image in bases]
    named += [(name, service["image"], "build" in service) for name, service in services.items()]
    for name, image, built in named:
        repository_name, _, tag = image.partition(":")
        if "/" in tag or "." in repository_name.partition("/")[0]:
            yield f"{name}: the image {image} names a registry"
        elif tag in {"", "latest"} or not (built or re.search(r"\d", tag)):
            yield f"{name}: the image {image} has no version"


def secrets(services: Services, repository: Repository) -> Iterator[str]:
    """No secret has a value here: it is required from outside."""
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            text = "" if value is None else str(value)
            secret = text if is_secret(variable) else ""
            if in_url := re.search(r"://[^:@/]*:(.+)@[^@]*$", text):
                secret = in_url[1]
            if secret and not REQUIRED.fullmatch(secret):
                yield f"{name}: the secret in {variable} is not ${{NAME:?reason}}"
        for found in INTERPOLATION.finditer(json.dumps(service)):
            if is_secret(found["name"]) and not REQUIRED.fullmatch(found[0]):
                yield f"{name}: the secret {found['name']} is not ${{NAME:?reason}}"


def written_secrets(_: Services, repository: Repository) -> Iterator[str]:
    """Nor has it one in the files around."""
    for variable, value in repository.documented.items():
        if is_secret(variable) and value:
            yield f"deploy/.env.example: {variable} is a secret and has a value"
    for line in re.findall(r"^(?:ENV|ARG) .*", repository.dockerfile, re.MULTILINE):
        for variable in re.findall(r"\b([A-Z_]+)\b", line):
            if is_secret(variable):
                yield f"deploy/Dockerfile: {variable} would be in the image"


def variables(services: Services, repository: Repository) -> Iterator[str]:
    """The service reads each variable that it is given, and an operator can find it described."""
    known = repository.variables()
    asked: set[str] = set()
    for name, service in services.items():
        environment = service.get("environment", {})
        asked |= {variable for variable, value in environment.items() if value is None}
        asked |= {found["name"] for found in INTERPOLATION.finditer(json.dumps(service))}
        if "build" in service:
            own = {found["name"] for found in INTERPOLATION.finditer(repository.command(service))}
            for variable in environment:
                if not {variable, variable.removesuffix("_FILE")} & (known | own):
                    yield f"{name}: neither the settings nor its script read {variable}"
    for variable in sorted(asked - set(repository.documented)):
        yield f"deploy/.env.example: does not mention {variable}"
    for variable in sorted(set(repository.documented) - asked):
        yield f"deploy/.env.example: {variable} is used nowhere in {COMPOSE}"


def scripts(services: Services, repository: Repository) -> Iterator[str]:
    """Every script that a service of the project runs is there."""
    for name, service in services.items():
        probe = service.get("healthcheck", {}).get("test", [])
        for script in SCRIPT.findall(" ".join([repository.command(service), *probe])):
            if "build" in service and not (repository.root / script).is_file():
                yield f"{name}: there is no {script}"


def commands(services: Services, repository: Repository) -> Iterator[str]:
    """What the services of the project run is there."""
    for name, service in services.items():
        if "build" not in service:
            continue
        text = repository.command(service)
        management = re.findall(r"\bmanage\.py\s+(\w+)", text)
        modules = re.findall(r"\bcelery\s+-A\s+([\w.]+)", text)
        modules += re.findall(r"\bgranian\s.*?\s([\w.]+):application\b", text)
        if not management and not modules:
            yield f"{name}: runs nothing that this check knows"
        for found in management:
            if not repository.has_command(found):
                yield f"{name}: there is no management command {found}"
        for found in modules:
            if not repository.has_module(found):
                yield f"{name}: there is no module {found}"


def queues(services: Services, repository: Repository) -> Iterator[str]:
    """Each of Celery's queues has a worker, and no worker waits at another."""
    served: set[str] = set()
    for service in services.values():
        for names in re.findall(r"--queues[ =\n]([\w,-]+)", repository.command(service)):
            served |= set(names.split(","))
    declared = set(re.findall(r"\bQueue\(\"([\w-]+)\"", repository.settings))
    for queue in sorted(declared - served):
        yield f"no service works the queue {queue}"
    for queue in sorted(served - declared):
        yield f"pinactivity/settings.py has no queue {queue}"


def mounts(services: Services, repository: Repository, volumes: dict[str, None]) -> Iterator[str]:
    """Volumes are declared and used; files from the repository are there."""
    used: set[str] = set()
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if not source.startswith("."):
                used.add(source)
            elif not (repository.root / source).exists():
                yield f"{name}: there is no {source} to mount"
    for volume in sorted(used ^ set(volumes)):
        yield f"the volume {volume} is {'not declared' if volume in used else 'never used'}"


def image_content(services: Services, repository: Repository) -> Iterator[str]:
    """The image holds the whole service, and its processes are not root."""
    copied: set[str] = set()
    for sources in re.findall(r"^COPY (.+) \S+$", repository.dockerfile, re.MULTILINE):
        copied |= {source.rstrip("/") for source in sources.split()}
    for source in sorted(copied):
        if not (repository.root / source).exists():
            yield f"deploy/Dockerfile: there is no {source} to copy"
    ignored = (repository.root / "deploy" / "Dockerfile.dockerignore").read_text()
    let_in = {path.rstrip("/") for path in re.findall(r"^!(\S+)$", ignored, re.MULTILINE)}
    for source in sorted(copied ^ let_in):
        yield f"deploy/Dockerfile and its .dockerignore do not agree on {source}"
    for package in repository.packages:
        if package not in copied:
            yield f"deploy/Dockerfile: does not copy {package}"
    users = re.findall(r"^USER (\S+)", repository.dockerfile, re.MULTILINE)
    if not users or re.match(r"(?:root|0)(?::|$)", users[-1]):
        yield "deploy/Dockerfile: its processes would be root"


def scraping(services: Services, repository: Repository) -> Iterator[str]:
    """Prometheus asks services that exist."""
    path = Path("deploy", "prometheus", "prometheus.yml")
    config = yaml.load((repository.root / path).read_text(), _Loader)  # noqa: S506 - a SafeLoader
    for job in config["scrape_configs"]:
        for discovery in job.get("dns_sd_configs", []):
            for name in discovery["names"]:
                if name not in services:
                    yield f"{path}: there is no service {name}"


CHECKS: tuple[Callable[[Services, Repository], Iterator[str]], ...] = (
    watching,
    images,
    secrets,
    variables,
    written_secrets,
    scripts,
    commands,
    queues,
    image_content,
    scraping,
)


def by_compose(root: Path, repository: Repository) -> Iterator[str]:
    """Ask Compose itself, where it is installed; it needs no engine for that."""
    docker = shutil.which("docker")
    if docker is None:
        return
    environment = {**os.environ, **dict.fromkeys(repository.documented, "1")}

    def compose(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - constants
            [docker, "compose", *arguments],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    if compose("version").returncode == 0:
        result = compose("--file", COMPOSE, "config", "--quiet")
        if result.returncode:
            yield f"docker compose config: {' '.join(result.stderr.split())}"


def check(root: Path) -> tuple[list[str], int]:
    """Return the faults, and the number of services."""
    try:
        document = yaml.load((root / COMPOSE).read_text(), _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as exc:
        return [" ".join(str(exc).replace('in "<unicode string>", ', "").split())], 0
    schema = json.loads(Path(__file__).with_name("compose.schema.json").read_text())
    if faults := list(form(document, schema)):
        return faults, 0
    services: Services = document["services"]
    repository = Repository(root)
    faults = [fault for one in CHECKS for fault in one(services, repository)]
    faults += mounts(services, repository, document.get("volumes", {}))
    return faults or list(by_compose(root, repository)), len(services)


def main() -> int:
    root = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent
    faults, count = check(root)
    for fault in faults:
        sys.stdout.write(f"{COMPOSE}: {fault}\n")
    if not faults:
        sys.stdout.write(f"{COMPOSE}: ok ({count} services)\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
