"""Part of `make learn`: one agent learns three tasks, each as well as an agent that learns nothing else."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import yaml

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, agentfactory, read_json, shortened

RECIPE = REPOSITORY / "recipes" / "three_tasks"
TOOLS = {"hunt": {"move"}, "code": {"python"}, "search": {"search", "open", "find"}}
"""The tools that each source offers."""
CHANCE = 13.8
"""Value of a chi-square with two degrees of freedom that chance exceeds once in 1,000."""


def success(run: Path, sources: list[str]) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if f"eval/sampled/source/{sources[0]}/success" in line][-1]
    return {name: last[f"eval/sampled/source/{name}/success"] for name in sources}


def check_apart(run: Path) -> None:
    """Assert that the groups were drawn by their equal weights, and that no chain had a tool of another source."""
    drawn: Counter[str] = Counter()
    for group in read_groups(run / "trajectories" / "train.jsonl"):
        drawn[group.source] += 1
        for chain in group.trajectories:
            names = {key.split("/")[1] for key in chain.metrics if key.startswith("tool/")}
            assert names == TOOLS[group.source]
    expected = drawn.total() / 3
    assert sum((count - expected) ** 2 / expected for count in drawn.values()) < CHANCE


def alone(whole: Path, source: str, seed: int, folder: Path, *overrides: str) -> dict[str, float]:
    """Train an agent on one source, from the same start and with as many of its groups."""
    recipe = yaml.safe_load((RECIPE / "grpo.yaml").read_text())
    del recipe["prepare"]
    recipe["model"]["path"] = str(next((whole / "sft" / "checkpoints").iterdir()))
    for data in (recipe["data"], recipe["eval"]["data"]):
        data["sources"] = [entry for entry in data["sources"] if entry["name"] == source]
    recipe["train"]["batch_size"] //= 3
    text = yaml.safe_dump(recipe).replace("${prepared}", str(whole / "prepared"))
    path, output = folder / f"{source}.yaml", folder / source
    path.write_text(text.replace("../", f"{RECIPE.parent}/"))
    agentfactory("train", str(path), f"output={output}", f"seed={seed}", *overrides)
    return success(output, [source])


def test_one_agent_learns_three_tasks_as_well_as_three_agents(tmp_path: Path) -> None:
    together: dict[str, list[float]] = {name: [] for name in TOOLS}
    apart: dict[str, list[float]] = {name: [] for name in TOOLS}
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        whole, overrides = folder / "whole", shortened(steps=20)
        stage = [setting.replace("train.", "grpo.train.") for setting in overrides]
        agentfactory("train", str(RECIPE / "three_tasks.yaml"), f"output={whole}", f"seed={seed}", *stage)
        check_apart(whole / "grpo")
        for name, value in success(whole / "grpo", [*TOOLS]).items():
            together[name].append(value)
            apart[name] += alone(whole, name, seed, folder, *overrides).values()
        print(read_json(whole / "summary.json"), together, apart)
    for name in TOOLS:
        assert fmean(together[name]) > 0.3
        if FULL and len(SEEDS) >= 3:
            assert abs(fmean(together[name]) - fmean(apart[name])) <= 0.06, name
