"""Checks of addresses: forms of private addresses, schemes, ports, hosts that a recipe allows."""

import ipaddress

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.worlds.browse.addresses import AllowedHosts, is_public, parse_address
from agentfactory.worlds.browse.documents import PageError

NOBODY = AllowedHosts([])

PRIVATE_HOSTS = (
    # decimal, hexadecimal, octal, and shortened forms
    "127.0.0.1 127.8.8.8 2130706433 0x7f000001 0x7f.0.0.1 0177.0.0.1 127.1 127.0.1 0 127.0.0.1. 0.0.0.0 "
    "①②⑦.⓪.⓪.① 127。0。0。1 %31%32%37.0.0.1 "
    # private networks, CGNAT, cloud metadata, and reserved ones
    "10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 192.0.0.192 192.0.2.1 198.18.0.1 192.88.99.1 "
    "224.0.0.1 240.0.0.1 255.255.255.255 "
    # IPv4-compatible, -mapped and -translated, NAT64, 6to4, Teredo
    "[::1] [::] [::127.0.0.1] [::ffff:127.0.0.1] [::ffff:8.8.8.8] [0:0:0:0:0:ffff:7f00:1] [::ffff:0:7f00:1] "
    "[64:ff9b::7f00:1] [64:ff9b:1::7f00:1] [2002:7f00:1::] [2001:0:7f00:1::] "
    "[2001:db8::1] [100::1] [fc00::1] [fd12:3456::1] [fe80::1] [fe80::1%25eth0] [fec0::1] [ff02::1]"
)


@pytest.mark.parametrize("host", PRIVATE_HOSTS.split())
def test_forms_of_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(PageError):
        parse_address(f"http://{host}/latest/meta-data/", NOBODY)


@pytest.mark.parametrize(
    "address",
    [
        *("ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "javascript:alert(1)"),
        *("data:text/html,x", "mailto:a@example.org", "http:///x", "http://", "http://exa mple.org/"),
        *("http://example.org/\r\nHost: x", "http://user:secret@example.org/", "http://user@example.org/"),
        *("http://example.org\\@127.0.0.1/", "http://[::1", "http://example.org:99999/", "http://example.org:22/"),
        *("http://example.org/" + "a" * 2000, "", "\ud800"),
    ],
)
def test_what_is_no_web_address_is_refused(address: str) -> None:
    with pytest.raises(PageError) as refused:
        parse_address(address, NOBODY)
    assert "secret" not in str(refused.value)


def test_addresses_as_models_write_them() -> None:
    for given, meant in {
        "https://example.org/a b".replace(" b", "%20b"): "https://example.org/a%20b",
        "en.wikipedia.org/wiki/Oslo": "https://en.wikipedia.org/wiki/Oslo",
        "//example.org/x": "https://example.org/x",
        "example.org:8443/x": "https://example.org:8443/x",
        " http://example.org/x#part ": "http://example.org/x",
        "http://8.8.8.8/": "http://8.8.8.8/",
        "http://[2606:4700::1111]/": "http://[2606:4700::1111]/",
        "https://de.wikipedia.org/wiki/Köln": "https://de.wikipedia.org/wiki/K%C3%B6ln",
    }.items():
        assert str(parse_address(given, NOBODY)) == meant


def test_nat64_is_judged_by_the_ipv4_address() -> None:
    assert is_public(ipaddress.ip_address("64:ff9b::808:808"))
    assert not is_public(ipaddress.ip_address("64:ff9b::a00:1"))


def test_a_recipe_allows_a_host_on_its_ports_only() -> None:
    allowed = AllowedHosts(["localhost:8000", "Wiki.Internal", "10.0.0.7:9000", "[::1]:8000"])
    for address in (
        *("http://localhost:8000/x", "http://LOCALHOST:8000/", "http://10.0.0.7:9000/", "https://wiki.internal/"),
        "http://[::1]:8000/",
    ):
        parse_address(address, allowed)
    assert allowed.include("wiki.internal", 443)
    assert not allowed.include("wiki.internal", 8000)
    for address in ("http://10.0.0.7/", "http://10.0.0.8:9000/", "http://[::1]:8001/"):
        with pytest.raises(PageError):
            parse_address(address, allowed)


@pytest.mark.parametrize("entry", ["", "http://localhost", "a b", "user@host", "host/path", "host:99999", "*"])
def test_an_entry_that_is_no_host_is_an_error(entry: str) -> None:
    with pytest.raises(SettingError, match="allow_hosts") as error:
        AllowedHosts([entry])
    assert "HOST:PORT" in error.value.fix
