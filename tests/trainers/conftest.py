"""A small generated Qwen3, and groups of chains with tool-like gaps between their sampled tokens."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, needed_scores
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy
from tests.conftest import embedded_server
from tests.placement.shapes import sizes

VOCABULARY = 64
Make = Callable[..., TrainRecipe]
on_cpu = partial(Accelerator, cpu=True)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model (tied embeddings, 2 layers, hidden 32) with its tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    own = {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": rope, "initializer_range": 0.3}
    Qwen3ForCausalLM(Qwen3Config(**sizes(32, 64, 2, 4, 2, VOCABULARY), **own)).save_pretrained(folder)
    base = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="w1", pad_token="w2")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[ServerControl]:
    """An embedded server of the model, behind an API key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_SYNC_KEY", "s3cret")
        flags = ("--api-key-env", "TEST_SYNC_KEY", "--max-model-len", "64")
        with embedded_server(model_folder, *flags) as url:
            yield ServerControl(url, "TEST_SYNC_KEY")


@pytest.fixture(scope="session")
def make_recipe(model_folder: Path) -> Make:
    """`make_recipe(lora={...}, **train)`: a recipe for `model_folder` in float32."""

    def make(lora: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
        model = {"path": str(model_folder), "dtype": "float32", "lora": lora}
        return TrainRecipe.model_validate({"model": model, "train": {"steps": 1, **train}})

    return make


@pytest.fixture
def policy(make_recipe: Make) -> Policy:
    return load_policy(make_recipe())


def make_row(rng: random.Random, turns: int = 3) -> Row:
    """A prompt, then sampled turns with observations between them, of ragged lengths."""
    row = Row()
    row.append_context([rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 9))])
    for _ in range(turns):
        count = rng.randint(1, 6)
        sampled = [rng.randrange(VOCABULARY) for _ in range(count)]
        row.append_sampled(sampled, [rng.uniform(-6.0, -2.0) for _ in range(count)], [Span("0", 0, count)])
        row.append_context([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))])
    return row


def make_groups(count: int, size: int, seed: int = 0) -> list[Group]:
    rng = random.Random(seed)

    def chain(name: str) -> Trajectory:
        rows, reward = [make_row(rng, turns=rng.randint(1, 4))], rng.random()
        metrics = {"success": float(rng.random() > 0.5), "tool_calls": 2.0}
        return Trajectory(name, [], rows, Outcome.COMPLETED, reward, metrics=metrics, turns=3)

    names = [f"group-{number}" for number in range(count)]
    return [Group(name, {"question": name}, [chain(f"{name}/{i}") for i in range(size)]) for name in names]


def take_step(learner: Learner, recipe: TrainRecipe, groups: list[Group]) -> None:
    credit = Credit(groups, recipe)
    scores = needed_scores(recipe)
    credited = credit.assign(learner.score(credit.rows, scores) if scores else credit.rows)
    update_policy(learner, learner.deal(credited.rows, credited.normaliser), recipe)
    learner.schedule.step()


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A wider model with the policy's tokenizer, whose vocabulary is padded further."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(1)
    config = Qwen3Config(**sizes(48, 64, 3, 4, 2, VOCABULARY + 6), head_dim=8, initializer_range=0.3)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
