"""Unmodified inspect-ai and lm-eval on a checkpoint behind `serve --chat`: their results equal those of `agentfactory
eval`, to the token.

`make test-harnesses` installs them into a separate environment, because they need other versions of packages."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART

HARNESSES = os.environ.get("AGENTFACTORY_HARNESSES", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HARNESSES, reason="inspect-ai and lm-eval are not installed: make test-harnesses"),
]
make_model, write_jsonl = (load_object(f"tiny_model.py:{name}", QUICKSTART) for name in ("make_model", "write_jsonl"))

SUMS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10) for b in range(10)]
TASKS = SUMS[::2] + SUMS[1:20:2]
REWARD = """
from agentfactory import reward


@reward
def right(prediction, answer):
    return float(prediction.strip() == answer)
"""
INSPECT = """
import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate


@scorer(metrics=[accuracy()])
def right():
    async def score(state, target):
        return Score(value=float(state.output.completion.strip() == target.text))

    return score


@task
def sums():
    rows = [json.loads(line) for line in Path(__file__).with_name("tasks.jsonl").read_text().splitlines()]
    samples = [Sample(input=row["question"], target=row["answer"]) for row in rows]
    return Task(dataset=samples, solver=generate(), scorer=right())
"""
LM_EVAL = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "tasks.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 8, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
Ids = dict[tuple[int, ...], tuple[int, ...]]
"""Prompt ids -> the sampled ids."""


def run(folder: Path, *command: str, **environment: str) -> None:
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that solves some of the sums, and a recipe that evaluates it."""
    folder = tmp_path_factory.mktemp("harnesses")
    said = [[{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in SUMS]
    make_model(folder / "model", said, [], 0)
    write_jsonl(folder / "talks.jsonl", [{"messages": talk} for talk in said])
    write_jsonl(folder / "tasks.jsonl", TASKS)
    (folder / "judge.py").write_text(REWARD)
    (folder / "inspect_sums.py").write_text(INSPECT)
    (folder / "lm").mkdir()
    (folder / "lm" / "sums.yaml").write_text(yaml.safe_dump(LM_EVAL))
    train = {"algorithm": "sft", "steps": 80, "batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 5}
    model = {"path": "model", "dtype": "float32"}
    taught = {"model": model, "data": {"path": "talks.jsonl"}, "train": train, "output": "taught"}
    (folder / "teach.yaml").write_text(yaml.safe_dump(taught))
    run(folder, sys.executable, "-m", "agentfactory", "train", "teach.yaml")
    (checkpoint,) = (folder / "taught" / "checkpoints").iterdir()
    evaluated = {
        "model": {**model, "path": str(checkpoint)},
        "data": {"path": "tasks.jsonl"},
        "eval": {"data": {"path": "tasks.jsonl"}},
        "rewards": ["judge.py:right"],
        "rollout": {"max_tokens": 8, "max_total_tokens": 256},
        "server": {"engine": "embedded", "max_model_len": 256},
        "output": "run",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(evaluated))
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    command = [sys.executable, "-m", "agentfactory", "serve", "recipe.yaml", "--chat", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        url, environment = "", {}
        for line in process.stdout:
            if line.startswith("ready "):
                url = line.split()[1]
            name, _, value = line.strip().removeprefix("export ").partition("=")
            if value:
                environment[name] = value
            if name == "AGENTFACTORY_MODEL":
                break
        try:
            yield url, environment
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[float, Ids, dict[str, str]]]:
    """The score and tokens of a greedy `agentfactory eval`, and the environment for clients of the same model."""
    with serving(folder) as (url, environment):
        run(folder, sys.executable, "-m", "agentfactory", "eval", "recipe.yaml", "--url", url)
        figure = json.loads((folder / "run" / "eval" / "summary.json").read_text())["greedy/reward"]
        ids: Ids = {}
        for group in read_groups(folder / "run" / "eval" / "trajectories" / "final-greedy.jsonl"):
            (chain,) = group.trajectories
            ((_, start, end),) = chain.turn_spans()
            ids[tuple(chain.rows[0].token_ids[:start])] = tuple(chain.rows[0].token_ids[start:end])
        assert len(ids) == len(TASKS)
        yield figure, ids, environment


def inspect_ai(folder: Path, environment: dict[str, str], model: str) -> float:
    line = "eval inspect_sums.py --temperature 0 --max-tokens 8 --display none --log-format json --log-dir logs --model"
    run(folder, f"{HARNESSES}/inspect", *line.split(), model, **environment)
    log = json.loads(max((folder / "logs").iterdir()).read_text())
    assert log["status"] == "success"
    assert [sample["error"] for sample in log["samples"] if sample.get("error")] == []
    (score,) = log["results"]["scores"]
    return float(score["metrics"]["accuracy"]["value"])


def lm_eval(folder: Path, environment: dict[str, str]) -> float:
    arguments = f"model=policy,base_url={environment['OPENAI_BASE_URL']}/chat/completions,num_concurrent=8"
    command = (
        "run --model local-chat-completions --apply_chat_template --tasks sums --include_path lm --output_path lm-out"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    run(folder, f"{HARNESSES}/lm-eval", *command.split(), "--model_args", arguments, **environment, **offline)
    (results,) = (folder / "lm-out").rglob("results_*.json")
    return float(json.loads(results.read_text())["results"]["sums"]["exact_match,none"])


@pytest.mark.parametrize("harness", ["inspect-ai, chat", "inspect-ai, responses", "lm-eval"])
def test_a_harness_gets_evals_figure(folder: Path, served: tuple[float, Ids, dict[str, str]], harness: str) -> None:
    figure, ids, environment = served
    log = folder / "run" / "serve" / "turns.jsonl"
    before = len(log.read_text().splitlines())
    match harness:
        case "inspect-ai, chat":
            found = inspect_ai(folder, environment, "openai-api/openai/policy")
        case "inspect-ai, responses":
            found = inspect_ai(folder, environment, "openai/policy")
        case _:
            found = lm_eval(folder, environment)
    assert 0.0 < figure < 1.0
    assert found == pytest.approx(figure, abs=1e-9)
    turns: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    # before the samples, inspect-ai sends one test request to the Responses API
    turns = [turn for turn in turns if turn["temperature"] == 0.0]
    assert {tuple(turn["prompt_ids"]): tuple(turn["token_ids"]) for turn in turns} == ids
    assert len(turns) == len(TASKS)
