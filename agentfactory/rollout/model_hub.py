"""Access to the Hugging Face Hub, with an offline fallback."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import proxy_for
from agentfactory.base.processes.threads import call_within
from agentfactory.rollout.config import RolloutRecipe

_ANSWER_SECONDS = 4.0
"""Time limit of connecting to the hub, and of each part of its answer."""
_ASK_SECONDS = 6.0
"""Time limit of a request, including the look-up of the hub's address, which has none of its own."""
_WEIGHTS = ("*.safetensors", "*.bin")
_BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which the hub's client repeats a request."""
_NOT_FOUND, _TOO_MANY = 404, 429

Kind = Literal["model", "dataset"]


class HubName(NamedTuple):
    """The name of a model or dataset on the hub, and the recipe's field that gives it."""

    field: str
    name: str
    kind: Kind


class OutOfReach(SettingError):
    """Something of the hub is not on this machine, and the hub cannot be reached from here."""


class _Refusal(NamedTuple):
    """A reason why something cannot be loaded from the hub, and its fix. `is_reached` if the hub itself answered."""

    problem: str
    fix: str
    is_reached: bool


def stored_file(model: str, name: str) -> Path | None:
    """Return a file of a model folder or hub name; None if it is not on this machine."""
    found = try_to_load_from_cache(model, name) if is_hub_name(model) else os.path.join(model, name)
    return Path(found) if isinstance(found, str) and os.path.isfile(found) else None


def has_tokenizer(model: str) -> bool:
    """Return whether the tokenizer of a model folder or hub name is available on this machine."""
    if os.path.isabs(model):
        return any(Path(model).glob("tokenizer*"))
    return stored_file(model, "tokenizer_config.json") is not None


def is_downloaded(name: str, kind: Kind) -> bool:
    """Return whether a model's weights or a dataset's files are in the hub's cache."""
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if kind == "model":
        return any(any(folder.glob(f"*/{pattern}")) for pattern in _WEIGHTS)
    return folder.is_dir() and any(folder.iterdir())


def model_names(recipe: RolloutRecipe) -> list[HubName]:
    named = {"model.path": recipe.model.path, "server.model": recipe.server.model}
    return [HubName(field, name, "model") for field, name in named.items() if name and is_hub_name(name)]


def load_fault(error: Exception) -> str:
    """Return transformers' reason for not loading a model, without its advice to run code from the model's folder."""
    reason, advice, _ = str(error).partition(" You can inspect the repository")
    return f"{reason} AgentFactory never runs it" if advice else reason


def is_hub_name(name: str) -> bool:
    """Return whether a model or dataset of this name is looked up on the hub, and not on this machine."""
    return not os.path.isabs(name) and not os.path.exists(name)


def check_names(wanted: Iterable[HubName]) -> None:
    """Raise SettingError, within seconds, if one of these names can neither be fetched nor was downloaded before. If
    the hub cannot be reached, warn on stderr, and go offline: the hub's client would retry for half a minute."""
    for field, name, kind in wanted:
        if (refusal := _refusal(name, kind)) is None:
            continue
        if refusal.is_reached:
            raise SettingError(field, refusal.problem, refusal.fix)
        if not is_downloaded(name, kind):
            folder = "a folder with a model" if kind == "model" else "a file"
            problem = f"{name} is not on this machine, and {refusal.problem}"
            raise OutOfReach(field, problem, f"{refusal.fix}, or name {folder}")
        _go_offline(refusal)


def check_answers(field: str) -> None:
    """Raise SettingError for `field`, which needs the hub, if the hub does not answer, or offline mode is set."""
    if (refusal := _refusal()) is not None:
        raise SettingError(field, refusal.problem, refusal.fix)


def use_hub_if_it_answers(name: str | None = None, kind: Kind = "model") -> None:
    """Switch to offline mode, with a warning on stderr, if the hub does not answer a request (for `name`)."""
    if (refusal := _refusal(name, kind)) is not None and not refusal.is_reached:
        _go_offline(refusal)


def hub_answers(model: str) -> bool:
    """Return whether the hub answers a request for a model within seconds; False in offline mode."""
    return (refusal := _refusal(model)) is None or refusal.is_reached


_why_offline = _Refusal("HF_HUB_OFFLINE is set", "unset it", is_reached=False)


def _refusal(name: str | None = None, kind: Kind = "model") -> _Refusal | None:
    if constants.HF_HUB_OFFLINE:
        return _why_offline
    return _refusal_of_hub() if name is None else _refusal_of(name, kind)


def _go_offline(refusal: _Refusal) -> None:
    global _why_offline
    if constants.HF_HUB_OFFLINE:
        return
    _why_offline = refusal
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (loaded := sys.modules.get("datasets.config")) is not None:
        # it has copied the constant
        loaded.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    print(f"agentfactory: {refusal.problem}; only earlier downloads are used", file=sys.stderr, flush=True)


@cache
def _refusal_of(name: str, kind: Kind) -> _Refusal | None:
    # imported here, because most recipes name folders
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    def ask() -> None:
        # the client that downloads, so that both take the same way
        hub = HfApi()
        if hub.repo_info(name, repo_type=kind, timeout=_ANSWER_SECONDS).gated:
            hub.auth_check(name, repo_type=kind)

    try:
        return _refusal_by(ask)
    except GatedRepoError:
        fix = f"accept them at {constants.ENDPOINT}/{name}, and `hf auth login`"
        return _Refusal(f"{name} requires accepting its terms", fix, is_reached=True)
    except (RepositoryNotFoundError, HfHubHTTPError):
        return _Refusal(f"{name} is not on the hub, or private", "correct the name, or `hf auth login`", True)
    except HFValidationError:
        return _Refusal(f"{name!r} is neither a path nor a name on the hub", "correct it", is_reached=True)


@cache
def _refusal_of_hub() -> _Refusal | None:
    def ask() -> None:
        response = get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
        # the root of a mirror may be forbidden, or not exist
        if response.status_code in _BUSY:
            response.raise_for_status()

    return _refusal_by(ask)


def _refusal_by(ask: Callable[[], None]) -> _Refusal | None:
    """Return why a request to the hub gets no answer; None if it gets one. Raises what the hub says of a repository."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    status = None
    try:
        call_within(ask, _ASK_SECONDS)
        return None
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError):
        raise
    except TimeoutError:
        reason = f"no answer within {_ASK_SECONDS:g} s"
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == _NOT_FOUND:
            raise
        reason = f"its answer is {status} {error.response.reason_phrase}"
    except Exception as error:  # boundary: the network, and the proxy and the libraries on the way to it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    try:
        proxy = proxy_for(constants.ENDPOINT)
    except SettingError as error:
        return _Refusal(f"the hub cannot be reached: {error.field}: {error.problem}", error.fix, is_reached=False)
    way = f" through {proxy}" if proxy is not None else ""
    if status == _TOO_MANY:
        fix = "wait some minutes, log in by `hf auth login`"
    elif "CERTIFICATE" in reason.upper():
        fix = "name the certificates of your network in SSL_CERT_FILE"
    elif proxy is not None:
        fix = f"correct {proxy.variable}"
    elif constants.ENDPOINT != "https://huggingface.co":
        fix = "correct HF_ENDPOINT"
    else:
        fix = "connect this machine, set HF_ENDPOINT to a mirror"
    return _Refusal(f"the hub cannot be reached: {constants.ENDPOINT}{way}: {reason}", fix, is_reached=False)
