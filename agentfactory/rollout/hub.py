"""The hub of models and data sets, where it may be out of reach."""

import sys
import urllib.error
import urllib.request
from functools import cache

from huggingface_hub import constants

_ANSWER_SECONDS = 5.0


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
