"""Real servers out of pip wheels, for development, tests and `make up`; production has its own.

    with EmbeddedStack(Path(".data")) as stack:
        run_something(env=os.environ | stack.environment)
"""

from embedded.errors import EmbeddedServerError
from embedded.stack import EmbeddedStack, attach, private_server

__all__ = ["EmbeddedServerError", "EmbeddedStack", "attach", "private_server"]
