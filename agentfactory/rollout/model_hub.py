"""The hub of models and data sets, where it may be out of reach."""

import os
import sys
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

_ANSWER_SECONDS = 5.0


def has_tokenizer(model: str) -> bool:
    """Return whether the tokenizer of a model folder or hub name is on this machine."""
    if os.path.isabs(model):
        return any(Path(model).glob("tokenizer*"))
    return isinstance(try_to_load_from_cache(model, "tokenizer_config.json"), str)


def use_hub_if_it_answers() -> None:
    """Ask the hub once; if it does not answer, let this process use only what was downloaded before, and say so: the
    hub's own client tries for half a minute, for each file."""
    if not constants.HF_HUB_OFFLINE and not hub_answers():
        constants.HF_HUB_OFFLINE = True
        print("the hub cannot be reached: only what was downloaded before is used", file=sys.stderr, flush=True)


@cache
def hub_answers() -> bool:
    """Return whether the hub answers within seconds, and may be used."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_ANSWER_SECONDS)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
