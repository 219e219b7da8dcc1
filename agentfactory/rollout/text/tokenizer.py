"""A model's tokenizer and its end-of-sequence tokens."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agentfactory.base.errors import SettingError
from agentfactory.rollout.model_hub import load_fault


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name, ignoring truncation and padding set in its files. Raises
    ValueError if there is none.

    transformers' AutoTokenizer takes seconds to import and loads torch. It is used only for models whose files name a
    special tokenizer class; otherwise the tokenizer file is loaded directly.
    """
    try:
        config = cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        name = json.loads(Path(config).read_text(encoding="utf-8")).get("tokenizer_class") if config else None
        if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            loader: Any = PreTrainedTokenizerFast
        else:
            from transformers import AutoTokenizer as loader
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = f"{path} has no tokenizer that transformers can load: {load_fault(error)}"
        raise SettingError("model.path", problem, "name a model with its tokenizer") from error
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def stop_ids(path: str) -> list[int]:
    """Return the ids at which servers end a turn: those in generation_config.json, or in config.json if that is
    missing."""
    for name in ("generation_config.json", "config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            config = _object(json.loads(Path(file).read_text(encoding="utf-8")))
            ids = config.get("eos_token_id")
            if ids is None:
                ids = _object(config.get("text_config")).get("eos_token_id")
            found = ids if isinstance(ids, list) else [] if ids is None else [ids]
            for number in found:
                if type(number) is not int or not 0 <= number < 2**31:
                    problem = f"{path} has the end of sequence {number!r:.100} in {name}"
                    raise SettingError("model.path", problem, "write ids of its tokens as eos_token_id")
            return found
    return []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
