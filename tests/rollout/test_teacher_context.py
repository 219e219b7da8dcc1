"""Teachers with more in their context: the prompts that the worker stores, over templates, tools, images, failures."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.rollout.chains.chain_runner import ChainRunner, RolloutStoppedError
from agentfactory.rollout.groups.group_files import append_group, read_groups
from agentfactory.rollout.groups.teacher_context import FIELD, TeacherContext, check_answers, load_context, with_text
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.batches.batch import training_row
from tests.model_families import FAMILIES, Family, renderer_of
from tests.scripted_chains import scripted_chains

SUMS = """
from agentfactory import reward, tool

@reward
def success(trajectory):
    won = float(trajectory.id in ("c1", "c2"))
    return {"reward": won, "success": won}

@tool
def add(a: int, b: int) -> str:
    'Add.'
    if a > 5:
        raise ValueError("too large")
    return str(a + b)
"""
HINTS = """
import asyncio

def hint(trajectory, task, trajectories):
    assert trajectory in trajectories
    trajectory.messages.clear()
    return None if trajectory.id == "c1" else f"{task['question']} {len(trajectories)}"

def nothing():
    return ""

async def fails(trajectory):
    if trajectory.id in ("c0", "c2"):
        raise RuntimeError("no hint")

def number():
    return 3

async def sleeps():
    await asyncio.sleep(60)

def wants(trajectory, answer):
    return answer

class Hint:
    pass
