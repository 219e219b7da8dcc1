"""Access to the Hugging Face Hub, with an offline fallback."""

import os
import sys
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

_ANSWER_SECONDS = 5.0


def has_tokenizer(model: str) -> bool:
    """Return whether the tokenizer of a model folder or hub name is available on this machine."""
    if os.path.isabs(model):
        return any(Path(model).glob("tokenizer*"))
    return isinstance(try_to_load_from_cache(model, "tokenizer_config.json"), str)


def use_hub_if_it_answers() -> None:
    """Switch this process to offline mode, with a warning on stderr, if one request to the hub fails: the hub's client
    retries for half a minute per file."""
    if not constants.HF_HUB_OFFLINE and not hub_answers():
        constants.HF_HUB_OFFLINE = True
        print("the hub cannot be reached; only cached downloads are used", file=sys.stderr, flush=True)


@cache
def hub_answers() -> bool:
    """Return whether the hub answers within 5 seconds; False in offline mode."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_ANSWER_SECONDS)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
