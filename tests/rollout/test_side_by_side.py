"""Two evaluations of the same tasks beside each other, compared with values by hand."""

from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.rollout.evaluation.side_by_side import Difference, differences, read_other
from agentfactory.rollout.groups.group_files import append_group
from agentfactory.rollout.images.parts import image_part
from agentfactory.rollout.images.store import url_of
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

T_QUANTILE = 4.302652729911275
"""Student's t for 97.5 % with 2 degrees of freedom, from a table."""


def write(folder: Path, number: int, task: dict[str, Any], rewards: list[float | None]) -> Path:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    chains = [
        Trajectory("c", [], [], Outcome.COMPLETED, reward, {} if reward is None else {"success": float(reward > 1)})
        for reward in rewards
    ]
    append_group(folder / "trajectories" / "final-sampled.jsonl", Group(f"sampled-{number:05d}", task, chains))
    (folder / "summary.json").write_text("{}")
    return folder


def evaluation(folder: Path, tasks: dict[str, list[float | None]]) -> Path:
    for number, (question, rewards) in reversed(list(enumerate(tasks.items()))):
        write(folder, number, {"question": question}, rewards)
    return folder


def compared(this: Path, other: Path) -> dict[str, dict[str, Difference]]:
    return differences(read_other(this).means, read_other(other).means)


def test_differences_are_means_over_the_tasks_that_both_have(tmp_path: Path) -> None:
    this = evaluation(tmp_path / "a", {"x": [1.0, 3.0], "y": [2.0, None], "z": [4.0, 4.0], "w": [9.0], "v": [None]})
    other = evaluation(tmp_path / "b", {"z": [1.0], "y": [2.0, 2.0], "x": [1.0], "u": [0.0], "v": [1.0]})
    found = compared(this, other)["sampled"]["reward"]
    # x, y, z: 2 - 1, 2 - 2, 4 - 1
    assert found.difference.tasks == 3
    assert found.this == pytest.approx(8 / 3)
    assert found.other == pytest.approx(4 / 3)
    assert found.difference.value == pytest.approx(4 / 3)
    deviation = (((1 - 4 / 3) ** 2 + (0 - 4 / 3) ** 2 + (3 - 4 / 3) ** 2) / 2) ** 0.5
    half = T_QUANTILE * deviation / 3**0.5
    assert found.difference.low == pytest.approx(4 / 3 - half)
    assert found.difference.high == pytest.approx(4 / 3 + half)
    success = compared(this, other)["sampled"]["success"]
    assert (success.this, success.other) == (pytest.approx(2.5 / 3), pytest.approx(1 / 3))


def test_images_are_the_same_in_all_runs_and_sizes(tmp_path: Path) -> None:
    def with_image(run: str, number: int, image: str, resized: str, reward: float) -> Path:
        content = [image_part(url_of(resized * 32)), {"type": "text", "text": "?"}]
        task = {"images": [f"/{run}/images/{image}.png"], "messages": [{"role": "user", "content": content}]}
        return write(tmp_path / run, number, task, [reward])

    with_image("a", 0, "car", "0", 1.0)
    this = with_image("a", 1, "dog", "1", 5.0)
    other = with_image("b", 0, "dog", "2", 2.0)
    found = compared(this, other)["sampled"]["reward"]
    assert (found.difference.value, found.difference.tasks) == (3.0, 1)


def test_an_evaluation_that_has_not_finished_or_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", {"x": [5.0]})
    chains = folder / "trajectories" / "final-sampled.jsonl"
    chains.write_bytes(chains.read_bytes()[:-20])
    with pytest.raises(SettingError, match=r"--beside: .* cannot be read: .*sampled.jsonl:1 is not a saved group"):
        read_other(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(SettingError, match=r"--beside: the evaluation in .* has not finished"):
        read_other(folder)
