"""Environments of child processes. Code of others gets no key of this process: only settings of the system and of
libraries, from a list, and the variables that the recipe names in `env`."""

import os
import re
from collections.abc import Iterable, Mapping

VARIABLE = "AGENTFACTORY_ENV"
"""Variable with the names that the recipe's `env` has, separated by commas. Child processes inherit it."""

_SETTINGS = re.compile(
    # the system's, with those that the MCP SDK passes
    r"HOME|LANG|LANGUAGE|LC_\w+|LOGNAME|PATH|SHELL|TERM|TMPDIR|TZ|USER|XDG_\w+|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|"
    r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|"
    # Python's, and its libraries'
    r"PYTHON(PATH|HASHSEED|UTF8|IOENCODING|UNBUFFERED|DONTWRITEBYTECODE|PYCACHEPREFIX|MALLOC|FAULTHANDLER)|VIRTUAL_ENV|"
    r"(OMP|MKL|OPENBLAS|KMP|NUMEXPR|RAYON|GOTO)_\w+|ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA|CUDA_VISIBLE_DEVICES|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE|ENDPOINT)|TRANSFORMERS_(CACHE|OFFLINE)|"
    r"TOKENIZERS_PARALLELISM|NLTK_DATA|JAVA_HOME|DISPLAY|PLAYWRIGHT_BROWSERS_PATH|"
    r"DOCKER_(HOST|CONFIG|CONTEXT)|CONTAINER_HOST"
)
"""Variables without secrets, which programs and libraries need to work as they do here."""
_PROXY = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)


def name_variables(names: Iterable[str]) -> None:
    """Give the variables `names` to all processes with code of others that this one and its children start."""
    os.environ[VARIABLE] = ",".join(names)


def named() -> list[str]:
    """Return the variables that the recipe names, so that code of others may read them."""
    return os.environ.get(VARIABLE, "").split(",")


def is_named(name: str) -> bool:
    return name in named()


def is_setting(name: str) -> bool:
    """Return whether every process gets a variable, since it sets up the system or a library."""
    return _SETTINGS.fullmatch(name) is not None


def for_others(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process with code of others, with further `variables`."""
    found = {name: value for name, value in os.environ.items() if is_setting(name) or is_named(name)}
    return found | dict(variables or {})


def for_chains(names: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of our processes that run chains: that of code of others, proxies, and `names`."""
    wanted = {VARIABLE, *names}
    own = {name: value for name, value in os.environ.items() if name in wanted or _PROXY.fullmatch(name)}
    return for_others() | own | dict(variables)
