"""The consumer of `tests.echo` in processes of its own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.consuming import (
    Bench,
)
from tests.processes import running, wait_until


@dataclass
class Echo:
    """The consumer of `tests.echo` in processes of its own."""

    bench: Bench
    folder: Path
    age: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def numbers(self) -> list[int]:
        file = self.folder / "numbers"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def run(self, *arguments: str, **variables: str) -> Any:
        return running(
            [sys.executable, "manage.py", "consume", "echo", *arguments],
            self.log,
            DJANGO_SETTINGS_MODULE="tests.echo.settings",
            ECHO_TOPIC=self.bench.topic,
            ECHO_GROUP=self.bench.group,
            ECHO_FILE=str(self.folder / "numbers"),
            ECHO_AGE=str(self.age),
            **variables,
        )

    def wait_for(self, condition: Callable[[], object]) -> None:
        try:
            wait_until(condition, seconds=90, what="what the process should do")
        except AssertionError:
            raise AssertionError(self.log.read_text()[-3000:]) from None
