"""Rewards for coordinates in images and for answers about images, against independent references."""

import random
import string
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import RewardConfig
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.rewards.answers import anls, chosen, counted, relaxed_match
from agentfactory.rollout.rewards.boxes_and_points import iou, read_box, read_point
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule

RULE = SizeRule(28, 3136, 50176)


async def judged(name: str, text: str, row: dict, view: ModelView | None = None, **options) -> dict[str, float]:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    answer = Trajectory("c", messages, [], Outcome.COMPLETED, turns=1, stop_reason=StopReason.ANSWER)
    async with Rewards([RewardConfig(reward=name, options=options)]) as rewards:
        rewards.check(row)
        verdict = await rewards.score(answer, row, None, (), view)
    return {"reward": verdict.reward, **verdict.metrics}


def test_iou_is_the_share_of_common_pixels() -> None:
    rng = np.random.default_rng(0)
    positive = 0
    for _ in range(500):
        masks, boxes = [], []
        for _ in range(2):
            (left, right), (top, bottom) = (np.sort(rng.choice(31, 2, replace=False)) for _ in range(2))
            mask = np.zeros((30, 30), dtype=bool)
            mask[top:bottom, left:right] = True
            masks.append(mask)
            boxes.append((float(left), float(top), float(right), float(bottom)))
        share = (masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum()
        positive += share > 0
        assert iou(*boxes) == pytest.approx(share, abs=1e-12)
    assert 100 < positive < 500


BOXES: dict[str, tuple[float, ...]] = {
    "[1, 2, 3, 4]": (1, 2, 3, 4),
    '```json\n[{"bbox_2d": [10, 20.5, 30, 40], "label": "cat"}]\n```': (10, 20.5, 30, 40),
    "<|box_start|>(12,34),(56,78)<|box_end|>": (12, 34, 56, 78),
    "first [1, 2, 3, 4], rather (5, 6, 7, 8).": (5, 6, 7, 8),
    "[[ 1,2 , 3,4 ]]": (1, 2, 3, 4),
}


def test_boxes_and_points_are_read_as_models_write_them() -> None:
    assert {text: read_box(text) for text in BOXES} == BOXES
    assert [read_box(text) for text in ("[1, 2, 3]", "(1, 2)", "1, 2, 3, 4", "")] == [None] * 4
    texts = ("(3, 4)", '{"point_2d": [3, 4]}', "[0, 0, 10, 20]", "3, 4")
    assert [read_point(text) for text in texts] == [(3, 4), (3, 4), (5, 10), None]


@pytest.mark.parametrize("coordinates", list(Coordinates))
async def test_a_row_states_its_box_once_for_all_coordinates(tmp_path: Path, coordinates: str) -> None:
    Image.new("RGB", (640, 250)).save(tmp_path / "a.png")
    row = {"question": "?", "images": [str(tmp_path / "a.png")], "box": [100, 50, 300, 150]}
    view = ModelView(Coordinates(coordinates), RULE)
    for said, share in (([100, 50, 300, 150], 1.0), ([200, 50, 400, 150], 1 / 3), ([400, 50, 500, 150], 0.0)):
        numbers = ", ".join(f"{number:.9f}" for number in view.from_pixels(said, (640, 250)))
        verdict = await judged("box_iou", f"<answer>[{numbers}]</answer>", row, view)
        assert verdict["iou"] == pytest.approx(share, abs=1e-6)
        assert verdict["success"] == (share > 0.5)
        binary = await judged("box_iou", f"[{numbers}]", row, view, binary=True, threshold=0.3)
        assert binary["reward"] == (share > 0.3)
        middle = await judged("point_in_box", f"[{numbers}]", row, view)
        assert middle["reward"] == (share > 0.3)


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("box_iou", {"images": ["a"], "box": [0, 0, 5]}, r"needs \[left, top, right, bottom\] in the field 'box'"),
        ("box_iou", {"images": ["a"], "box": [5, 0, 5, 9]}, r"not \[5, 0, 5, 9\]"),
        ("box_iou", {"images": ["a"], "box": [0, 0, 5, 10**400]}, r"needs \[left, top, right, bottom\]"),
        ("point_in_box", {"images": [], "box": [0, 0, 5, 9]}, "needs image 0 of the row, which has 0"),
        ("multiple_choice", {"answer": "yes"}, "needs a letter in the field 'answer', not 'yes'"),
        ("count", {"answer": "many"}, "needs a number in the field 'answer', not 'many'"),
        ("anls", {"answer": []}, "needs answers in the field 'answer'"),
    ],
)
def test_rows_that_cannot_be_judged_are_told_before_the_run(name: str, row: dict, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        Rewards([name]).check({"question": "?", **row})


def edits(one: str, other: str) -> int:
    """Levenshtein distance, cell by cell."""
    table = np.zeros((len(one) + 1, len(other) + 1), dtype=int)
    table[:, 0], table[0] = np.arange(len(one) + 1), np.arange(len(other) + 1)
    for row in range(1, len(one) + 1):
        for column in range(1, len(other) + 1):
            change = table[row - 1, column - 1] + (one[row - 1] != other[column - 1])
            table[row, column] = min(change, table[row - 1, column] + 1, table[row, column - 1] + 1)
    return int(table[-1, -1])


def test_anls_is_that_of_its_paper() -> None:
    rng, zeros = random.Random(0), 0
    for _ in range(300):
        answers = ["".join(rng.choices("abc ", k=rng.randint(1, 8))).strip() or "a" for _ in range(rng.randint(1, 3))]
        said = "".join(rng.choices("abcA ", k=rng.randint(0, 8)))
        scores = []
        for answer in answers:
            plain, wanted = (" ".join(text.lower().split()) for text in (said, answer))
            distance = edits(plain, wanted) / max(len(plain), len(wanted))
            scores.append(1 - distance if distance < 0.5 else 0)
        zeros += max(scores) == 0
        assert anls(said, answers) == pytest.approx(max(scores), abs=1e-12)
    assert 20 < zeros < 280


def test_numbers_of_charts_may_differ_by_five_percent() -> None:
    same = [
        ("10.4", "10"),
        ("10.5", "10"),
        ("-9.6", "-10"),
        ("10%", "0.1"),
        ("52%", "50%"),
        ("0", "0"),
        ("Blue ", "blue"),
    ]
    # as in ChartQA's code, an answer of 0 is text
    other = [("10.6", "10"), ("0.0", "0"), ("0.01", "0"), ("dark blue", "blue"), ("ten", "10")]
    assert [relaxed_match(*pair) for pair in same + other] == [True] * 7 + [False] * 5


OPTIONS = {"A": "red", "B": "light blue", "C": "C"}


LETTERS = dict(
    [
        *(("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("B. light blue", "B"), ("(b) light blue", "B")),
        *(("light blue", "B"), ("Light  blue.", "B"), ("The answer is B.", "B"), ("the answer: (A)", "A")),
        *(("Option A or option C", "C"), ("A dog is there", None), ("blue", None), ("", None)),
        ("I think that a cat is on the mat", None),
    ]
)


def test_an_option_is_chosen_by_its_letter_or_its_text() -> None:
    assert {said: chosen(said, OPTIONS) for said in LETTERS} == LETTERS


async def test_multiple_choice_takes_options_of_the_row() -> None:
    row = {"answer": "(b)", "choices": ["red", "light blue"]}
    said, extract = "<answer>light blue</answer>", "<answer>(.*?)</answer>"
    verdict = await judged("multiple_choice", said, row, options="choices", extract=extract)
    assert verdict == {"reward": 1, "success": 1, "chose_none": 0}
    assert (await judged("multiple_choice", "light blue", row))["chose_none"] == 1
    assert (await judged("multiple_choice", "A", row, options="choices"))["reward"] == 0


def test_things_are_counted_in_digits_and_in_words() -> None:
    numbers = {
        **{"There are 3 cats and 12 dogs.": 12, "Twelve": 12, "1,204 people": 1204, "2.5": 2.5, "none": None},
        **{"someone saw four": 4, "v2": None, "zero": 0, "": None},
    }
    assert {said: counted(said) for said in numbers} == numbers


def test_long_texts_take_no_time() -> None:
    text = "[1, 2, " * 20_000 + string.printable * 1000 + "9" * 100_000
    assert (read_box(text), read_point(text), chosen(text)) == (None, None, None)
    assert counted("9" * 100_000 + " x") is not None
