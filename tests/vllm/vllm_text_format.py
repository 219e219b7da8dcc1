"""A text format (ReAct) under chat templates without tools on real vLLM: trained by the user's own commands, served,
stopped at its stop strings, and forked where the template drops the reasoning, as QwQ's does."""

import json
from pathlib import Path

import pytest

from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.text.load_renderer import load_renderer, make_renderer
from agentfactory.rollout.text.tokenizer import load_tokenizer
from tests.learn import runs
from tests.rollout.test_stop_strings import DROPS, KEEPS, LEARN, check_stops
from tests.rollout.test_token_exactness import play_chains
from tests.server_process import VLLM_PYTHON, serve

pytestmark = pytest.mark.long

STEPS = 3
CHAINS = 200 if runs.FULL else 40
"""CI has no time for all of them; LENGTH=full has."""


@pytest.fixture(scope="module")
def habit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a network that learned to make up observations; see tests/learn/text_format.py."""
    folder = tmp_path_factory.mktemp("habit")
    own = [f"prepare={LEARN}/text_format.py:prepare", f"rollout.parser={LEARN}/text_format.py:Habit"]
    runs.train("sft.yaml", 0, folder, *own, f"model.chat_template={KEEPS}", "train.steps=150")
    return folder / "run"


def test_vllm_stops_and_rows_fork(habit: Path, tmp_path: Path) -> None:
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 1024}
    (model,) = (habit / "checkpoints").glob("step-*")
    tasks = habit / "prepared" / "train.jsonl"
    with serve({"model": {"path": str(model), "dtype": "float32"}, "server": server}, tmp_path) as url:
        for template in (KEEPS, DROPS):
            chains, recording = play_chains(model, tasks, server, url, CHAINS, template, parser="react")
            assert not any(chain.outcome.failed for chain in chains), {chain.error for chain in chains}
            sections = {"model": {"path": str(model), "chat_template": str(template)}}
            renderer = load_renderer(RolloutRecipe.model_validate(sections).model, "react")
            assert renderer.info["choice"] == ("append" if template is KEEPS else "fork")
            exchanges = []
            for request, answer in recording.exchanges:
                (choice,) = answer["choices"]
                stop = choice["stop_reason"] if isinstance(choice["stop_reason"], str) else None
                exchanges.append((request["token_ids"], choice["token_ids"], stop))
            counts = check_stops(renderer, chains, exchanges)
            assert min(counts["stopped"], counts["continued"]) > CHAINS
            calls = sum(chain.metrics.get("tool/move/calls", 0) for chain in chains)
            assert calls > CHAINS
            forks = sum(len(chain.rows) > 1 for chain in chains)
            assert (forks == 0) if template is KEEPS else (forks > CHAINS / 4)
            print(template.name, {**counts, "calls": int(calls), "forked": forks})


def test_a_template_that_drops_reasoning_is_trained(habit: Path, tmp_path: Path) -> None:
    (model,) = (habit / "checkpoints").glob("step-*")
    overrides = [
        *("prepare=null", f"model.path={model}", f"model.chat_template={DROPS}", "rollout.parser=react"),
        *(f"data.path={habit}/prepared/train.jsonl", f"eval.data.path={habit}/prepared/heldout.jsonl"),
        *("server.engine=vllm", f"server.options.python={VLLM_PYTHON}", "server.max_model_len=1024"),
        *("rollout.max_tokens=40", "rollout.max_total_tokens=1024", "train.token_budget=8192"),
        *(f"train.steps={STEPS}", "train.warmup_steps=0", "eval.data.limit=20", "eval.greedy=false"),
    ]
    summary = runs.train("grpo.yaml", 0, tmp_path, *overrides)
    assert summary["steps"] == STEPS
    run = tmp_path / "run"
    info = json.loads((Path(summary["checkpoint"]) / "trainer_state.json").read_text(encoding="utf-8"))["renderer"]
    assert (info["choice"], info["parser"], info["stops"]) == ("fork", "react", ["\nObservation:"])
    assert "an assistant turn does not begin with the generation prompt" in " ".join(info["reasons"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert max(line["mismatch/max"] for line in steps) <= 1e-4, "the server's log-probabilities are the trainer's"
    renderer = make_renderer(load_tokenizer(str(model)), DROPS.read_text(encoding="utf-8"), parser="react")
    chains = [chain for group in read_groups(run / "trajectories") for chain in group.trajectories]
    stopped = 0
    for chain in chains:
        for row, start, end in chain.turn_spans():
            count = renderer.stopped(list(chain.rows[row].token_ids[start:end]))
            assert count in (None, end - start)
            stopped += count is not None
    assert stopped > len(chains)
    assert sum(len(chain.rows) > 1 for chain in chains) > len(chains) / 2
