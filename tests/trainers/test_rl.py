"""The loop on saved groups, and with a live source with a recorded order of events."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, find_best, read_info
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import SavedGroups, Services, TrainResult, train_rl
from agentfactory.trainers.metrics import METRICS
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl
from tests.saved_groups import write_groups
from tests.trainers.conftest import Make, make_groups, on_cpu

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


def test_the_best_checkpoint_by_evaluation_is_kept(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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
