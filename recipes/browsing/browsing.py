"""Questions to answer from web pages: the reward for an answer and its source."""

import re
from typing import Any

from agentfactory import Trajectory, reward
from agentfactory.rollout.rewards.answers import normalize


@reward
def answer_with_source(
    prediction: str, trajectory: Trajectory, answer: str, source_share: float = 0.3
) -> dict[str, float]:
    """Return 1 for the right answer with its source, 1 - `source_share` without, and 0 for a wrong answer.

    The source counts if the chain opened it and a tool showed a part of it that contains the answer; for "yes" and
    "no", if the chain opened it.
    """
    said, wanted = normalize(_last("answer", prediction)), normalize(answer)
    right = said == wanted
    read = pages_read(trajectory.messages)
    text = read.get(_last("source", prediction))
    opened = text is not None
    sourced = opened and (wanted in ("yes", "no") or wanted in normalize(text or ""))
    return {
        "reward": float(right) * (1.0 - source_share * (not sourced)),
        "success": float(right),
        "source_opened": float(opened),
        "source_says_it": float(sourced),
        "pages_opened": float(len(read)),
    }


def pages_read(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Return the address of each page that was opened, with all text of it that tools showed.

    The first line of a result is excluded: it is an error, the address, or the text to find, which the model wrote.
    """
    read: dict[str, str] = {}
    current = None
    for message in messages:
        if message["role"] != "tool":
            continue
        if address := message.get("info", {}).get("opened"):
            current = address
        if current is not None and message["name"] in ("browse", "follow", "back", "page", "find_on_page"):
            said = message["content"].partition("\n")[2]
            read[current] = f"{read.get(current, '')}\n{said}"
    return read


def _last(tag: str, text: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else ""
