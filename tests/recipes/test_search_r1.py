"""The Search-R1 recipe: chains in its two formats, with scripted turns, on our small file; its rewards and data."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.local_index import build_index
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.scripted_chains import scripted_chains

# the check of a recipe asks the server's Python whether it has vLLM
pytestmark = pytest.mark.processes

RECIPES = REPOSITORY / "recipes" / "search_r1"
QUESTIONS = [json.loads(line) for line in (RECIPES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
PROMPT = "Answer with <search> query </search> and <answer> Beijing </answer>. Question: "


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus") / "index"
    build_index(Corpus(str(RECIPES / "passages.jsonl")), folder)
    return str(folder)


@cache
def recipe(name: str) -> Recipe:
    return load_and_check(RECIPES / name, lacks=[])


async def act(folder: Path, name: str, source: str, texts: list[str], **task: Any) -> tuple[Trajectory, list[str]]:
    """Run a chain with the recipe's tools, limits, rewards and format; return its trajectory, and the texts of its
    trained and of its masked tokens."""
    taken = recipe(name)
    server = taken.mcp_servers["search"].model_copy(update={"options": {"source": source, "count": 3}})
    fields = {
        "tools": [],
        "mcp_servers": {"search": server.model_dump()},
        "limits": taken.limits.model_dump(),
        "rewards": [entry.model_dump() for entry in taken.rewards],
        "rollout": {"parser": taken.rollout.parser, "max_turns": taken.rollout.max_turns},
    }
    async with scripted_chains(folder, texts, **fields) as chains:
        trajectory = await chains.run(**task)
        chains.check(trajectory)
        (row,) = trajectory.rows
        pairs = list(zip(row.token_ids, row.mask, strict=True))
        return trajectory, [
            chains.tokenizer.decode([token for token, sampled in pairs if sampled == wanted]) for wanted in (1, 0)
        ]


TWO_HOPS = QUESTIONS[4]
WRITTEN = {
    "3b-lora-24gb.yaml": '<tool_call>\n{"name": "search", "arguments": {"query": "QUERY"}}\n</tool_call>',
    "3b-lora-24gb-tags.yaml": "<search> QUERY </search>",
}


@pytest.mark.parametrize("name", WRITTEN)
async def test_a_chain_searches_twice_and_answers(tmp_path: Path, index: str, name: str) -> None:
    queries = ["lighthouse of Varnholm", 'Where was "Ottilie Brandt born?']
    texts = [f"I search. {WRITTEN[name].replace('QUERY', query.replace(chr(34), ''))}" for query in queries]
    trajectory, (trained, context) = await act(
        tmp_path, name, index, [*texts, "So it is <answer> Kessel. </answer>"], **TWO_HOPS
    )
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.reward, trajectory.metrics["success"]) == (1.0, 1.0)
    assert trajectory.metrics["tool/search/calls"] == 2
    found = 'Doc 1(Title: "Varnholm") Varnholm is a harbour town'
    assert found in context
    assert "(1832-1904)" in context
    assert found not in trained
    assert "Kessel. </answer>" in trained
    assert ("<information>" in context) == ("tags" in name)


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("<answer>Mount Corvin</answer>", 1, 1.0),
        ("<answer>the mount corvin.</answer>", 1, 1.0),
        ("<answer>Corvin</answer>", 1, 1.0),
        ("<answer>Beijing</answer> or rather <answer>Corvin</answer>", 1, 1.0),
        ("<answer>Mount Corvin in Hallen</answer>", 0, 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("<answer>Mount Etna</answer>", 0, 2 * (1 / 2) * (1 / 2) / (1 / 2 + 1 / 2)),
        ("<answer>Etna</answer>", 0, 0.0),
        ("<answer></answer>", 0, 0.0),
        ("Mount Corvin", 0, 0.0),  # not marked as the answer
    ],
)
async def test_rewards_by_hand(tmp_path: Path, index: str, answer: str, exact: int, f1: float) -> None:
    row = QUESTIONS[5]
    trajectory, _ = await act(tmp_path, "3b-lora-24gb.yaml", index, [f"So: {answer}"], **row)
    assert trajectory.reward == exact
    assert trajectory.metrics["success"] == exact
    assert trajectory.metrics["reward/f1"] == pytest.approx(f1)


def test_the_held_out_questions_are_those_of_the_test_split(tmp_path: Path) -> None:
    rows = [
        {
            **row,
            "id": f"test_{number}",
            "data_source": name,
            "prompt": [{"role": "user", "content": PROMPT + row["question"]}],
        }
        for name in ("nq", "triviaqa", "hotpotqa")
        for number, row in enumerate(QUESTIONS)
    ]
    for split, some in (("train", rows[:1]), ("test", rows)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    held_out = load_object("search_r1.py:held_out", RECIPES)
    found = list(held_out(3, path=str(tmp_path)))
    assert [row["data_source"] for row in found] == ["nq"] * 3 + ["hotpotqa"] * 3
    assert found[1] == {**QUESTIONS[1], "data_source": "nq"}
    (first, *_) = held_out(3, prompt=True, path=str(tmp_path))
    assert first["messages"] == rows[0]["prompt"]
    assert "question" not in first
    assert len(list(held_out(100, path=str(tmp_path)))) == 16
