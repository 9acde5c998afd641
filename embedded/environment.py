"""The environment that the servers themselves run in."""

import os


def server_environment() -> dict[str, str]:
    """Build it from scratch, since variables such as PGOPTIONS or STORAGE_ENGINE change servers."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}
