"""What is logged, as production or development would write it."""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pinactivity.conf.logs import logging_config


@contextmanager
def formatted_lines(*, readable: bool) -> Iterator[Callable[[], str]]:
    """Format everything that is logged, from DEBUG on, in the block; yield what returns it."""
    config = logging_config(level="DEBUG", readable=readable)
    formatter = dict(config["formatters"]["structlog"])
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(formatter.pop("()")(**formatter))
    for name in config["handlers"]["stderr"].get("filters", []):
        handler.addFilter(config["filters"][name]["()"]())
    root = logging.getLogger()
    others, level = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(logging.DEBUG)
    try:
        yield output.getvalue
    finally:
        root.handlers = others
        root.setLevel(level)
