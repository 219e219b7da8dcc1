"""The environment: won and lost chains, actions, limits, ended processes. Folders in the published layout: the
published loader accepts ours, and ours accepts the same games as it does."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall, ToolInfrastructureError
from agentfactory.base.user_code.import_path import own_python
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset
from agentfactory.tools.tool import Finish
from agentfactory.worlds.alfworld.alfworld import AlfWorld, alfworld_tasks
from agentfactory.worlds.alfworld.engine import Engine
from agentfactory.worlds.alfworld.games import FOLDER, GeneratedGames, Split
from agentfactory.worlds.alfworld.generator import TaskType
from agentfactory.worlds.alfworld.write_games import check, write_games
from tests.conftest import REPOSITORY
from tests.waiting import wait_for
from tests.worlds.alfworld.engines import PYTHON, needs_engine
from tests.worlds.opening import Open, tools_of

pytestmark = [needs_engine, pytest.mark.processes]

TWO_BOOKS = "valid_seen/000005"
"""A game of our own: put two books on a bed."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(processes=2, games=200, python=PYTHON)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def games(engine: Engine) -> GeneratedGames:
    return GeneratedGames(0, engine.package())


@pytest.fixture
def environment(opened: Open) -> AlfWorld:
    return opened(AlfWorld, python=PYTHON, processes=1)


houses = partial(tools_of, "alfworld", python=PYTHON)


async def act(session: ToolSession, command: str) -> str:
    result = await session.call(ToolCall("1", "action", {"command": command}))
    assert isinstance(result.content, str), result
    return result.content


