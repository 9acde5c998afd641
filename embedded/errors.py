"""The one error of this package that a person is meant to read."""

import errno
import re
from pathlib import Path
from typing import Final

REASON: Final = re.compile(r"error|fatal|denied|refused|cannot|could not", re.IGNORECASE)


class EmbeddedServerError(Exception):
    """An embedded server could not be had; the message says what happened and what to do."""


class StartGivenUpError(EmbeddedServerError):
    """The start was given up because another server of the stack had failed."""


def explain_os_error(error: OSError, *, what: str) -> EmbeddedServerError:
    """Translate an operating system error met while doing `what`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(what)
    return EmbeddedServerError(f"{what}: {error}.")


def disk_full(what: str) -> EmbeddedServerError:
    """Build the error for a disk without space left, met while doing `what`."""
    return EmbeddedServerError(
        f"{what}: no space left on the disk. Free some space, or use another data folder "
        "(--data-dir)."
    )


def reason_in(log: Path, text: str) -> str:
    """Say in one line what the end of a log gives as the reason, and where the log is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if REASON.search(line)]
    (reason,) = (reasons or lines or ["it printed nothing"])[-1:]
    return f"{reason} (its log: {log})"
