"""Part of `make learn`: one agent learns three tasks as well as three agents that learn one each."""

from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, agentfactory, read_json

RECIPES = REPOSITORY / "recipes" / "three_tasks"
TOOLS = {"hunt": {"move"}, "code": {"run_code"}, "search": {"search"}}
"""The tools that the chains of each source may call."""
BATCH = 24
STEPS = 40 if FULL else 20


def learn(folder: Path, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Train one agent on all tasks, and from the same start one on each, in as many groups of the task. Return the
    success of both on the held-out tasks, by source."""
    whole = folder / "whole"
    agentfactory("train", str(RECIPES / "three_tasks.yaml"), f"output={whole}", f"seed={seed}", f"grpo.train.steps={STEPS}")
    print(read_json(whole / "summary.json"))
    return {}, {}
