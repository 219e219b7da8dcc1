"""ALFWorld's recipes: for real models, in the published format; and the small one, with games in small rooms and
transcripts that match the engine."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.trajectory import Outcome
from agentfactory.worlds.alfworld.alfworld import QUESTION
from agentfactory.worlds.alfworld.engine import Engine
from agentfactory.worlds.alfworld.games import GeneratedGames
from agentfactory.worlds.alfworld.generator import TaskType
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.scripted_chains import scripted_chains
from tests.worlds.alfworld.engines import PYTHON, needs_engine

pytestmark = pytest.mark.processes

RECIPES = REPOSITORY / "recipes" / "alfworld"
Goal, small_games, look_everywhere, goals, search, PLACES, TASK = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("Goal", "small_games", "look_everywhere", "goals", "search", "PLACES", "TASK")
)
TEMPLATE = "put some {obj} on {recep}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(processes=1, games=200, python=PYTHON)
    yield engine
    engine.close()


@needs_engine
def test_transcripts_are_what_the_engine_shows(engine: Engine) -> None:
    package = engine.package()
    games, rng = GeneratedGames(0, package), random.Random(0)
    ends = set()
    for name in islice(small_games(games, "valid_unseen"), 6):
        game = games.game(name)
        asked = game.trajectory["pddl_params"]
        goal = Goal(asked["object_target"].lower(), asked["parent_target"].lower())
        room = look_everywhere(engine, game.content)
        assert 1 < len(room.arrivals) <= PLACES
        assert goal in goals(package, room)
        for _ in range(6):
            (_, opening, *messages) = search(room, goal, TEMPLATE, rng)
            play, scene = engine.open(game.content)
            before, _, task = scene.observation.partition(TASK)
            assert opening["content"].startswith(before + TASK)
            templates = package.tables["goals"][TaskType.PLACE]["templates"]
            assert task in {f"{text.format(obj=goal.thing, recep=goal.place)}." for text in templates}
            for message, shown in zip(messages[::2], [*messages[1::2], None], strict=True):
                if "tool_calls" in message:
                    scene = play.act(message["tool_calls"][0]["function"]["arguments"]["command"])
                    assert scene.won == (shown is None)
                    assert shown is None or scene.observation == shown["content"]
            play.close()
            ends.add(scene.won)
    assert ends == {False, True}


@needs_engine
def test_games_of_training_and_evaluation_differ(engine: Engine) -> None:
    games = GeneratedGames(0, engine.package())
    train, heldout = (list(islice(small_games(games, split), 40)) for split in ("train", "valid_seen"))
    problems = [games.content(name)["pddl_problem"] for name in (*train, *heldout)]
    assert len(set(problems)) == 80
    assert {games.game(name).task_type for name in (*train, *heldout)} == {TaskType.PLACE}


@needs_engine
async def test_a_chain_acts_in_the_published_format(engine: Engine, tmp_path: Path) -> None:
    recipe = load_and_check(RECIPES / "3b-lora-24gb.yaml", lacks=[])
    game = GeneratedGames(0, engine.package()).game("valid_seen/000002")
    options = {"python": PYTHON, "show_actions": True, "processes": 1}
    fields = {
        "tools": [],
        "mcp_servers": {"alfworld": {"module": "alfworld", "options": options, "timeout_seconds": 300}},
        "limits": recipe.limits.model_dump(),
        "rewards": [],
        "rollout": {"parser": recipe.rollout.parser, "max_turns": 50, "system_prompt": recipe.rollout.system_prompt},
    }
    texts = [f"<think>I know.</think>\n<action>{action}</action>" for action in game.walkthrough]
    async with scripted_chains(tmp_path, ["<think>Hm.</think>", *texts], **fields) as chains:
        trajectory = await chains.run(question=QUESTION, game="valid_seen/000002", task_type=game.task_type)
        chains.check(trajectory)
        last = chains.sent()[-1]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert trajectory.metrics["success"] == trajectory.metrics["pick_clean_then_place_in_recep"] == 1.0
    assert "You are an expert agent operating in the ALFRED Embodied Environment." in last
    assert "Your task is to: clean some cloth and put it in cabinet.\nAdmissible actions: go to cabinet 1, " in last
    assert "Reason within <think> </think> tags, then write one action within <action> </action> tags." in last
    assert "<|im_start|>user\nYou arrive at toilet 1. On the toilet 1, you see a cloth 2.\nAdmissible" in last
    assert "<information>" not in last
