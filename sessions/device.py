"""Browser, system and type of a device, from its User-Agent."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import ua_parser


class DeviceType(StrEnum):
    DESKTOP = "Desktop"
    MOBILE = "Mobile"
    TABLET = "Tablet"
    BOT = "Bot"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a session. Only browser, os and type may leave PostgreSQL."""

    user_agent: str
    ip_address: str | None
    browser: str
    os: str
    device_type: DeviceType


_DESKTOP_SYSTEMS = (
    "Windows",
    "Mac OS X",
    "Linux",
    "Ubuntu",
    "Fedora",
    "Debian",
    "Chrome OS",
    "FreeBSD",
)
_PHONES = ("iPhone", "iPod", "Windows Phone", "BlackBerry", "Opera Mini", "Generic Smartphone")


def identify_device(user_agent: str, ip_address: str | None) -> Device:
    """Describe the device that sent a User-Agent (1 to 1024 characters) from an address."""
    browser, system, device_type = _parse(user_agent)
    return Device(user_agent, ip_address, browser, system, device_type)


@lru_cache(maxsize=20_000)
def _parse(user_agent: str) -> tuple[str, str, DeviceType]:
    result = ua_parser.parse(user_agent)
    browser = result.user_agent
    system = result.os
    family = result.device.family if result.device else ""
    return (
        _named(browser.family, browser.major) if browser else "",
        _named(system.family, system.major) if system else "",
        _classify(user_agent, family, system.family if system else ""),
    )


def _named(family: str, major: str | None) -> str:
    return f"{family} {major}"[:64] if major else family[:64]


def _classify(user_agent: str, family: str, system: str) -> DeviceType:
    if family == "Spider":
        return DeviceType.BOT
    if "iPad" in family or "Tablet" in user_agent.replace("Tablet PC", "") or "Kindle" in family:
        return DeviceType.TABLET
    if system == "Android":
        # Google's rule: only a phone's User-Agent contains Mobile.
        return DeviceType.MOBILE if "Mobile" in user_agent else DeviceType.TABLET
    if any(phone in family or phone in user_agent for phone in _PHONES):
        return DeviceType.MOBILE
    if system.startswith(_DESKTOP_SYSTEMS):
        return DeviceType.DESKTOP
    return DeviceType.UNKNOWN
