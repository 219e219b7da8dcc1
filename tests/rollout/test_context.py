"""Context policies: the model's view of a long chain, in rows that match the server's requests to the token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.chains.context import is_long
from agentfactory.rollout.config import ContextConfig, RolloutConfig
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.chat_tokenizers import STRIPS_REASONING
from tests.scripted_chains import call as hermes_call
from tests.scripted_chains import scripted_chains


def test_when_a_policy_acts() -> None:
    def config(policy: str, **options: Any) -> RolloutConfig:
        return RolloutConfig.model_validate({"max_total_tokens": 100, "context": {"policy": policy, **options}})

    assert not is_long(1000, config("keep"))
    assert [is_long(n, config(policy="truncate")) for n in (74, 75)] == [False, True]
    with pytest.raises(ValueError, match="keep_turns: got 0 with policy=truncate"):
        config(policy="truncate", keep_turns=0)
    assert not is_long(74, config(policy="summarize", keep_turns=0))


call = partial(hermes_call, "note")


async def play(
    folder: Path, texts: list[str], template: str | None = None, **rollout: Any
) -> tuple[Trajectory, list[str], list[int]]:
    """A chain, its prompts and their lengths."""
    async with scripted_chains(folder, texts, template=template, rollout=rollout) as chains:
        trajectory = await chains.run()
        chains.check(trajectory)
        return trajectory, chains.sent(), [len(request["token_ids"]) for request in chains.server.requests]


TEMPLATES = pytest.mark.parametrize("template", [None, STRIPS_REASONING])


@TEMPLATES
async def test_truncate_leaves_old_turns_out_of_a_new_row(tmp_path: Path, template: str | None) -> None:
    texts = [call(text=f"<think>{n}</think>" if template else f"{n} and more") for n in range(7)] + ["done"]
    limit = (await play(tmp_path, texts, template))[2][3]
    fields = {"max_total_tokens": (4 * limit + 2) // 3, "context": {"policy": "truncate", "keep_turns": 1}}
    trajectory, sent, _ = await play(tmp_path, texts, template, max_turns=12, **fields)
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(trajectory.rows) > 2
    assert len(trajectory.turn_spans()) == trajectory.turns == 8
    assert len([m for m in trajectory.messages if m["role"] == "tool"]) == 7, "the record is whole"
    thought = "<think>" if template else ""
    for turn in (3, 5, 7):
        assert f"noted {thought}{turn - 1}" in sent[turn], "the last turn is there"
        assert f"noted {thought}{turn - 2}" not in sent[turn]
        assert f"noted {thought}{turn - 2}" in sent[turn - 1]
    assert all("go" in text for text in sent), "the task is always there"


@TEMPLATES
@pytest.mark.parametrize("keep", [0, 1])
async def test_summarize_goes_on_from_the_models_own_summary(tmp_path: Path, template: str | None, keep: int) -> None:
    calls = [call(text=f"entry {word} with some more words") for word in ("one", "two", "three")]
    limit = (await play(tmp_path, [*calls, "done"], template))[2][3]
    texts = [*calls, "All is well.", call(text="four"), "done"]
    context = {"policy": "summarize", "keep_turns": keep}
    fields = {"max_turns": 9, "max_total_tokens": (4 * limit + 2) // 3, "context": context}
    trajectory, sent, _ = await play(tmp_path, texts, template, **fields)
    assert trajectory.outcome is Outcome.COMPLETED
    assert ContextConfig.prompt in sent[3]
    assert "noted entry three" in sent[3], "the summary knows the last answer"
    assert "Summary of the work so far:\nAll is well." in sent[4]
    assert ContextConfig.prompt not in sent[4]
    assert ("noted entry three" in sent[4]) == (keep == 1)
    assert "noted entry two" not in sent[4]
    assert "noted four" in sent[5]
    assert trajectory.turns == len(trajectory.turn_spans()) == 6, "a summary is a turn, and trained"
    row, start, end = trajectory.turn_spans()[3]
    assert trajectory.turn_spans()[4][0] == row + 1, "what follows stands in a new row"
    assert all(trajectory.rows[row].mask[start:end])
    roles = "".join(m["role"][0] for m in trajectory.messages if m["role"] != "system")
    assert roles == "uatatatuaata", "the record holds question and summary where they were said"


async def test_what_no_policy_can_shorten_overflows(tmp_path: Path) -> None:
    (opening,) = (await play(tmp_path, ["done"]))[2]
    for policy in ("truncate", "summarize"):
        fields = {"max_total_tokens": (4 * (opening + 10)) // 3, "context": {"policy": policy, "keep_turns": 3}}
        trajectory, _, _ = await play(tmp_path, [call(text="one")] * 3, **fields)
        assert trajectory.outcome is Outcome.CONTEXT_OVERFLOW
        assert trajectory.turns == len(trajectory.turn_spans())
