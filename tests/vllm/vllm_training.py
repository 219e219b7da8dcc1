"""The quickstart on real vLLM, by the user's own commands: full weights by file, an adapter, and exact tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART
from tests.rollout.test_token_exactness import check_exactness, largest_difference, play_chains
from tests.server_process import VLLM_PYTHON, serve

STEPS = 2
CHAINS = 500
VLLM = ["server.engine=vllm", f"server.options.python={VLLM_PYTHON}"]
SHORT = [f"train.steps={STEPS}", "train.warmup_steps=0", "eval.data.limit=20", "eval.greedy=false"]


def train(recipe: Path, *overrides: str) -> None:
    subprocess.run([sys.executable, "-m", "agentfactory", "train", str(recipe), *overrides], check=True)


def steps(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def trained_versions(run: Path) -> list[set[str]]:
    """What the tokens of each group were sampled with."""
    return [
        {span.version for t in group.trajectories for row in t.rows for span in row.versions}
        for group in read_groups(run / "trajectories")
    ]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a short quickstart on vLLM, all weights trained."""
    output = tmp_path_factory.mktemp("vllm") / "run"
    short = [f"grpo.{override}" for override in SHORT]
    train(QUICKSTART / "quickstart.yaml", *VLLM, *short, "sft.train.steps=120", f"output={output}")
    return output


def checkpoint(run: Path) -> Path:
    return next((run / "sft" / "checkpoints").iterdir())


def test_full_weights_are_trained_and_brought_back(full_run: Path) -> None:
    run = full_run / "grpo"
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    model = (full_run / "prepared" / "model" / "model.safetensors").stat().st_size
    for line in steps(run):
        assert line["sync/bytes"] > 0.9 * model
        assert line["mismatch/max"] <= 1e-4
    versions = [{label.rpartition("-v")[2] for label in labels} for labels in trained_versions(run)]
    assert [found for found in versions if found != {"0"} and found != {"1"}] == []
    assert {"1"} in versions, "the second batch is of the second version"


def test_an_adapter_is_trained_and_brought_back(full_run: Path, tmp_path: Path) -> None:
    own = [f"data.path={full_run}/prepared/train.jsonl", f"eval.data.path={full_run}/prepared/heldout.jsonl"]
    own += ["prepare=null", f"model.path={checkpoint(full_run)}", f"output={tmp_path / 'run'}"]
    train(QUICKSTART / "grpo-lora.yaml", *VLLM, *SHORT, *own)
    model = (full_run / "prepared" / "model" / "model.safetensors").stat().st_size
    for line in steps(tmp_path / "run"):
        assert 0 < line["sync/bytes"] < model / 4
        assert line["mismatch/max"] <= 1e-4
    versions = set.union(*trained_versions(tmp_path / "run"))
    assert len(versions) == STEPS, versions
    assert all("-v" in version for version in versions), "an adapter's version is its name"


def test_no_token_drifts(full_run: Path, tmp_path: Path) -> None:
    """500 chains of several turns: what is trained is what vLLM was sent and sampled, and scored alike."""
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 1024}
    with serve({"model": {"path": str(checkpoint(full_run)), "dtype": "float32"}, "server": server}, tmp_path) as url:
        played = play_chains(checkpoint(full_run), full_run / "prepared" / "train.jsonl", server, url, CHAINS)
    check_exactness(*played)
    worst = largest_difference(played[0], checkpoint(full_run))
    print(f"largest difference over {CHAINS} chains: {worst:.2e}")
    assert worst <= 1e-4
