"""Access to the Hugging Face Hub, with an offline fallback."""

import os
import sys
from functools import cache
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

_ANSWER_SECONDS = 5.0


def has_tokenizer(model: str) -> bool:
    """Return whether the tokenizer of a model folder or hub name is available on this machine."""
    if os.path.isabs(model):
        return any(Path(model).glob("tokenizer*"))
    return isinstance(try_to_load_from_cache(model, "tokenizer_config.json"), str)


def use_hub_if_it_answers() -> None:
    """Switch this process to offline mode, with a warning on stderr, if one request to the hub fails: the hub's client
    retries for half a minute per file."""
    if not constants.HF_HUB_OFFLINE and (problem := _problem_of_hub()) is not None:
        constants.HF_HUB_OFFLINE = True
        text = f"the hub cannot be reached ({problem}); only cached downloads are used"
        print(text, file=sys.stderr, flush=True)


def hub_answers() -> bool:
    """Return whether the hub answers within 5 seconds; False in offline mode."""
    return not constants.HF_HUB_OFFLINE and _problem_of_hub() is None


@cache
def _problem_of_hub() -> str | None:
    """Return why the hub does not answer, directly or through a proxy of the environment; None if it does."""
    try:
        # the client that downloads, so that both take the same way
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
    except Exception as error:  # boundary: the network, and the proxy and the libraries on the way to it
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return None