"""
TASK = {"question": "1+2?", "answer": ["3", "three"]}
QUICK = ["qwen2_5", "qwen3", "llama3_1", "gptoss", "ministral_3"]
REWRITES_AFTER_ERRORS = ("mistral_nemo", "mistral_small_3_2")
by_template = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f.name in QUICK else pytest.mark.extended) for f in FAMILIES],
    ids=lambda family: family.name,
)


@asynccontextmanager
async def playing(family: Family, folder: Path, **rollout: Any) -> AsyncIterator[tuple[ChainRunner, list[Trajectory]]]:
    """A runner, and three chains of up to four turns: calls that work and that fail, malformed ones, cut ones."""
    renderer = renderer_of(family, reasoning="keep")
    rng = random.Random(family.name)

    def call(number: int) -> str:
        write = renderer.parser.write
        if family.parser in ("pythonic", "granite", "phi4"):
            write = renderer.parser.write_as_content
        return write([("add", {"a": number, "b": 2})], [])

    texts = [call(1), call(9), call(1)[:-9]]
    opening, closing = renderer.behaviour.tags
    if renderer.behaviour.opens_reasoning:
        texts = [f"hm{closing}{text}" for text in texts]
    elif family.parser != "harmony":
        texts.append(f"{opening}hm{closing}{call(2)}")

    def script(_: str) -> list[int]:
        ids = renderer.tokenizer.encode(rng.choice(texts), add_special_tokens=False)
        return [*ids, renderer.stop_token_ids[0]] if rng.random() < 0.8 else ids[:-1]

    (folder / "hints.py").write_text(HINTS)
    fields = {"tools": ["notes.py:add"], "rewards": ["notes.py:success"]}
    fields |= {"rollout": {"max_turns": 4, "max_tokens": 200, **rollout}}
    async with scripted_chains(folder, script, source=SUMS, renderer=renderer, **fields) as chains:
        yield chains.runner, await chains.run_all([TASK] * 3)


def added_to(runner: ChainRunner, chain: Trajectory) -> str | None:
    """The text that only the teacher reads; the rest of its row must be the policy's, and its targets the same."""
    [row] = chain.rows
    made = training_row(row)
    if row.teacher_prompt is None:
        assert made.in_context is None
        return None
    assert (
        made.in_context.token_ids.tolist()
        == row.teacher_prompt + row.token_ids[row.mask.index(1) : made.targets[-1] + 1]
    )
    sampled = [token for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    assert made.in_context.token_ids[made.in_context.targets].tolist() == sampled
    decode = runner.renderer.tokenizer.decode
    own, theirs = decode(row.token_ids[: row.mask.index(1)]), decode(row.teacher_prompt)
    start = next((n for n, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), len(own))
    end = len(theirs) - (len(own) - start)
    assert theirs[end:] == own[start:]
    # the text may end as what follows it begins
    return theirs[start:end]


@by_template
async def test_the_teachers_row_has_the_policys_tokens_after_a_longer_prompt(
    family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(family, tmp_path, assistant_prefix="So, ") as (runner, chains):
        assert max(chain.turns for chain in chains) > 1
        for choice in ("solution", "answer", "errors", "hints.py:hint", "hints.py:nothing"):
            for chain in chains:
                chain.rows[0].teacher_prompt = None
            before = [list(chain.rows[0].token_ids) for chain in chains]
            await TeacherContext(choice, runner, [TASK], tmp_path).add_to(chains, TASK)
            if any(len(chain.rows) > 1 for chain in chains):
                assert family.name in REWRITES_AFTER_ERRORS
                assert all(row.teacher_prompt is None for c in chains if len(c.rows) > 1 for row in c.rows)
                assert "the chat template rewrites its earlier turns" in caplog.text
                return
            assert [chain.rows[0].token_ids for chain in chains] == before
            assert all(chain.messages for chain in chains)
            found = [added_to(runner, chain) for chain in chains]
            if choice == "solution":
                # c1 and c2 succeeded
                assert ["A solution of this task" in (text or "") for text in found] == [True, False, False]
            elif choice == "answer":
                assert 'The answer of this task is: ["3", "three"]' in (found[0] or "")
                assert found[1:] == [None, None]
            elif choice == "errors":
                assert [text is not None for text in found] == [bool(chains[0].errors), False, False]
                assert all(error in (found[0] or "") for error in chains[0].errors if "<" not in error)
            elif choice == "hints.py:hint":
                assert [text and text.strip() for text in found] == ["1+2? 3", None, "1+2? 3"]
            else:
                assert found == ["", "", ""]


async def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.name == "qwq")
    async with playing(family, tmp_path) as (runner, _):
        runner.renderer = renderer_of(family, reasoning="template")
        with pytest.raises(SettingError, match=r"the chat template rewrites earlier turns.*rollout\.reasoning=keep"):
            TeacherContext("answer", runner, [TASK], tmp_path)
        TeacherContext("answer", runner.with_max_turns(1), [TASK], tmp_path)


QWEN = next(f for f in FAMILIES if f.name == "qwen2_5")


async def test_chains_that_failed_get_the_first_success_of_their_group(tmp_path: Path) -> None:
    async with playing(QWEN, tmp_path) as (runner, chains):
        context = TeacherContext("solution", runner, [TASK], tmp_path)
        chains[2].metrics["success"] = 0.0
        chains[1].messages[-1]["content"] = "won 1"
        await context.add_to(chains, TASK)
        assert [chain.rows[0].teacher_prompt is None for chain in chains] == [False, True, False]
        assert all("won 1" in (added_to(runner, chain) or "") for chain in chains[::2])
        for chain in chains:
            chain.metrics["success"], chain.rows[0].teacher_prompt = 0.0, None
        await context.add_to(chains, TASK)
        assert [chain.rows[0].teacher_prompt for chain in chains] == [None] * 3
        del chains[2].metrics["success"]
        problem = r"teacher\.context=solution: the reward of chain c2 did not report success"
        with pytest.raises(ValueError, match=problem):
            await context.add_to(chains, TASK)


async def test_a_function_that_fails_ends_its_chain_and_one_that_always_fails_the_run(tmp_path: Path) -> None:
    async with playing(QWEN, tmp_path, group_size=1) as (runner, chains):
        rollout = runner.setup.config.model_copy(update={"timeout_seconds": 0.2})
        recipe = runner.setup.recipe.model_copy(update={"rollout": rollout})
        runner.setup = replace(runner.setup, recipe=recipe)
        fresh = [replace(chain) for chain in chains]
        await TeacherContext("hints.py:fails", runner, [TASK] * 3, tmp_path).add_to(fresh, TASK)
        assert [chain.outcome for chain in fresh][::2] == [Outcome.REWARD_ERROR] * 2
        assert fresh[0].error == "teacher.context: fails raised RuntimeError: no hint"
        assert [chain.reward for chain in fresh] == [None, 1.0, None]
        for name, problem in (
            ("number", "number returned 3; it must return text, or None"),
            ("sleeps", "sleeps took longer than rollout.timeout_seconds=0.2"),
        ):
            context = TeacherContext(f"hints.py:{name}", runner, [TASK], tmp_path)
            # three chains, and the run ends at the fourth
            await context.add_to([replace(chain) for chain in chains], TASK)
            with pytest.raises(RolloutStoppedError, match=f"{FIELD}: {problem}"):
                await context.add_to([replace(chain) for chain in chains], TASK)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wants", "wants has a parameter 'answer'; fix: take any of trajectory, task, trajectories, by these names"),
        ("Hint", "Hint is not a function but a type"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "hints.py").write_text(HINTS)
    with pytest.raises(SettingError, match=problem):
        load_context(f"hints.py:{name}", tmp_path)


def test_rows_without_an_answer_are_refused() -> None:
    check_answers("solution", [{"question": "1+2?"}])
    with pytest.raises(SettingError, match=r"teacher\.context: got 'answer', but row 2 of data has no answer"):
        check_answers("answer", [TASK, {"question": "1+2?", "answer": None}])


def test_text_follows_the_users_last_message() -> None:
    opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert with_text(opening, "c") == [{"role": "user", "content": "a\n\nc"}, opening[1]]
    with pytest.raises(ValueError, match="without a message of the user"):
        with_text([{"role": "system", "content": "a"}], "c")


async def test_groups_keep_the_prompts_in_their_files(tmp_path: Path) -> None:
    async with playing(QWEN, tmp_path) as (runner, chains):
        chains[2].metrics["success"] = 0.0
        await TeacherContext("solution", runner, [TASK], tmp_path).add_to(chains, TASK)
        append_group(tmp_path / "train.jsonl", Group("g0", TASK, chains))
        [saved] = read_groups(tmp_path / "train.jsonl")
        for one, chain in zip(saved.trajectories, chains, strict=True):
            assert one.errors == chain.errors
            own = chain.rows[0].teacher_prompt
            assert (one.rows[0].teacher_prompt is None) == (own is None)
            assert own is None or one.rows[0].teacher_prompt.tolist() == own
