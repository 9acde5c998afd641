"""The environment that the servers themselves run in."""

import os
from collections.abc import Mapping
from typing import Final

PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK: Final = "127.0.0.1,localhost"


def server_environment() -> dict[str, str]:
    """Build it from scratch, since variables such as PGOPTIONS or STORAGE_ENGINE change servers."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps clients of the servers away from the proxy that an environment names."""
    if not any(name.lower() in PROXIES and environ[name] for name in environ):
        return {}
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if given.strip() == "*":
        return {}
    hosts = f"{given},{LOOPBACK}" if given else LOOPBACK
    return {"no_proxy": hosts, "NO_PROXY": hosts}
