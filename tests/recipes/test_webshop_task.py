"""WebShop's small recipe: its tasks and transcripts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.tool import Finish
from agentfactory.worlds.webshop.webshop import WebShop
from tests.conftest import REPOSITORY
from tests.recipes.chains import read_rows

RECIPES = REPOSITORY / "recipes" / "webshop"
prepare, what_is_asked, BUYS, CHOOSES, VISITS, ECHOES, GLANCES = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("prepare", "what_is_asked", "BUYS", "CHOOSES", "VISITS", "ECHOES", "GLANCES")
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.long
@pytest.mark.extended
@pytest.mark.processes
def test_what_heldout_tasks_ask_for_is_never_asked_in_training(prepared: Path) -> None:
    heldout, train = read_rows(prepared / "heldout.jsonl"), read_rows(prepared / "train.jsonl")
    assert len(heldout) == 200
    assert len(train) > 500
    tested = {what_is_asked(task) for task in heldout}
    assert tested.isdisjoint(what_is_asked(task) for task in train)
    asked = {" ".join(words) for words in tested}
    rows = read_rows(prepared / "transcripts.jsonl")
    assert len(rows) == VISITS + ECHOES + GLANCES
    shopping = [row for row in rows if len(row["messages"]) > 2]
    assert len(shopping) == VISITS + GLANCES
    for row in shopping:
        searched = row["messages"][2]["tool_calls"][0]["function"]["arguments"]["keywords"]
        instruction = row["messages"][1]["content"].split(" [SEP] ")[2]
        assert searched not in asked
        assert all(word in instruction for word in searched.split())  # each search uses its instruction's words


@pytest.mark.extended
@pytest.mark.processes
def test_transcripts_are_what_the_shop_shows_and_seldom_end_well(prepared: Path) -> None:
    rows = [row for row in read_rows(prepared / "transcripts.jsonl") if len(row["messages"]) > 5][:400]
    tasks = {task["instruction"]: task for task in read_rows(prepared / "train.jsonl")}
    environment = WebShop(results_per_page=3)

    async def replay(messages: list[dict[str, Any]]) -> float:
        question, opening, *rest = messages
        task = tasks[opening["content"].split(" [SEP] ")[2]]
        assert (question["content"], opening["content"]) == (task["question"], environment.reset(**task))
        for message, shown in zip(rest[::2], [*rest[1::2], None], strict=True):
            if "tool_calls" not in message:
                assert shown is None
                return 0.0
            call = message["tool_calls"][0]["function"]
            if call["name"] == "search":
                page: Any = environment.search(**call["arguments"])
            else:
                page = await environment.click(**call["arguments"])
            assert isinstance(page, Finish) if shown is None else page == shown["content"]
        return environment.reward()["reward"]

    rewards = [asyncio.run(replay(row["messages"])) for row in rows]
    assert sum(reward == 0 for reward in rewards) / len(rewards) == pytest.approx(1 - BUYS, abs=0.06)
    assert sum(reward == 1 for reward in rewards) / len(rewards) == pytest.approx(BUYS * CHOOSES, abs=0.05)
    assert sum(rewards) / len(rewards) < 0.25
