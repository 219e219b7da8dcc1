"""What the commands that need a server take for it, and what `agentfactory rollout` says and leaves."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentfactory.base.errors import SettingError
from agentfactory.commands.eval_command import named
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.launching.served_weights import what_is_served
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART
from tests.project import Command

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
