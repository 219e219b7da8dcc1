"""Environments of verifiers in AgentFactory: the source's errors, and real ones, played by verifiers itself."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.rollout.chains.agent_hooks import load_agent
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.worlds.verifiers.tasks import VerifiersAgent, VerifiersSource
from tests.scripted_chains import Scripted, call, scripted_chains

PYTHON = os.environ.get("AGENTFACTORY_VERIFIERS_PYTHON", "")
real = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="verifiers is not installed: make test-verifiers"),
]

SUMS = """
import os, time
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        print("scored")
        reply = trace.last_reply
        if "raise" in reply:
            raise RuntimeError("the scorer broke")
        if "die" in reply:
            os._exit(3)
        if "block" in reply:
            time.sleep(60)
        return float(str(self.data.answer) in reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 10


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.count):
            yield SumTask(SumData(prompt=f"{n} + {n + 1} =", system_prompt="Add.", answer=2 * n + 1), self.config.task)


__all__ = ["SumTaskset"]
"""
BOXES = '''
import verifiers.v1 as vf


class BoxState(vf.State):
    opened: list[str] = []


class BoxData(vf.TaskData):
    prize: str


class Boxes(vf.Toolset[vf.ToolsetConfig, BoxState]):
    TOOL_PREFIX = None

    @vf.tool
    async def open_box(self, name: str) -> str:
        """Open a box."""
        self.state.opened.append(name)
        return f"The {name} box was opened."


class BoxTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class BoxTask(vf.Task[BoxData, BoxState, BoxTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Boxes(config.tools)]

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.prize in trace.state.opened)

    @vf.metric
    async def opened(self, trace: vf.Trace) -> float:
        return float(len(trace.state.opened))


class BoxConfig(vf.TasksetConfig):
    task: BoxTaskConfig = BoxTaskConfig()


class BoxTaskset(vf.Taskset[BoxTask, BoxConfig]):
    def load(self):
        for prize in ("red", "blue"):
            yield BoxTask(BoxData(prompt="Open the box with the prize.", prize=prize), self.config.task)


__all__ = ["BoxTaskset"]

if __name__ == "__main__":
    Boxes.run()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("sums", SUMS), ("boxes", BOXES)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    (tmp_path / "dead.py").write_text("import os\nos._exit(7)\n")
    return tmp_path


def source(folder: Path, name: str, **fields: Any) -> VerifiersSource:
    return VerifiersSource(python=PYTHON, id=name, folder=str(folder), **fields)


@asynccontextmanager
async def played(folder: Path, texts: Callable[[str], str], **rollout: Any) -> AsyncIterator[Scripted]:
    fields = {"tools": [], "rewards": [], "rollout": rollout}
    async with scripted_chains(folder, texts, agent=VerifiersAgent(), **fields) as chains:
        yield chains


async def run(chains: Scripted, row: Mapping[str, Any], name: str = "c0") -> Trajectory:
    runner = chains.runner
    return await runner.run(name, dict(row), Sampling("policy", 1.0, seed=name), runner.setup.config.scored)


@pytest.mark.processes
def test_a_python_without_verifiers_is_named() -> None:
    with pytest.raises(SettingError, match=r"verifiers\.python: .* cannot import verifiers") as caught:
        VerifiersSource(python=sys.executable, id="sums").rows()
    assert "-m pip install 'verifiers" in caught.value.fix
    with pytest.raises(SettingError, match=r"python: got '/no/python', which is no program; fix: give the full path"):
        VerifiersSource(python="/no/python", id="sums").rows()
    with pytest.raises(SettingError, match=r"python: got '/bin/true', which is no Python; fix: name the python of a"):
        VerifiersSource(python="/bin/true", id="sums").rows()


class TestReal:
    pytestmark = real

    def test_rows_are_the_tasks(self, folder: Path) -> None:
        rows = source(folder, "sums", options={"count": 7}, first_task=5, tasks=9).rows()
        assert [row["question"] for row in rows] == ["5 + 6 =", "6 + 7 ="]
        assert rows[0]["verifiers"]["data"]["answer"] == 11

    @pytest.mark.parametrize(
        ("name", "fields", "message"),
        [
            ("nothing", {}, r"id: got 'nothing'; .* has no module nothing; fix: install its package"),
            ("lacking", {}, r"id: got 'lacking', which needs the package no_such_package; fix: .*pip install"),
            ("dead", {}, r"id: got 'dead'; its process ended with status 7"),
            ("sums", {"options": {"count": "x"}}, r"options.count: got 'x': Input should be a valid integer"),
            ("sums", {"first_task": 10}, r"first_task: got 10, but sums has no task from there on"),
            (
                "sums",
                {"options": {"task": {"judges": [{"id": "reference", "api_key_var": "NO_KEY"}]}}},
                r"options.task.judges.0: the model at .* needs a key, but the variable NO_KEY is not set; fix: export",
            ),
            ("sums", {"env": {"id": "user-sim"}}, r"env: the policy can play one seat, but assistant, user have no"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, folder: Path, name: str, fields: Any, message: str) -> None:
        with pytest.raises(SettingError, match=f"verifiers.{message}"):
            source(folder, name, **fields).rows()

    async def test_single_turns_are_scored_by_verifiers(self, folder: Path) -> None:
        rows = source(folder, "sums", tasks=6).rows()
        said = {"0 + 1 =": "It is 1", "1 + 2 =": "4", "2 + 3 =": "raise", "3 + 4 =": "7"}
        async with played(folder, lambda seen: next(v for k, v in said.items() if f"{k}<|im_end|>" in seen)) as chains:
            await chains.runner.check(rows)
            found = await asyncio.gather(*(run(chains, row, f"c{n}") for n, row in enumerate(rows[:4])))
            chains.check(*found)
            assert all("<|im_start|>system\nAdd.<|im_end|>" in prompt for prompt in chains.sent())
        right, wrong, raised, other = found
        assert (right.outcome, right.error, right.result) == (Outcome.COMPLETED, None, "It is 1")
        assert right.reward == pytest.approx(2 + 0.5 / 8)
        scores = {name: right.metrics[name] for name in ("right", "brief", "characters", "truncated")}
        assert scores == {"right": 1.0, "brief": 1 / 8, "characters": 7.0, "truncated": 0.0}
        assert (wrong.reward, other.reward) == (pytest.approx(0.25), pytest.approx(2.25))
        assert (raised.outcome, raised.reward) == (Outcome.AGENT_ERROR, None)
        assert "verifiers' sums failed: TaskError" in str(raised.error)
        assert "the scorer broke" in str(raised.error)

    async def test_tools_of_the_environment_are_called(self, folder: Path) -> None:
        rows = source(folder, "boxes").rows()

        def reply(prompt: str) -> str:
            opened = prompt.count("box was opened")
            return "done" if opened == 2 else call("open_box", name="red" if opened else "green")

        async with played(folder, reply) as chains:
            found, missed = await asyncio.gather(*(run(chains, row, f"c{n}") for n, row in enumerate(rows)))
            chains.check(found, missed)
            assert "open_box" in chains.sent()[0]
        assert (found.reward, found.metrics["opened"], found.turns, found.metrics["tool_calls"]) == (1.0, 2.0, 3, 2)
        assert (missed.reward, missed.outcome, len(missed.rows)) == (0.0, Outcome.COMPLETED, 1)

    async def test_a_death_or_a_hang_ends_its_chains_only(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentfactory.worlds.verifiers.verifiers_process.CANCEL_SECONDS", 1.0)
        rows = source(folder, "sums", tasks=3).rows()
        replies = {"0 + 1 =": "die", "1 + 2 =": "block", "2 + 3 =": "5"}
        async with played(
            folder, lambda prompt: next(v for k, v in replies.items() if f"{k}<|im_end|>" in prompt), timeout_seconds=40
        ) as chains:
            dead = await run(chains, rows[0])
            assert dead.outcome is Outcome.TOOL_INFRASTRUCTURE
            assert "its process ended with status 3" in str(dead.error)
            hung = await run(chains, rows[1])
            assert hung.outcome is Outcome.TIMEOUT
            assert (await run(chains, rows[2])).reward == pytest.approx(2.25)


class TestRecipe:
    """Recipes with the source: verifiers is not needed to read one."""

    def test_the_source_brings_its_agent(self, tmp_path: Path) -> None:
        found = recipe(data=rows_of("a"))
        assert (found.rollout.agent.name, found.rollout.agent.reports) == ("verifiers", True)
        assert isinstance(load_agent(found.rollout.agent, tmp_path), VerifiersAgent)
        # a saved recipe names it
        assert recipe(**found.model_dump(mode="json")).rollout == found.rollout
        held_out = recipe(data={"path": "/rows.jsonl"}, eval={"data": rows_of("b")})
        assert held_out.rollout.agent == found.rollout.agent


def rows_of(name: str) -> dict[str, Any]:
    return {"verifiers": {"python": sys.executable, "id": name}}


def recipe(**fields: Any) -> RolloutRecipe:
    return RolloutRecipe.model_validate({"model": {"path": "x"}, **fields})
