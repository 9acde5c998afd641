"""Real servers out of pip wheels, for development, tests and `make up`; production has its own.

`with EmbeddedStack(Path(".data")) as stack:` starts what the environment lacks, and
`stack.environment` is what a process needs to use it.
"""

from embedded.errors import EmbeddedServerError
from embedded.stack import EmbeddedStack, attach, private_server

__all__ = ["EmbeddedServerError", "EmbeddedStack", "attach", "private_server"]
