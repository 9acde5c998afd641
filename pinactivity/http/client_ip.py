"""The client's address, as far as it can be trusted (design, section 13)."""

import ipaddress
from functools import lru_cache

from django.conf import settings
from django.http import HttpRequest


def client_ip(request: HttpRequest) -> str | None:
    """Return the client's address in canonical form, or None when it cannot be read.

    Without proxies it is the address of the socket. Each of our TRUSTED_PROXY_COUNT proxies
    appends the address that it saw to X-Forwarded-For. The client's is the entry of the outermost
    of them, the count-th from the right. Anybody may have written the entries to the left of it.
    """
    address = request.META.get("REMOTE_ADDR", "")
    if proxies := settings.TRUSTED_PROXY_COUNT:
        hops = request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")
        address = hops[-proxies] if len(hops) >= proxies else ""
    return parse_address(address)


@lru_cache(maxsize=10_000)
def parse_address(text: str) -> str | None:
    """Read an address as proxies write it, which may have a port, brackets or a zone.

    Returns:
        The address in canonical form; None if the text is no address.
    """
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)
