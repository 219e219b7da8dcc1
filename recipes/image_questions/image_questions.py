"""Questions about images: visual search as in DeepEyes (Zheng et al., 2025, arXiv:2505.14362), with its tool, prompt
and reward, and the evaluated data sets."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from agentfactory import Trajectory, reward, tool
from agentfactory.people.judges.judge import Judge
from agentfactory.rollout.rewards.answers import chosen
from agentfactory.rollout.rewards.text import last_match
from agentfactory.worlds.images.image_tools import Box, ImageTools

PROMPT = (
    "\nThink first, call **image_zoom_in_tool** if needed, then answer. Format strictly as:  <think>...</think>  "
    "<tool_call>...</tool_call> (if tools needed)  <answer>...</answer> "
)
"""DeepEyes' suffix of each question."""
ANSWER = "<answer>(.*?)</answer>"
JUDGE_PROMPT = """\
Question: {question}
Right answer: {answer}
Given answer: {given}

Do the two answers say the same? "pink" and "it is pink" do, and "yes" and "yes, the kite is large". Say 1 if they do
and 0 if they do not, and nothing else."""


class VisualSearch(ImageTools):
    """The tool of DeepEyes, which crops the task's first image. A result is the image alone."""

    def __init__(self) -> None:
        super().__init__(labels=False)

    @tool
    def image_zoom_in_tool(self, bbox_2d: Box, label: str = "") -> Any:
        """Zoom in on a specific region of an image by cropping it based on a bounding box (bbox) and an optional object
        label.

        Args:
            bbox_2d: The bounding box of the region to zoom in, as [x1, y1, x2, y2], where (x1, y1) is the top-left
                corner and (x2, y2) is the bottom-right corner, {coordinates}.
            label: The name or label of the object in the specified bounding box (optional).
        """
        return self.zoom(bbox_2d)


@reward
class SearchReward:
    """A reward like DeepEyes' (section 3.3): for a right answer, for the form, and, if the answer is right, for tool
    use. The default weights were not compared with the published code, a version of which rewards tool use without that
    condition.

    If the reference answer is one letter, it is compared as an option. Otherwise a language model at `url` compares;
    without one, the texts must be equal.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str = "judge",
        right: float = 0.8,
        form: float = 0.2,
        looking: float = 1.2,
    ) -> None:
        self._right, self._form, self._looking = right, form, looking
        self._judge = None if url is None else Judge(url=url, model=model, prompt=JUDGE_PROMPT, pattern="[01]")

    async def __call__(self, trajectory: Trajectory, prediction: str, question: str, answer: str) -> dict[str, float]:
        """Return the reward, with `success` and `looked`."""
        given = (last_match(ANSWER, prediction) or "").strip()
        success = await self._same(trajectory, given, question, answer)
        looked = float(any(message["role"] == "tool" for message in trajectory.messages))
        form = -float(not _is_formed(trajectory))
        total = self._right * success + self._form * form + self._looking * success * looked
        return {"reward": total, "success": success, "looked": looked}

    async def _same(self, trajectory: Trajectory, given: str, question: str, answer: str) -> float:
        if not given:
            return 0.0
        if re.fullmatch("[A-Z]", answer):
            return float(chosen(given) == answer)
        if given.lower() == answer.lower():
            return 1.0
        if self._judge is None:
            return 0.0
        return await self._judge(trajectory, question=question.removesuffix(PROMPT), answer=answer, given=given)

    async def close(self) -> None:
        """Close the connections to the judge."""
        if self._judge is not None:
            await self._judge.close()


def _is_formed(trajectory: Trajectory) -> bool:
    """Return whether each tag that a message opens is closed, and the last message answers once."""
    said = [str(m.get("content") or "") for m in trajectory.messages if m["role"] == "assistant"]
    closed = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for text in said for tag in ("think", "answer"))
    return closed and bool(said) and said[-1].count("<answer>") == 1


# ---- data


def trained(limit: int, path: str = "ChenShawn/DeepEyes-Datasets-47k") -> Iterator[dict[str, Any]]:
    """Yield the first `limit` questions of DeepEyes' data on fine details, which comes from V*.

    Args:
        limit: Number of questions; their images stay in memory.
        path: A hub data set with DeepEyes' columns.
    """
    import datasets

    file = "data_0.1.2_visual_toolbox_v2.parquet"
    for row in islice(datasets.load_dataset(path, data_files=[file], split="train", streaming=True), limit):
        question, answer = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
        yield {"question": question + PROMPT, "images": row["images"], "answer": answer}


def v_star(path: str = "lmms-lab/vstar-bench") -> Iterator[dict[str, Any]]:
    """Yield V*Bench (Wu and Xie, 2023, arXiv:2312.14135): 191 questions with options.

    Args:
        path: A hub data set with these columns.
    """
    import datasets

    for row in _undecoded(datasets.load_dataset(path, split="test")):
        yield {
            "question": row["text"] + PROMPT,
            "images": [row["image"]],
            "answer": row["label"],
            "data_source": row["category"],
        }


def hr_bench(size: str = "4k", path: str = "DreamMr/HR-Bench") -> Iterator[dict[str, Any]]:
    """Yield HR-Bench (Wang et al., 2024, arXiv:2408.15556): questions with options about images of 4,000 or 8,000
    pixels.

    Args:
        size: 4k or 8k.
        path: A hub data set with these columns.
    """
    import datasets

    for row in datasets.load_dataset(path, "hrbench_version_split", split=f"hrbench_{size}"):
        options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
        yield {
            "question": f"Question: {row['question']}\nOptions:\n{options}\n{PROMPT}",
            "images": [row["image"]],  # in base64
            "answer": row["answer"],
            "data_source": row["category"],
        }


def _undecoded(rows: Any) -> Any:
    """Return the data set with its images as undecoded files."""
    import datasets

    return rows.cast_column("image", datasets.Image(decode=False))
