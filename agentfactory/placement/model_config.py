"""Loads a model's configuration, with which its memory is planned before it is loaded or even downloaded."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants
from transformers import AutoConfig, PreTrainedConfig

SHAPES = Path(__file__).with_name("shapes")
"""Copies of the config.json published with the models of our recipes, as ORGANISATION--NAME.json."""

_ANSWER_SECONDS = 5.0


class NoConfigError(Exception):
    """No configuration is available; the message says why."""


def load_config(path: str) -> tuple[PreTrainedConfig, str | None]:
    """Load the configuration of the model in a folder, or of a hub name: from the hub, from earlier downloads, or from
    `SHAPES`. The second value says so if it comes from `SHAPES`. Raises NoConfigError."""
    # the hub's own client tries for half a minute
    offline = not os.path.isabs(path) and not _hub_answers()
    try:
        return AutoConfig.from_pretrained(path, local_files_only=offline), None
    except (OSError, ValueError) as error:
        shape = SHAPES / f"{path.replace('/', '--')}.json"
        if offline and shape.is_file():
            config = AutoConfig.for_model(**json.loads(shape.read_text(encoding="utf-8")))
            return (
                config,
                f"{path}: the hub cannot be reached; shapes are those of AgentFactory's copy of its config.json",
            )
        why = "the hub cannot be reached, and it was not downloaded before" if offline else str(error).splitlines()[0]
        raise NoConfigError(f"the configuration of {path} cannot be had: {why}") from error


def _hub_answers() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_ANSWER_SECONDS)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
