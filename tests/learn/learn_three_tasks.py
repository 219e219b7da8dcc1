"""Part of `make learn`: one agent learns three tasks."""

from collections import Counter
from pathlib import Path
from statistics import fmean

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, agentfactory, lines_of, read_json, shortened

RECIPE = REPOSITORY / "recipes" / "three_tasks"
TOOLS = {"hunt": {"move"}, "code": {"python"}, "search": {"search", "open", "find"}}
"""The tools that each source offers."""
CHANCE = 13.8
"""Value of a chi-square with two degrees of freedom that chance exceeds once in 1,000."""


def success(run: Path) -> dict[str, float]:
    last = [line for line in lines_of(run) if "eval/sampled/source/hunt/success" in line][-1]
    return {name: last[f"eval/sampled/source/{name}/success"] for name in TOOLS}


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


def test_one_agent_learns_three_tasks(tmp_path: Path) -> None:
    found: dict[str, list[float]] = {name: [] for name in TOOLS}
    for seed in SEEDS:
        output = tmp_path / str(seed)
        stage = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=20)]
        agentfactory("train", str(RECIPE / "three_tasks.yaml"), f"output={output}", f"seed={seed}", *stage)
        check_apart(output / "grpo")
        for name, value in success(output / "grpo").items():
            found[name].append(value)
        print(read_json(output / "summary.json"), found)
    for values in found.values():
        assert fmean(values) > 0.3
