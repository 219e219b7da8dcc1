"""The plan of time, by hand: weights, tokens and the seconds that a machine takes for them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from agentfactory.base.processes.devices import Speed
from agentfactory.launching import time_plan
from agentfactory.launching.time_plan import Lengths, Size, plan_time, plan_times
from agentfactory.recipe.schema import Recipe

pytestmark = pytest.mark.unit

SPEED = Speed({width: {"float32": [10e-9, 258e-9]} for width in ("128", "1024")}, operation=0.0)
"""A second per 1e9 weights and row, and two for reading 1e9 weights."""
SIZE = Size(layers=1, body=900, head=100, width=64)


def recipe_of(**train: object) -> Recipe:
    settings = {
        "model": {"path": "/m", "dtype": "float32"},
        "data": {"path": "/tasks.jsonl"},
        "rewards": ["exact_match"],
        "rollout": {"group_size": 4, "concurrency": 1000},
        "train": {"algorithm": "grpo", "steps": 3, "batch_size": 2, "loss": {"kl": {"coefficient": 0.0}}, **train},
    }
    return Recipe.model_validate({"name": "r", "output": "/o", **settings})


def test_a_step_is_the_sum_of_its_passes() -> None:
    lengths = Lengths(prompt=10, turns=2, sampled=20, results=5, source="")
    plan = plan_time(recipe_of(), SIZE, lengths, SPEED)
    # 8 chains decode 20 tokens each, the longest 40; 2 prompts of 10 and the results of 8 chains need no head
    decode, prefill = 40 * 1000 * 2e-9 + 8 * 20 * 1000 * 1e-9, (2 * 10 + 8 * 5) * 900 * 1e-9
    assert plan.phases["rollout"] == pytest.approx(decode + prefill)
    # forward, and the gradients of activations and weights; the head only where tokens were sampled
    assert plan.phases["update"] == pytest.approx(3 * ((2 * 10 + 8 * 25) * 900 + 8 * 20 * 100) * 1e-9)
    assert plan.phases["sync"] == pytest.approx(200 * 1000 * 1e-9 + 4 * 1000 / 1e9)
    padded = plan_time(recipe_of(batching="padded"), SIZE, lengths, SPEED)
    assert padded.phases["update"] == pytest.approx(3 * (8 * 35 * 900 + 8 * 20 * 100) * 1e-9)
    assert "the rest of the run" in str(plan_time(recipe_of(), SIZE, lengths, SPEED, done=2))
    seen = {"step": 2, "turns": 3.0, "trajectory/sampled_tokens": 60.0}
    assert plan.told_after({**seen, "seconds/step": 1.4 * plan.step}) is None
    assert "its chains had 3.0 turns and 60 sampled tokens, planned were 2.0 and 20" in str(
        plan.told_after({**seen, "seconds/step": 1.6 * plan.step})
    )


def test_lengths_are_those_of_transcripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_plan, "measured", lambda: SPEED)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    weights = {"model.embed_tokens.weight": torch.ones(5, 4), "layers.0.q": torch.ones(4, 4), "norm": torch.ones(4)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4, "num_hidden_layers": 1}))
    said = [("user", "a a a"), ("assistant", "a a"), ("user", "a"), ("assistant", "a")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert time_plan.size_of(tmp_path) == Size(layers=1, body=16, head=20, width=4)  # tied embeddings are the head
    sft = recipe_of(algorithm="sft")
    sft.model.path, grpo = str(tmp_path), recipe_of()
    assert sft.data is not None
    sft.data.path = str(tmp_path / "rows.jsonl")
    first, second = plan_times([sft, grpo])
    # five tokens of the template around each message
    assert first.lengths == Lengths(3 + 10, 2, 3 + 2, 1 + 5, "transcripts")  # type: ignore[union-attr]
    assert second == "its time is planned once /tasks.jsonl exists"
    (second,) = plan_times([grpo])
    assert second == "its time is planned once /m exists"
