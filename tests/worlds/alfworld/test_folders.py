"""Folders in the published layout: the published loader accepts ours, and ours accepts the same games as it does."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from agentfactory.base.user_code.import_path import own_python
from agentfactory.tools.tool import Finish
from agentfactory.worlds.alfworld.alfworld import AlfWorld, alfworld_tasks
from agentfactory.worlds.alfworld.engine import Engine
from agentfactory.worlds.alfworld.games import FOLDER, Split
from agentfactory.worlds.alfworld.write_games import write_games
from tests.worlds.alfworld.engines import PYTHON, needs_engine
from tests.worlds.opening import Open

pytestmark = [needs_engine, pytest.mark.processes]

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alfworld")
    engine = Engine(processes=2, games=200, python=PYTHON)
    try:
        files = [*write_games(engine, folder, COUNTS, at_once=2)]
    finally:
        engine.close()
    assert len(files) == 8
    assert all(file.is_file() for file in files)
    return folder


def test_the_published_loader_takes_our_folder_and_shows_what_we_show(
    folder: Path, tmp_path: Path, opened: Open
) -> None:
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


def test_a_folder_in_the_published_layout_is_played_by_our_chains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, opened: Open
) -> None:
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
