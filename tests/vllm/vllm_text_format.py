"""A text format (ReAct) under chat templates without tools on real vLLM: trained by the user's own commands, served,
stopped at its stop strings, and forked where the template drops the reasoning, as QwQ's does."""

from pathlib import Path

import pytest

from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.text.load_renderer import load_renderer
from tests.learn import runs
from tests.rollout.test_stop_strings import DROPS, KEEPS, LEARN, check_stops
from tests.rollout.test_token_exactness import play_chains
from tests.server_process import VLLM_PYTHON, serve

pytestmark = pytest.mark.long

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
