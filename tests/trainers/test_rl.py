"""The loops of training: RL on saved groups, and with a live source with a recorded order of events; SFT with
hand-computed weighted likelihood, epochs, and learning."""

import json
import random
import re
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
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, find_best, read_info
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import SavedGroups, Services, TrainResult, train_rl
from agentfactory.trainers.loop.sft import _shuffled, conversation_rows, saved_rows, train_sft
from agentfactory.trainers.metrics import METRICS
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl
from tests.saved_groups import write_groups
from tests.trainers.conftest import Make, make_groups, make_row, on_cpu

pytestmark = pytest.mark.numbers


def run(
    recipe: TrainRecipe, groups: list[Group], folder: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[TrainResult, list[dict[str, Any]]]:
    logged: list[dict[str, Any]] = []
    write_groups(folder / "groups.jsonl", groups)
    source = SavedGroups(folder / "groups.jsonl", recipe.train.steps * recipe.train.batch_size)
    checkpoints = Checkpoints(folder / "checkpoints", tokenizer, recipe.train)
    return train_rl(recipe, on_cpu(), checkpoints, Services(logged.append, source=source)), logged


def test_from_saved_groups(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    recipe = make_recipe(steps=3, batch_size=2, updates_per_batch=2, learning_rate=1e-3, checkpoint_every=2)
    result, logged = run(recipe, make_groups(6, 4), tmp_path, tokenizer)
    assert [entry["step"] for entry in logged] == [1, 2, 3]
    assert unlisted(set().union(*logged)) == set()
    assert all(entry["grad_norm"] > 0 and entry["entropy"] > 0 for entry in logged)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert result.checkpoint == tmp_path / "checkpoints" / "step-000003"
    states = [json.loads((tmp_path / f"checkpoints/step-00000{n}/trainer_state.json").read_text()) for n in (2, 3)]
    assert states[0]["groups"] == ["group-0", "group-1", "group-2", "group-3"]
    assert states[1]["groups"] == ["group-4", "group-5"]
    assert states[1]["version"] == 3


class Evaluated(SavedGroups):
    def __init__(self, path: Path, needed: int, success: list[float]) -> None:
        super().__init__(path, needed)
        self.success = iter(success)

    def evaluate(self) -> dict[str, float]:
        return {"eval/sampled/success": next(self.success)}


def test_the_best_checkpoint_is_kept(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    recipe = make_recipe(steps=6, batch_size=1, checkpoint_every=3)
    recipe.eval.every = 2
    write_groups(path := tmp_path / "groups.jsonl", make_groups(6, 4))
    # before the first step it belongs to no checkpoint
    source = Evaluated(path, 6, [0.95, 0.5, 0.9, 0.2])
    checkpoints = Checkpoints(tmp_path / "checkpoints", tokenizer, recipe.train)
    train_rl(recipe, on_cpu(), checkpoints, Services(lambda metrics: None, source=source))
    found = sorted((tmp_path / "checkpoints").iterdir())
    assert [int(path.name[-6:]) for path in found] == [3, 4, 6]
    best = find_best(found, recipe.train.keep_best)
    assert (best.step, best.metric, best.value) == (4, "eval/sampled/success", 0.9)
    # a resumed run keeps the best value
    assert Checkpoints(tmp_path / "checkpoints", tokenizer, recipe.train, resume=best.path).train_state.best == 0.9


def unlisted(names: set[str]) -> set[str]:
    patterns = [re.compile(re.sub(r"<\w+>", ".+", metric.name)) for metric in METRICS]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def test_too_few_saved_groups_are_refused(tmp_path: Path) -> None:
    write_groups(path := tmp_path / "groups.jsonl", make_groups(3, 2))
    with pytest.raises(ValueError, match=r"holds 3 groups, and train.steps x train.batch_size asks for 4"):
        SavedGroups(path, needed=4)
    with pytest.raises(ValueError, match=r"train.from_trajectories: .* does not exist"):
        SavedGroups(tmp_path / "none.jsonl", needed=1)


def test_values_that_are_not_finite_and_batches_without_trainable_chains_stop_the_run(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        run(make_recipe(batch_size=1, steps=2, learning_rate=1e30), make_groups(2, 2), tmp_path, tokenizer)
    groups = make_groups(1, 2)
    for chain in groups[0].trajectories:
        chain.outcome, chain.reward = Outcome.INFERENCE_ERROR, None
    with pytest.raises(ValueError, match="step 1: no chain of the batch can be trained; they ended inference_error"):
        run(make_recipe(batch_size=1), groups, tmp_path, tokenizer)


class LiveSource:
    """Single-turn chains, sampled from a server for each batch, each with its own seed; rewards even tokens."""

    def __init__(self, server: ServerControl, temperature: float, checkpoints: Path) -> None:
        self.server = server
        self.temperature = temperature
        self.checkpoints = checkpoints
        self.events: list[str] = []
        self.acknowledged: list[str] = []
        self.version, self.model = -1, ""

    def next_batch(self, groups: int) -> list[Group]:
        self.events.append("batch")
        return [self._group(number) for number in range(groups)]

    def _group(self, number: int) -> Group:
        prompt = [3 + number, 8, 21]
        params = {"temperature": self.temperature, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
        chains = []
        for member in range(4):
            seeded = {**params, "seed": 1000 * self.version + 10 * number + member}
            body = {"token_ids": prompt, "sampling_params": seeded, "model": self.model}
            choice = self.server.post("/inference/v1/generate", body)["choices"][0]
            row = Row()
            row.append_context(prompt)
            logprobs = [content["logprob"] for content in choice["logprobs"]["content"]]
            row.append_sampled(choice["token_ids"], logprobs, [Span(**span) for span in choice["weight_versions"]])
            reward = sum(token % 2 == 0 for token in choice["token_ids"]) / 6
            chains.append(Trajectory(f"{number}.{member}", [], [row], Outcome.COMPLETED, reward, turns=1))
        return Group(f"v{self.version}-{number}", {}, chains, self.version)

    def published(self, published: Published) -> None:
        self.version, self.model = published.version, published.model
        self.events.append(f"published {self.version} {self.model}")

    def figures(self) -> dict[str, float]:
        return {"cancelled/groups": 0.0}

    def acknowledge(self, group_ids: list[str]) -> None:
        durable = [group for path in checkpoints(self.checkpoints) for group in read_info(path)["groups"]]
        assert set(group_ids) <= set(durable)
        self.acknowledged += group_ids

    def evaluate(self) -> dict[str, float]:
        self.events.append("evaluated")
        return {"eval/version": float(self.version)}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_live_tokens_are_scored_as_the_server_sampled_them(
    make_recipe: Make,
    tokenizer: PreTrainedTokenizerFast,
    server: ServerControl,
    tmp_path: Path,
    lora: dict[str, Any] | None,
) -> None:
    """At staleness 0 the trainer agrees with the server to 1e-4 after each of several large updates."""
    full = load_policy(make_recipe(), "cpu")
    file_sync = FileSync([server], tmp_path / "file")
    file_sync.push(0, full, full.gather())
    recipe = make_recipe(lora, steps=4, batch_size=2, learning_rate=1e-2, checkpoint_every=2)
    recipe.rollout.temperature = 0.8
    recipe.eval.every = 3
    source = LiveSource(server, temperature=0.8, checkpoints=tmp_path)
    sync = LoraSync([server], tmp_path / "lora", "live-1-v", keep=2) if lora else file_sync
    logged: list[dict[str, Any]] = []
    canary = Canary([server], canary_rows(range(64), longest=63), "float32")

    def note(step: int, groups: list[Group], credit: list[str]) -> None:
        source.events.append(f"noted {step} {len(groups)} {len(credit)}")

    checkpoints = Checkpoints(tmp_path, tokenizer, recipe.train)
    result = train_rl(recipe, on_cpu(), checkpoints, Services(logged.append, note, source, sync, canary))
    steps = [entry for entry in logged if "loss" in entry]
    assert all(0 < entry["mismatch/max"] < 1e-4 for entry in steps)
    assert [entry["sync/provable"] for entry in steps] == [1.0] * 4
    assert all(entry["sync/canary_slope"] == pytest.approx(1.0, abs=1e-3) for entry in steps)
    assert [entry["staleness/max"] for entry in steps] == [0, 0, 0, 0]
    assert unlisted(set().union(*logged)) == set()
    names = [f"{n} live-1-v{n}" if lora else f"{n} policy" for n in range(5)]
    assert source.events == [
        *(f"published {names[0]}", "evaluated"),
        *(event for n in (1, 2) for event in ("batch", f"published {names[n]}", f"noted {n} 2 2")),
        *(event for n in (3, 4) for event in ("batch", f"published {names[n]}", f"noted {n} 2 2", "evaluated")),
    ]
    # during training, at the latest at its end
    assert source.acknowledged == [f"v{version}-{number}" for version in range(4) for number in range(2)]
    assert (result.before, result.after) == ({"eval/version": 0.0}, {"eval/version": 4.0})
    if isinstance(sync, LoraSync):
        for name in ("live-1-v3", "live-1-v4"):
            server.post("/v1/unload_lora_adapter", {"lora_name": name})


class LateSource(LiveSource):
    def next_batch(self, groups: int) -> list[Group]:
        self.first = getattr(self, "first", None) or super().next_batch(groups)
        return self.first


@pytest.mark.parametrize("k", [0, 1])
def test_a_token_that_is_too_old_is_refused(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, server: ServerControl, tmp_path: Path, k: int
) -> None:
    """The worker never delivers such a group; if it did, the group would not be trained."""
    recipe = make_recipe(steps=4, batch_size=2)
    recipe.rollout.max_staleness = k
    sync, logged = FileSync([server], tmp_path / "file"), []
    services = Services(logged.append, source=LateSource(server, 1.0, tmp_path), sync=sync)
    with pytest.raises(ValueError, match=f"step {k + 2}: a token is {k + 1} versions old"):
        train_rl(recipe, on_cpu(), Checkpoints(tmp_path, tokenizer, recipe.train), services)
    assert [entry["staleness/max"] for entry in logged if "loss" in entry] == list(range(k + 1))


# ---- SFT


def run_sft(
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
    _, logged = run_sft(make_recipe(algorithm="sft", batch_size=2), rows, tmp_path, tokenizer)
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
    checkpoint, logged = run_sft(recipe, rows, tmp_path, tokenizer)
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


def test_useless_rows_are_refused(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of its 1 rows has a token with a loss weight"):
        run_sft(make_recipe(algorithm="sft"), [Row([1, 2], [0, 0], [0.0, 0.0])], tmp_path, tokenizer)


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
    run_sft(recipe, rows, tmp_path / "short", tokenizer)
    with pytest.raises(SettingError, match=r"data: a row has 9 tokens: with dynamic .* leave out longer"):
        run_sft(recipe, [*rows, Row(list(range(3, 12)), [1] * 9, [0.0] * 9)], tmp_path / "long", tokenizer)
    chains = recipe.model_copy(update={"train": recipe.train.model_copy(update={"algorithm": "grpo"})})
    with pytest.raises(SettingError, match=r"rollout\.max_total_tokens: got 8192: .* use rollout.max_total_tokens=8"):
        load_network(chains)
