"""The SFT loop: hand-computed weighted likelihood, epochs, and learning."""

import json
import random
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Outcome
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.sft import _shuffled, conversation_rows, saved_rows, train_sft
from agentfactory.trainers.metrics import METRICS
from agentfactory.trainers.networks.network import load_network
from tests.saved_groups import write_groups
from tests.trainers.conftest import Make, make_groups, make_row

pytestmark = pytest.mark.numbers


def run(
    recipe: TrainRecipe, rows: list[Row], folder: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, list[dict[str, Any]]]:
    logged: list[dict[str, Any]] = []
    checkpoints = Checkpoints(folder, tokenizer, recipe.train)
    result = train_sft(recipe, Accelerator(cpu=True), checkpoints, rows=rows, log=logged.append)
    assert result.checkpoint is not None
    return result.checkpoint, logged


def test_loss_is_the_mean_over_weights(
    make_recipe: Make, model_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [
        Row([3, 4, 5, 6], [0, 1, 1, 0], [0.0] * 4, weights=[0.0, 0.5, 4.0, 0.0]),
        Row([7, 8, 9], [0, 0, 1], [0.0] * 3, weights=[0.0, 0.0, 1.0]),
    ]
    _, logged = run(make_recipe(algorithm="sft", batch_size=2), rows, tmp_path, tokenizer)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    @torch.no_grad()
    def logprob(ids: list[int], position: int) -> float:
        return float(network(torch.tensor([ids])).logits[0, position - 1].log_softmax(-1)[ids[position]])

    total = 0.5 * logprob([3, 4, 5], 1) + 4.0 * logprob([3, 4, 5], 2) + logprob([7, 8, 9], 2)
    assert logged[0]["loss"] == pytest.approx(-total / 5.5, abs=1e-5)
    assert logged[0]["tokens"] == 3
    assert logged[0].keys() <= {metric.name for metric in METRICS}


def test_learns_its_rows(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    ids = [3, 9, 27, 17, 51, 25, 11, 33]
    rows = [Row(ids, [0] + [1] * 7, [0.0] * 8)]
    recipe = make_recipe(algorithm="sft", steps=60, batch_size=4, learning_rate=1e-2, schedule="cosine", warmup_steps=5)
    checkpoint, logged = run(recipe, rows, tmp_path, tokenizer)
    assert logged[-1]["loss"] < 0.05 < logged[0]["loss"]
    rates = [entry["learning_rate"] for entry in logged]
    assert rates[0] == pytest.approx(2e-3), "a fifth, and not 0"
    assert max(rates) == rates[5] == pytest.approx(1e-2)
    assert rates[-1] < 1e-4
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    given = network.generate(torch.tensor([ids[:1]]), max_new_tokens=7, do_sample=False)
    assert given[0].tolist() == ids


def test_epochs_are_whole_and_depend_on_the_seed() -> None:
    rng = random.Random(0)
    rows = [make_row(rng) for _ in range(5)]
    taken = [tuple(row.token_ids) for row in islice(_shuffled(rows, seed=1), 10)]
    assert set(Counter(taken).values()) == {2}
    assert len(set(taken[:5])) == 5
    assert taken[:5] != taken[5:]
    assert taken == [tuple(row.token_ids) for row in islice(_shuffled(rows, seed=1), 10)]
    assert taken != [tuple(row.token_ids) for row in islice(_shuffled(rows, seed=2), 10)]


def test_saved_rows_are_those_of_whole_chains_that_did_well(tmp_path: Path) -> None:
    (group,) = make_groups(1, 5)
    for chain, reward in zip(group.trajectories, [0.2, 0.7, None, 0.9, 1.0], strict=True):
        chain.reward = reward
    group.trajectories[4].outcome = Outcome.CANCELLED
    path = tmp_path / "groups.jsonl"
    write_groups(path, [group])
    for least, chosen in ((None, (0, 1, 2, 3)), (0.7, (1, 3))):
        expected = [group.trajectories[index].rows[0].token_ids for index in chosen]
        assert [row.token_ids.tolist() for row in saved_rows(path, least)] == expected
    with pytest.raises(ValueError, match=r"train\.min_reward: no chain of .* has at least 1\.0; the best has 0\.9"):
        saved_rows(path, min_reward=1.0)


def test_rows_that_teach_nothing_are_refused(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="none of its 1 rows has a token with a loss weight"):
        run(make_recipe(algorithm="sft"), [Row([1, 2], [0, 0], [0.0, 0.0])], tmp_path, tokenizer)


def test_conversations_become_weighted_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A Qwen-style template over bytes: the assistant's turns, and messages with a weight, are trained."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    base.pre_tokenizer, base.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (Path(__file__).parents[2] / "recipes/quickstart/chat_template.jinja").read_text()
    tokenizer.save_pretrained(tmp_path)
    renderer = load_renderer(ModelConfig(path=str(tmp_path)), "hermes", tools=False)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there", "weight": 2},
        {"role": "user", "content": "Bye", "weight": 0.5},
        {"role": "assistant", "content": "See you"},
    ]
    (row,) = conversation_rows([{"messages": messages}], renderer)
    given = list(zip(row.token_ids, row.weights, strict=True))
    trained = {weight: tokenizer.decode([t for t, w in given if w == weight]) for weight in (2.0, 1.0, 0.5)}
    assert "Bye" in trained.pop(0.5)
    assert trained == {2.0: "Hi there<|im_end|>", 1.0: "See you<|im_end|>"}
    with pytest.raises(ValueError, match=r"data\.path: row 2 has no 'messages'"):
        conversation_rows([{"messages": messages}, {"question": "What?"}], renderer)
    thinking = [messages[0], {**messages[1], "reasoning_content": "I greet."}]
    with pytest.raises(ValueError, match=r"data\.path: row 2: message 1: the chat template does not render its reason"):
        conversation_rows([{"messages": messages}, {"messages": thinking}], renderer)
    conversation_rows([{"messages": [messages[0], {**thinking[1], "weight": 0}]}], renderer)
    called = {"function": {"name": "move", "arguments": {"x": None}}}
    nothing = {"role": "assistant", "content": "", "tool_calls": [called], "weight": 0}
    others = [
        {"messages": messages, "system": "Be brief.", "id": None},
        {"messages": [messages[0], {**messages[1], "weight": 0}], "source": "web"},
        {"messages": [messages[0], nothing]},
    ]
    caplog.clear()
    conversation_rows(others, renderer)
    assert [record.getMessage() for record in caplog.records] == [
        "data: sft reads the columns images, messages, tools, and not source, system",
        "data: nothing is learned from 2 of 3 rows, which have no token with a loss weight (first: row 2)",
        "data: 1 null kept in calls and learned, because the row has no tools (first in row 3)",
    ]


def test_rows_that_change_the_positions_of_others_are_refused_first(
    make_recipe: Make, model_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """SFT has no bound of its own; chains have one."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"max_position_embeddings": 8, "rope_parameters": rope}
    folder = shutil.copytree(model_folder, tmp_path / "dynamic")
    (folder / "config.json").write_text(json.dumps(config))
    recipe = make_recipe(algorithm="sft", batch_size=2)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    rows = [Row(list(range(3, 3 + size)), [1] * size, [0.0] * size) for size in (4, 8)]
    run(recipe, rows, tmp_path / "short", tokenizer)
    with pytest.raises(SettingError, match=r"data: a row has 9 tokens: with dynamic .* leave out longer"):
        run(recipe, [*rows, Row(list(range(3, 12)), [1] * 9, [0.0] * 9)], tmp_path / "long", tokenizer)
    chains = recipe.model_copy(update={"train": recipe.train.model_copy(update={"algorithm": "grpo"})})
    with pytest.raises(SettingError, match=r"rollout\.max_total_tokens: got 8192: .* use rollout.max_total_tokens=8"):
        load_network(chains)
