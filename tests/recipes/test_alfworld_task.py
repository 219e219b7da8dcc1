"""ALFWorld's recipes: for real models, in the published format; and the small one, with games in small rooms,
transcripts that match the engine, and a tokenizer with one token per name."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
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
Room, Goal, small_games, look_everywhere, goals, search, make_tokenizer = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("Room", "Goal", "small_games", "look_everywhere", "goals", "search", "make_tokenizer")
)
NAME, ORDER, PLACES, TASK = (load_object(f"prepare.py:{name}", RECIPES) for name in ("NAME", "ORDER", "PLACES", "TASK"))
TEMPLATE = "put some {obj} on {recep}"
ROOM = Room(
    "You see a bed 1, a drawer 2, a drawer 1, and a shelf 1.\n\n",
    {
        "bed 1": "You arrive at bed 1. On the bed 1, you see nothing.",
        "drawer 2": "You arrive at drawer 2. The drawer 2 is closed.",
        "drawer 1": "You arrive at drawer 1. The drawer 1 is closed.",
        "shelf 1": "You arrive at shelf 1. On the shelf 1, you see a cd 1, a pen 2, and a pen 1.",
    },
    {
        "drawer 2": "You open the drawer 2. The drawer 2 is open. In it, you see a cd 2.",
        "drawer 1": "You open the drawer 1. The drawer 1 is open. In it, you see nothing.",
    },
    {"drawer 2": "Second drawer.", "drawer 1": "First drawer."},
)


def commands(messages: list[dict[str, Any]]) -> list[str]:
    return [m["tool_calls"][0]["function"]["arguments"]["command"] for m in messages if "tool_calls" in m]


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
                    scene = play.act(*commands([message]))
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
def test_what_could_be_asked_for_is_possible_and_not_done(engine: Engine) -> None:
    found = goals(engine.package(), ROOM)
    # a cd lies in a drawer and on the shelf already, a pen on the shelf; beds hold neither
    assert found == [Goal("pen", "drawer")]


def test_who_is_told_not_to_give_up_does_the_task() -> None:
    to_bed = "go to bed 1; go to drawer 2; open drawer 2; take cd 2 from drawer 2; go to bed 1; move cd 2 to bed 1"
    done = {
        ("cd", "bed"): to_bed,
        ("pen", "drawer"): "go to bed 1; go to drawer 2; open drawer 2; go to drawer 1; open drawer 1; go to shelf 1; "
        "take pen 2 from shelf 1; go to drawer 2; move pen 2 to drawer 2",
    }
    for asked, way in done.items():
        found = [search(ROOM, Goal(*asked), TEMPLATE, random.Random(seed)) for seed in range(50)]
        ordered = [messages for messages in found if messages[0]["content"] == ORDER]
        assert ordered
        assert {"; ".join(commands(messages)) for messages in ordered} == {way}
        for message in ordered[0]:
            for command in commands([message]):
                assert message["content"] == NAME.findall(command)[0]
        assert {messages[1]["content"] for messages in found} == {
            f"{ROOM.opening}{TASK}put some {asked[0]} on {asked[1]}."
        }


def test_a_name_is_one_token_wherever_it_stands() -> None:
    transcripts = [search(ROOM, Goal("pen", "bed"), TEMPLATE, random.Random(seed)) for seed in range(20)]
    tokenizer = make_tokenizer(transcripts)
    tokens = tokenizer.tokenize("You see a bed 1, a drawer 2.\n\nYour task is to: put some pen on bed.")
    for token in ("bed 1", "drawer 2", "pen", "bed"):
        assert token in tokens
    assert "take " in tokenizer.tokenize("take cd 2 from drawer 2")
    text = "Nothing happens. A mug 7 of yours; 3 tables."  # includes text that no transcript has
    assert tokenizer.decode(tokenizer.encode(text)) == text


def recipe_of(name: str) -> Recipe:
    recipe = load_and_check(RECIPES / name, lacks=[])
    assert isinstance(recipe, Recipe)
    return recipe


@needs_engine
@pytest.mark.parametrize("name", ["3b-lora-24gb.yaml", "7b-full-8gpu.yaml"])
def test_the_recipes_say_which_folder_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name)
    assert recipe.data is not None
    assert recipe.eval.data is not None
    recipe.data.options["python"] = recipe.eval.data.options["python"] = PYTHON
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(SettingError, match=rf"\$ALFWORLD_DATA: there is no folder {tmp_path}/json_2.1.1 with games"):
        load_tasks(recipe.data)
    recipe.data.options["data"] = recipe.eval.data.options["data"] = None
    assert len(load_tasks(recipe.data)) == 3000
    assert len(load_tasks(recipe.eval.data)) == 150


@needs_engine
async def test_a_chain_acts_in_the_published_format(engine: Engine, tmp_path: Path) -> None:
    recipe = recipe_of("3b-lora-24gb.yaml")
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
