"""Types of options that name a chat endpoint."""

import os
from typing import Annotated

from pydantic import AfterValidator


def _is_address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an address; start it with http:// or https://")
    if "@" in url or "?" in url:
        raise ValueError("it has a user or a query, which errors would save; name a key by api_key_env")
    return url.rstrip("/")


def _is_set(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError("this environment variable is not set; export it")
    return name


Address = Annotated[str, AfterValidator(_is_address)]
KeyVariable = Annotated[str, AfterValidator(_is_set)]
"""The name of an environment variable that holds a key."""
