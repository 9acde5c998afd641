"""Health check inside a container: `python deploy/probe.py PORT PATH` succeeds on a 200.

It requests from the container's own address, which the web allows as a host, and follows no
redirect.
"""

import http.client
import socket
import sys


def main(port: str, path: str) -> None:
    """Exit with a reason unless the answer is 200.

    Args:
        port: On the container's own address.
        path: Of the health endpoint.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
        connection = http.client.HTTPConnection(address, int(port), timeout=4)
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as exc:
        sys.exit(f"{path}: {type(exc).__name__}")
    if status != http.HTTPStatus.OK:
        sys.exit(f"{path}: {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
