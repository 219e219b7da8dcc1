"""What the commands that need a server take for it, what `agentfactory rollout` says and leaves, and `agentfactory
serve`: a server in the foreground, with its log in a run folder."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.commands import server_commands
from agentfactory.commands.eval_command import named
from agentfactory.commands.main import main
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.launching.served_weights import what_is_served
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.inference.http_transport import authorization
from tests.conftest import QUICKSTART
from tests.placement.shapes import sizes
from tests.project import Command
from tests.server_process import only_loopback

pytestmark = pytest.mark.processes


def test_an_adapter_is_served_beside_its_base(project: Path) -> None:
    recipe, adapter = load_recipe("recipe.yaml"), project / "adapter"
    adapter.mkdir()
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(project / "model")}))
    served = what_is_served(recipe, adapter)
    assert (served.name, served.label, served.adapters) == ("checkpoint", str(adapter), {"checkpoint": adapter})
    assert served.recipe.model.path == str(project / "model")
    config.write_text(json.dumps({"base_model_name_or_path": str(project / "elsewhere")}))
    with pytest.raises(RunFolderError, match=r"adapter for .*elsewhere, which does not exist; fix: move"):
        what_is_served(recipe, adapter)


def test_a_recipe_that_continues_an_adapter_begins_with_it_on_its_own_base(project: Path) -> None:
    adapter = project / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"base_model.model.q_proj.lora_{name}.weight": np.zeros((2, 2), dtype=np.float32) for name in "AB"}
    save_file(weights, adapter / "adapter_model.safetensors")
    for merge in ("false", "true"):
        recipe = load_recipe("recipe.yaml", [f"model.lora={{from: adapter, merge: {merge}}}"], purpose="serve")
        served = what_is_served(recipe, None)
        assert served.recipe.model.path == str(project / "model")
        assert (served.name, served.adapters) == ("checkpoint", {"checkpoint": adapter})


def test_a_folder_without_weights_is_refused(project: Path) -> None:
    recipe = load_recipe("recipe.yaml")
    step = "runs/mine/grpo/checkpoints/step-000040"
    (project / step).mkdir(parents=True)
    (project / step / "config.json").write_text("{}")
    (project / "empty").mkdir()
    assert what_is_served(recipe, Path(step)).label == str(project / step)
    for path in ("runs/mine", "runs/mine/grpo", "runs/mine/grpo/checkpoints", "runs/mine/grpo/checkpoints/step-000120"):
        with pytest.raises(SettingError, match=f"--checkpoint: {path}: n.*; fix: name a checkpoint"):
            what_is_served(recipe, Path(path))
    with pytest.raises(SettingError, match=r"empty: neither config\.json nor .*; fix: name a checkpoint, such as"):
        what_is_served(recipe, Path("empty"))
    with pytest.raises(SettingError, match="--model: runs/mine: neither"):
        named("runs/mine")
    assert named("x/y") == "x/y", "of the hub"


BROKEN = f"""
from agentfactory import tool
from agentfactory.base.user_code.loading import load_object

TreasureHunt = load_object("treasure_hunt.py:TreasureHunt", __import__("pathlib").Path({str(QUICKSTART)!r}))


class Broken(TreasureHunt):
    @tool
    async def move(self, direction: str) -> str:
        \"\"\"Take one step.\"\"\"
        raise ValueError("no legs")
"""


def test_chains_are_run_saved_and_told_and_so_is_a_tool_that_raises_at_most_of_its_calls(
    agentfactory: Command, quickstart_run: Path, tmp_path: Path, warm_server: str, warm_start: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    overrides = [f"output={tmp_path}", f"server.url={warm_server}", f"model.path={warm_start}"]
    overrides += [f"tools=[{tmp_path}/broken.py:Broken]", "data.limit=4", "rollout.group_size=3"]
    result = agentfactory("rollout", str(quickstart_run / "grpo" / "recipe.yaml"), *overrides, status=0)
    lines = result.stdout.splitlines()
    assert lines[0] == "running 4 tasks, each by 3 chains"
    summary = json.loads((tmp_path / "rollout" / "summary.json").read_text())
    means = f"reward {summary['reward']:.4f}, success {summary['success']:.4f}, failed {summary['failed']:.4f}"
    assert lines[-2].startswith(f"means over chains: {means}; ")
    assert summary["checkpoint"] == f"policy at {warm_server}", "the server's weights, whatever model.path says"
    assert [len(group.trajectories) for group in read_groups(tmp_path / "rollout" / "trajectories")] == [3] * 4
    (told,) = [line for line in lines if line.startswith("warning: tool ")]
    assert re.fullmatch(r"warning: tool move: (\d+) of \1 calls failed, such as: ValueError: no legs", told)


# ---- agentfactory serve


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = Qwen3Config(**sizes(32, 32, 1, 2, 1, 64), head_dim=16, max_position_embeddings=64)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    server = {"engine": "embedded", "max_model_len": 64}
    text = json.dumps({"model": {"path": "model", "dtype": "float32"}, "server": server})
    (tmp_path / "served.yaml").write_text(text)
    return tmp_path / "served.yaml"


def test_a_server_runs_until_it_is_ended(recipe: Path) -> None:
    command = [sys.executable, "-m", "agentfactory", "serve", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ready = next(line for line in process.stdout if line.startswith("ready "))
    models = ready.split()[1] + "/v1/models"
    assert only_loopback(process.pid)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(models, timeout=30)
    with urllib.request.urlopen(urllib.request.Request(models, headers=authorization(models, None))) as answer:
        assert json.load(answer)["data"][0]["id"] == "policy"
    folder = recipe.parent / "runs" / "served" / "serve"
    assert "ready http" in (folder / "logs" / "server.log").read_text()
    assert (folder / "recipe.yaml").exists()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "interrupted by SIGTERM" in said
    assert not [child for child in children if child.is_running()]


def test_to_chat_a_run_of_one_stage_serves_its_last_checkpoint(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Path | None] = []
    monkeypatch.setattr(server_commands, "serve", lambda recipe, checkpoint, *_: served.append(checkpoint))
    run = recipe.parent / "runs" / "served"
    checkpoint = run / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").write_text(recipe.read_text().replace('"path": "model"', f'"path": "{recipe.parent}/model"'))
    for option in (["--chat"], []):
        assert main(["serve", str(run / "recipe.yaml"), *option]) == 0
    assert served == [checkpoint, None]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["server.url=http://127.0.0.1:1"], ["server.url", "already running", "null"]),
        (["server.engine=vllm", "server.host=0.0.0.0"], ["server.host", "no key guards", "server.api_key_env"]),
        (["server.engine=vllm", f"server.options.python={sys.base_prefix}/bin/python3"], ["has no vLLM"]),
    ],
)
def test_what_cannot_be_served_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]
) -> None:
    assert main(["serve", str(recipe), *overrides]) == 2
    told = capsys.readouterr().err
    assert [words for words in [*said, "fix:"] if words not in told] == []
    assert not (recipe.parent / "runs").exists()
