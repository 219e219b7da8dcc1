"""Loopback addresses, which only this machine reaches, and their network interface."""

import ipaddress

import psutil


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is that of loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_interface() -> str | None:
    """Return the name of the interface that has 127.0.0.1; None if there is none."""
    addresses = psutil.net_if_addrs().items()
    return next((name for name, found in addresses if any(each.address == "127.0.0.1" for each in found)), None)
