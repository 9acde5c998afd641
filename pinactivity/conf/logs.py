"""Logs by structlog: one JSON object a line, or readable lines in development.

The loggers of libraries use the same formatter. An exception's text may quote a row (PostgreSQL's
DETAIL) or a request, so no line has it. A line has the exception's class and, of a database error,
SQLSTATE and constraint (design, section 13).
"""

import logging.config
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import structlog

from pinactivity.core.error_info import describe_error


def _replace_exception_text(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Replace `exc_info` by class, codes and the lines of the stack, without the message."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    elif isinstance(info, BaseException):
        info = (type(info), info, info.__traceback__)
    if isinstance(info, tuple) and info[1] is not None:
        event.update(describe_error(info[1]))
        frames = traceback.extract_tb(info[2])[-8:]
        event["frames"] = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames]
    return event


class NameExceptions(logging.Filter):
    """Replaces every exception among a line's arguments by its class."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, Mapping):
            record.args = {name: _named(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_named, record.args))
        record.msg = _named(record.msg)
        return True


def _named(value: Any) -> Any:
    return type(value).__qualname__ if isinstance(value, BaseException) else value


_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _replace_exception_text,
]


# A constant, because a logger keeps the list of its first line.
_PROCESSORS: list[structlog.typing.Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    *_SHARED,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]


def logging_config(*, level: str, readable: bool) -> dict[str, Any]:
    """Build the dictionary of `logging.config`, for Django's LOGGING."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=False)
        if readable
        else structlog.processors.JSONRenderer()
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "structlog": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": [structlog.stdlib.ExtraAdder(allow=[]), *_SHARED],
                "processors": [
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    renderer,
                ],
            }
        },
        "filters": {"name_exceptions": {"()": NameExceptions}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "structlog",
                "filters": ["name_exceptions"],
            }
        },
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # Their INFO lines report every poll and every task; ours report the results.
            "kafka": {"level": "WARNING"},
            "kafka.coordinator": {"level": "ERROR"},  # warns that a reader without group has none
            "celery.app.trace": {"level": "CRITICAL"},  # quotes exceptions; see celery.py
            "celery.worker.strategy": {"level": "WARNING"},
            "celery.beat": {"level": "WARNING"},
            "django.request": {"level": "ERROR"},
            "django.security.DisallowedHost": {"level": "CRITICAL"},  # anybody can send one
        },
    }


def configure(config: dict[str, Any]) -> None:
    """Set up logging; Django calls this with LOGGING, by the setting LOGGING_CONFIG."""
    logging.config.dictConfig(config)
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
