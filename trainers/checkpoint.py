"""Checkpoints: folders that transformers, peft, the server and the next stage load as they are."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainers.policy import Policy


def save_checkpoint(
    folder: Path,
    step: int,
    policy: Policy,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
) -> Path:
    """Writes `folder`/step-000080 (for step 80) aside, makes it durable, then gives it its name; returns its path.

    It holds the model in the transformers format in the policy's dtype, or the adapter in peft's (its
    adapter_config.json names the base), the tokenizer with the chat template that `tokenizer` carries, and
    `trainer_state.json` with the step and `info`. `state` are the policy's gathered weights. One process calls it.
    Raises FileExistsError where the checkpoint is already there.
    """
    path = folder / f"step-{step:06d}"
    if path.exists():
        raise FileExistsError(f"{path} is already there: a run never overwrites a checkpoint")
    aside = folder / f".{path.name}.partial"
    if aside.exists():
        # left by a run that was killed in the middle of writing
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    if policy.is_lora:
        policy.save_adapter(aside, state)
    else:
        policy.network.save_pretrained(aside, state_dict=state)
        _set_dtype(aside / "config.json", str(policy.dtype).removeprefix("torch."))
    tokenizer.save_pretrained(aside)
    state_file = aside / "trainer_state.json"
    state_file.write_text(json.dumps({"step": step, **info}, indent=2, ensure_ascii=False), encoding="utf-8")
    for file in [*aside.iterdir(), aside]:
        _flush(file)
    aside.rename(path)
    _flush(folder)
    return path


def _set_dtype(file: Path, dtype: str) -> None:
    """transformers notes the precision of the weights in memory (float32), not of those it was given to write."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
