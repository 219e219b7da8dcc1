"""Addresses of servers in a recipe."""

from urllib.parse import urlsplit


def is_http_address(url: str) -> bool:
    """Return whether `url` is http or https, with a host and a possible port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65,535, half an IPv6 address
        return False