async def win(toolset: Toolset, games: GeneratedGames, row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a chain that follows a game's walkthrough."""
    async with toolset.chain(row["game"], row) as session:
        for action in games.game(row["game"]).walkthrough:
            assert "Nothing happens" not in await act(session, action)
        judged = await session.reward()
        return {"reward": judged.reward, **judged.metrics}


async def test_chains_win_two_games_of_each_type_side_by_side(games: GeneratedGames) -> None:
    rows = [*alfworld_tasks("train", python=PYTHON)][:6] + [*alfworld_tasks("valid_unseen", python=PYTHON)][:6]
    async with houses(processes=2) as toolset:
        assert [spec.name for spec in toolset.specs] == ["action"]
        won = await asyncio.gather(*(win(toolset, games, row) for row in rows))
    assert [metrics["reward"] for metrics in won] == [metrics["success"] for metrics in won] == [1.0] * 12
    assert [metrics[kind] for metrics, kind in zip(won, [*TaskType] * 2, strict=True)] == [1.0] * 12


def test_what_does_nothing_is_told_and_the_limit_of_steps_ends_the_chain(games: GeneratedGames, opened: Open) -> None:
    environment = opened(AlfWorld, python=PYTHON, processes=1, max_steps=9)
    environment.reset(TWO_BOOKS)
    for action in ("", " ", "fly", "take moon 1 from bed 1", "\ud800", "\x00\n{}", "go to " + "x" * 10_000, "🙂"):
        assert environment.action(action) == "Nothing happens."
    last = environment.action("look")
    assert last.value.startswith("You are in the middle of a room.")
    assert environment.reward() == {"reward": 0.0, "success": 0.0, "steps": 9.0}
    opening = environment.reset(TWO_BOOKS, task_type="pick_two_obj_and_place")
    assert environment.reward() == {"reward": 0, "success": 0, "steps": 0, "pick_two_obj_and_place": 0}
    results = [environment.action(action) for action in games.game(TWO_BOOKS).walkthrough]
    assert [isinstance(result, Finish) for result in results] == [False] * 8 + [True]
    assert environment.reward() == {"reward": 1, "success": 1, "steps": 9, "pick_two_obj_and_place": 1}
    assert environment.reset(TWO_BOOKS) == opening
    assert environment.reward() == {"reward": 0, "success": 0, "steps": 0}


def test_the_anchor_is_what_is_seen_and_what_can_be_done(environment: AlfWorld) -> None:
    environment.reset("valid_seen/000002")
    first = environment.anchor()
    assert first is not None
    environment.action("look")
    look = environment.anchor()
    environment.action("go to toilet 1")
    there = environment.anchor()
    environment.action("take cloth 2 from toilet 1")
    environment.action("go to cabinet 4")
    environment.action("go to toilet 1")
    # the admissible actions show that the agent holds a cloth
    assert environment.anchor() not in (first, look, there)


async def test_a_killed_process_ends_its_chains_as_infrastructure_and_no_others(games: GeneratedGames) -> None:
    rows = [*alfworld_tasks("train", types=["pick_and_place_simple"], python=PYTHON)][:3]
    async with houses(processes=2) as toolset:
        async with toolset.chain("a", rows[0]) as a, toolset.chain("b", rows[1]) as b:
            assert await act(a, "look")
            assert await act(b, "look")
            victims = engine_processes()
            assert len(victims) == 2
            victims[0].kill()
            ended = []
            for session, row in ((a, rows[0]), (b, rows[1])):
                try:
                    for action in games.game(row["game"]).walkthrough:
                        await act(session, action)
                except ToolInfrastructureError as error:
                    ended.append(str(error))
                    continue
                judged = await session.reward()
                assert judged.reward == 1.0
            assert len(ended) == 1
            assert "ALFWorld's process ended (status -9), with this chain's game in it" in ended[0]
        assert (await win(toolset, games, rows[2]))["reward"] == 1.0
    wait_for(lambda: not engine_processes())


def engine_processes(parent: int | None = None) -> list[psutil.Process]:
    """The engines' processes, except the one of these tests."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        if process.status() != psutil.STATUS_ZOMBIE and process.pid not in _ours:
            found += [process] if "engine_process.py" in " ".join(process.cmdline()) else []
    return found


_ours: set[int] = set()


@pytest.fixture(autouse=True)
def without_ours(engine: Engine) -> None:
    engine.package()
    _ours.update(engine.pids())


def test_a_process_is_replaced_after_its_games_and_ends_with_the_last(games: GeneratedGames, opened: Open) -> None:
    engine = opened(Engine, processes=1, games=2, python=PYTHON)
    content = games.content("train/000001")
    first, _ = engine.open(content)
    (old,) = engine.pids()
    second, scene = engine.open(content)
    assert engine.pids() == [old]
    third, third_scene = engine.open(content)
    assert engine.started == len(engine.pids()) == 2
    assert third_scene == scene
    first.close()
    assert old in engine.pids()
    assert second.act("look").observation.startswith("You are in the middle")
    second.close()
    assert old not in engine.pids()
    assert not psutil.pid_exists(old)
    assert third.act("inventory").observation == "You are not carrying anything."
    engine.close()
    with pytest.raises(ToolInfrastructureError, match="has ended"):
        third.act("look")


def test_missing_packages_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    lacking = r"python: ALFWorld needs alfworld and fast_downward, not installed where .*; fix: pip install 'agent"
    with pytest.raises(SettingError, match=lacking):
        alfworld_tasks("train", python=str(bare))
    with pytest.raises(SettingError, match=lacking):
        AlfWorld(python=str(bare))


def test_tasks_are_rows_of_a_split() -> None:
    rows = {split: [*alfworld_tasks(split, python=PYTHON)] for split in ("train", "valid_seen", "valid_unseen")}
    assert {split: len(of) for split, of in rows.items()} == {"train": 3000, "valid_seen": 150, "valid_unseen": 150}
    assert rows["train"][6]["game"] == "train/000006"
    assert rows["train"][6]["task_type"] == "pick_and_place_simple"
    heated = [*alfworld_tasks("valid_seen", types=["pick_heat_then_place_in_recep"], python=PYTHON)]
    assert [row["game"] for row in heated[:2]] == ["valid_seen/000003", "valid_seen/000009"]
    assert len(heated) == 25


def test_games_are_the_same_by_seed_and_rooms_of_the_last_split_are_new(engine: Engine, games: GeneratedGames) -> None:
    assert GeneratedGames(0, engine.package()).game(TWO_BOOKS) == games.game(TWO_BOOKS)
    assert GeneratedGames(1, engine.package()).game(TWO_BOOKS) != games.game(TWO_BOOKS)
    rooms = {
        split: {games.game(f"{split}/{number:06d}").trajectory["scene"]["scene_num"] for number in range(150)}
        for split in ("train", "valid_seen", "valid_unseen")
    }
    assert rooms["train"] & rooms["valid_seen"]
    assert not rooms["valid_unseen"] & (rooms["train"] | rooms["valid_seen"])
    assert {number % 100 for number in rooms["valid_unseen"]} == {1, 2, 3, 4, 5, 6}


def test_a_walkthrough_that_does_not_win_is_an_error(engine: Engine, games: GeneratedGames) -> None:
    game = games.game(TWO_BOOKS)
    seen: list[str] = []
    check(engine, game, seen.append)
    assert len(seen) == len(game.walkthrough) + 1
    walkthrough = game.walkthrough
    game.content["walkthrough"] = walkthrough[:-1]
    with pytest.raises(ValueError, match="is not won by its walkthrough"):
        check(engine, game)
    game.content["walkthrough"] = [*walkthrough, "look"]
    with pytest.raises(ValueError, match="'look' comes too late"):
        check(engine, game)


def test_the_visit_on_the_page_is_what_the_game_shows(environment: AlfWorld) -> None:
    page = (REPOSITORY / "docs" / "alfworld.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| **", "| the room |"))]
    row = json.loads(page.split("```json")[1].split("```")[0])
    shown: Any = environment.reset(**row)
    for speaker, text in rows:
        if speaker == "**action**":
            shown = environment.action(text)
            shown = shown.value if isinstance(shown, Finish) else shown
        else:
            assert shown.replace("\n", " ").replace("  ", " ") == text
    assert environment.reward()["reward"] == 1.0


# ---- folders in the published layout


COUNTS = {Split.TRAIN: 6, Split.VALID_SEEN: 1, Split.VALID_UNSEEN: 1}

PUBLISHED = """
import json, os, sys

data = os.environ["ALFWORLD_DATA"] = sys.argv[1]  # the engine overwrites sys.argv
from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

config = {
    "dataset": {
        "data_path": "$ALFWORLD_DATA/json_2.1.1/train",
        "eval_id_data_path": "$ALFWORLD_DATA/json_2.1.1/valid_seen",
        "eval_ood_data_path": "$ALFWORLD_DATA/json_2.1.1/valid_unseen",
        "num_train_games": -1,
        "num_eval_games": -1,
    },
    "env": {
        "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False, "goal_desc_human_anns_prob": 0,
        "expert_type": "handcoded",
    },
    "general": {"training_method": "dqn"},
    "rl": {"training": {"max_nb_steps_per_episode": 50}},
}
if __name__ == "__main__":
    listed, played = [], {}
    for split in ("train", "eval_in_distribution", "eval_out_of_distribution"):
        loader = AlfredTWEnv(config, train_eval=split)
        listed += [os.path.relpath(os.path.dirname(file), data + "/json_2.1.1") for file in loader.game_files]
        environment = loader.init_env(batch_size=1)
        for _ in range(2 if split == "train" else 1):
            (shown,), infos = environment.reset()
            file, seen = infos["extra.gamefile"][0], [[shown, infos["admissible_commands"][0]]]
            for action in json.load(open(file))["walkthrough"]:
                (shown,), _, _, infos = environment.step([action])
                seen.append([shown, infos["admissible_commands"][0]])
            played[os.path.relpath(os.path.dirname(file), data + "/json_2.1.1")] = [infos["won"][0], seen]
    print("\\n" + json.dumps([listed, played]))
"""


@pytest.fixture(scope="module")
def folder(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alfworld")
    files = [*write_games(engine, folder, COUNTS, at_once=2)]
    assert len(files) == 8
    assert all(file.is_file() for file in files)
    return folder


def test_their_loader_takes_our_folder_and_shows_what_we_show(folder: Path, tmp_path: Path, opened: Open) -> None:
    (tmp_path / "published.py").write_text(PUBLISHED)
    command = own_python(str(tmp_path / "published.py"), str(folder), executable=PYTHON)
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=tmp_path).stdout
    listed, played = json.loads(out.splitlines()[-1])
    ours = (alfworld_tasks(split, data=str(folder), python=PYTHON) for split in Split)
    assert sorted(listed) == sorted(row["game"] for rows in ours for row in rows)
    assert len(played) == 4
    environment = opened(AlfWorld, data=str(folder), python=PYTHON, processes=1)
    for game, (won, seen) in played.items():
        assert won
        content = json.loads((folder / FOLDER / game / "game.tw-pddl").read_text())
        assert environment.reset(game) == seen[0][0]
        for action, (shown, admissible) in zip(content["walkthrough"], seen[1:], strict=True):
            scene = environment._play.act(action)
            assert (scene.observation, [*scene.admissible]) == (shown, admissible)


def test_a_published_folder_is_played_by_chains(folder: Path, monkeypatch: pytest.MonkeyPatch, opened: Open) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    (row,) = alfworld_tasks("valid_unseen", data="$ALFWORLD_DATA", python=PYTHON)
    assert row["game"].startswith("valid_unseen/pick_and_place_simple-")
    for data in ("$ALFWORLD_DATA", str(folder / FOLDER)):
        environment = opened(AlfWorld, data=data, python=PYTHON, processes=1)
        environment.reset(**row)
        content = json.loads((folder / FOLDER / row["game"] / "game.tw-pddl").read_text())
        results = [environment.action(action) for action in content["walkthrough"]]
        assert [isinstance(result, Finish) for result in results] == [False] * (len(results) - 1) + [True]
        assert environment.reward()["success"] == 1.0
        with pytest.raises(ValueError, match=r"game: got 'train/none', and there is no file /.*/train/none/ga"):
            environment.reset("train/none")
        for name in (f"../{FOLDER}/{row['game']}", str(folder / FOLDER / row["game"])):
            with pytest.raises(ValueError, match=r"there is no file .* in the folder of games"):
                environment.reset(name)


def test_what_the_published_loader_leaves_out_is_left_out(folder: Path) -> None:
    first, *others = (row["game"] for row in alfworld_tasks("train", data=str(folder), python=PYTHON))
    game = folder / FOLDER / first / "game.tw-pddl"
    trajectory = (game.with_name("traj_data.json")).read_text()
    content = json.loads(game.read_text())
    added = {
        "train/pick_and_place_with_movable_recep-Mug-Bowl-Desk-301/trial_1": (trajectory, content),
        "train/pick_and_place_simple-AppleSliced-None-Desk-301/trial_1": (trajectory, content),
        "train/pick_and_place_simple-Apple-None-Desk-301/trial_1": (trajectory, content | {"solvable": False}),
        "train/pick_and_place_simple-Apple-None-Desk-301/trial_2": (trajectory, {"pddl_problem": ""}),
        "train/pick_and_place_simple-Apple-None-Desk-301/trial_3": (trajectory, None),
        "train/pick_and_place_simple-Apple-None-Desk-301/trial_4": ('{"task_type": "cook"}', content),
    }
    for name, (text, data) in added.items():
        place = folder / FOLDER / name
        place.mkdir(parents=True)
        (place / "traj_data.json").write_text(text)
        if data is not None:
            (place / "game.tw-pddl").write_text(json.dumps(data))
    try:
        assert [row["game"] for row in alfworld_tasks("train", data=str(folder), python=PYTHON)] == [first, *others]
        (only,) = alfworld_tasks("train", str(folder), ["pick_cool_then_place_in_recep"], PYTHON)
        assert only["task_type"] == "pick_cool_then_place_in_recep"
    finally:
        for name in added:
            shutil.rmtree(folder / FOLDER / name)
