"""The device of a User-Agent, for the shipped list of real ones."""

from pathlib import Path

import pytest

from sessions.device import Device, DeviceType, identify_device

USER_AGENTS = (
    (Path(__file__).resolve().parents[3] / "data" / "user-agents.txt").read_text().splitlines()
)


def test_shipped_list_holds_558_different_user_agents_that_the_api_accepts() -> None:
    assert len(USER_AGENTS) == len(set(USER_AGENTS)) == 558
    assert [each for each in USER_AGENTS if not 1 <= len(each.strip()) <= 1024] == []


def test_every_shipped_user_agent_is_identified() -> None:
    for user_agent in USER_AGENTS:
        device = identify_device(user_agent, "192.0.2.1")
        assert device.user_agent == user_agent
        assert device.ip_address == "192.0.2.1"
        assert device.device_type in DeviceType
        assert len(device.browser) <= 64
        assert len(device.os) <= 64


def test_shipped_list_has_every_type_of_device() -> None:
    assert {identify_device(each, None).device_type for each in USER_AGENTS} == set(DeviceType)


CHROME = "AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0"
SAMPLES = {
    f"Mozilla/5.0 (Windows NT 10.0; Win64; x64) {CHROME} Safari/537.36": (
        "Chrome 120",
        "Windows 10",
        DeviceType.DESKTOP,
    ),
    "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:26.0) Gecko/20100101 Firefox/26.0": (
        "Firefox 26",
        "Ubuntu",
        DeviceType.DESKTOP,
    ),
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko)"
    " Version/17.1 Safari/605.1.15": ("Safari 17", "Mac OS X 10", DeviceType.DESKTOP),
    f"Mozilla/5.0 (X11; CrOS x86_64 14541.0.0) {CHROME} Safari/537.36": (
        "Chrome 120",
        "Chrome OS 14541",
        DeviceType.DESKTOP,
    ),
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_1 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like"
    " Gecko) Version/17.1 Mobile/15E148 Safari/604.1": (
        "Mobile Safari 17",
        "iOS 17",
        DeviceType.MOBILE,
    ),
    f"Mozilla/5.0 (Linux; Android 10; K) {CHROME} Mobile Safari/537.36": (
        "Chrome Mobile 120",
        "Android 10",
        DeviceType.MOBILE,
    ),
    f"Mozilla/5.0 (Linux; Android 13; SM-X700) {CHROME} Safari/537.36": (
        "Chrome 120",
        "Android 13",
        DeviceType.TABLET,
    ),
    "Mozilla/5.0 (iPad; CPU OS 6_1_3 like Mac OS X) AppleWebKit/536.26 (KHTML, like Gecko)"
    " Version/6.0 Mobile/10B329 Safari/8536.25": (
        "Mobile Safari 6",
        "iOS 6",
        DeviceType.TABLET,
    ),
    "Mozilla/5.0 (Android; Tablet; rv:27.0) Gecko/27.0 Firefox/27.0": (
        "Firefox Mobile 27",
        "Android",
        DeviceType.TABLET,
    ),
    "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)": (
        "Googlebot 2",
        "",
        DeviceType.BOT,
    ),
    "Mozilla/5.0 (iPhone; CPU iPhone OS 6_0 like Mac OS X) AppleWebKit/536.26 (KHTML, like"
    " Gecko) Version/6.0 Mobile/10A5376e Safari/8536.25 (compatible; Googlebot/2.1;"
    " +http://www.google.com/bot.html)": ("Googlebot 2", "iOS 6", DeviceType.BOT),
    "Mozilla/5.0 (compatible; YandexBot/3.0; +http://yandex.com/bots)": (
        "YandexBot 3",
        "",
        DeviceType.BOT,
    ),
    # "Tablet PC" is a component of desktop Windows, not a device.
    "Mozilla/4.0 (compatible; MSIE 8.0; Windows NT 6.1; Trident/4.0; .NET CLR 2.0.50727;"
    " Tablet PC 2.0)": ("IE 8", "Windows 7", DeviceType.DESKTOP),
    "Mozilla/5.0 (X11; FreeBSD amd64) AppleWebKit/537.36 (KHTML, like Gecko)"
    " Chrome/30.0.1599.101 Safari/537.36": ("Chrome 30", "FreeBSD", DeviceType.DESKTOP),
    "-": ("", "", DeviceType.UNKNOWN),
    "&as_qdr=all": ("", "", DeviceType.UNKNOWN),
}


@pytest.mark.parametrize(("user_agent", "expected"), SAMPLES.items(), ids=range(len(SAMPLES)))
def test_known_device_is_recognised(user_agent: str, expected: tuple[str, str, DeviceType]) -> None:
    browser, system, device_type = expected
    assert identify_device(user_agent, None) == Device(
        user_agent, None, browser, system, device_type
    )


@pytest.mark.parametrize(
    "user_agent",
    [
        "\x80\xff",
        "Ж" * 1024,
        "(" * 1024,
        "Mozilla/5.0 " + ";" * 1000,
        "Mozilla/5.0 (" + "Android " * 120 + ")",
        "Chrome/" + "9" * 1000,
        ("a/1 " * 256).strip(),
        "%s{}$()<script>",
    ],
    ids=range(8),
)
def test_hostile_user_agent_is_identified_as_something_short(user_agent: str) -> None:
    device = identify_device(user_agent, None)
    assert device.user_agent == user_agent
    assert len(device.browser) <= 64
    assert len(device.os) <= 64
