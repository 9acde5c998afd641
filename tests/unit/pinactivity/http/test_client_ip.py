"""The client's address (C35): canonical or nothing, and never what the client claims."""

from typing import Any

import pytest
from django.test import RequestFactory

from pinactivity.http.client_ip import client_ip, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        (" 192.0.2.1\t", "192.0.2.1"),
        ("10.1.2.3:88", "10.1.2.3"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::FFFF:c000:0201", "192.0.2.1"),
        ("[::ffff:192.0.2.1]:80", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("[fe80::1%eth0]:443", "fe80::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("2001:0DB8:0000:0000:0000:0000:0000:0001", "2001:db8::1"),
        ("::1", "::1"),
        ("::", "::"),
        ("255.255.255.255", "255.255.255.255"),
    ],
)
def test_address_is_read_in_canonical_form_c35(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "unknown",
        "_hidden",
        "localhost",
        "unix:",
        "256.1.1.1",
        "1.2.3",
        "1.2.3.4.5",
        "01.2.3.4",
        "1.2.3.4/8",
        "3232235777",
        "0x7f000001",
        "1.2.3.٤",
        "2001:db8::1::2",
        "2001:db8:::1",
        "[",
        "[]",
        "[]:80",
        ":",
        ":80",
        "\x00",
        "192.0.2.1\x00",
        "' OR 1=1 --",
        "9" * 100_000,
        ":" * 100_000,
        "\ud83d",
    ],
)
def test_text_that_is_no_address_is_nothing_c35(text: str) -> None:
    assert parse_address(text) is None


def address_of(settings: Any, *, proxies: int, forwarded: str | None, socket: str) -> str | None:
    settings.TRUSTED_PROXY_COUNT = proxies
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    return client_ip(RequestFactory().get("/", headers=headers, REMOTE_ADDR=socket))


@pytest.mark.parametrize("forwarded", [None, "", "198.51.100.1", "a, b, 198.51.100.1"])
def test_without_proxies_the_header_is_ignored_c35(settings: Any, forwarded: str | None) -> None:
    address = address_of(settings, proxies=0, forwarded=forwarded, socket="203.0.113.7")
    assert address == "203.0.113.7"


@pytest.mark.parametrize(
    ("proxies", "forwarded", "address"),
    [
        (1, "198.51.100.1", "198.51.100.1"),
        (1, "6.6.6.6, 198.51.100.1", "198.51.100.1"),
        (1, "6.6.6.6,7.7.7.7,198.51.100.1:5123", "198.51.100.1"),
        (2, "6.6.6.6, 198.51.100.1, 10.0.0.2", "198.51.100.1"),
        (3, "6.6.6.6, 198.51.100.1, 10.0.0.3, 10.0.0.2", "198.51.100.1"),
        (1, "198.51.100.1, unknown", None),
        (1, "198.51.100.1,", None),
        (2, "198.51.100.1", None),
        (1, "", None),
        (1, None, None),
    ],
)
def test_behind_proxies_the_address_is_what_the_first_of_ours_saw_c35(
    settings: Any, proxies: int, forwarded: str | None, address: str | None
) -> None:
    assert address_of(settings, proxies=proxies, forwarded=forwarded, socket="10.0.0.1") == address


def test_request_without_a_socket_address_has_none(settings: Any) -> None:
    assert address_of(settings, proxies=0, forwarded="198.51.100.1", socket="") is None
