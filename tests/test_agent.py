"""`Agent` in scripts, on a real embedded server that is already running, or is started and ended with it."""

import asyncio
import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from agentfactory import Agent, Outcome, reward, tool
from agentfactory.base.user_code.loading import load_object
from agentfactory.launching.child_processes import ChildFailed
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.rollout.chains.agent_hooks import load_agent
from agentfactory.rollout.config import AgentConfig, RolloutConfig
from agentfactory.rollout.trajectory import Trajectory
from tests.conftest import QUICKSTART

pytestmark = [pytest.mark.processes, pytest.mark.extended]

TreasureHunt = load_object("treasure_hunt.py:TreasureHunt", QUICKSTART)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the logs that killed servers leave behind into a temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def task(quickstart_run: Path) -> dict[str, Any]:
    """A task of the quickstart; its `question` opens the chain."""
    return json.loads((quickstart_run / "prepared" / "train.jsonl").read_text().splitlines()[0])


async def test_an_address_tools_and_a_reward_are_enough(warm_server: str, task: dict[str, Any]) -> None:
    """With the quickstart's model on its own task, on the engine used for training."""

    @reward
    def turns(trajectory: Trajectory, bonus: float) -> dict[str, float]:
        return {"reward": trajectory.turns + bonus, "bonus": bonus}

    async with Agent(warm_server, tools=[TreasureHunt], reward=turns, rollout={"max_tokens": 40}) as agent:
        question = task.pop("question")
        result = await agent.run(question, max_turns=3, num_chains=8, bonus=0.5, **task)
        again = await agent.run([{"role": "user", "content": question}], max_turns=1, num_chains=2, bonus=0.0, **task)
    assert len(result.trajectories) == len(result.rewards) == len(result.answers) == 8
    assert result.rewards == [t.turns + 0.5 for t in result.trajectories]
    assert {t.turns for t in result.trajectories} <= {1, 2, 3}
    assert max(t.turns for t in result.trajectories) > 1, "the short warm start calls its tool"
    assert len({str(t.messages) for t in result.trajectories}) > 1, "chains are sampled apart"
    assert all(t.metrics["bonus"] == 0.5 for t in result.trajectories)
    assert [t.turns for t in again.trajectories] == [1, 1]


async def test_an_environment_judges_without_a_reward_and_else_nobody(warm_server: str, task: dict[str, Any]) -> None:
    async with Agent(warm_server, tools=[TreasureHunt], rollout={"max_tokens": 40}) as agent:
        judged = await agent.run(task.pop("question"), num_chains=2, **task)
    assert all(isinstance(value, float) for value in judged.rewards)

    class Counter:
        calls = 0

        @tool
        def move(self, direction: str) -> str:
            """Move."""
            self.calls += 1
            return f"You went {direction}."

    counter = Counter()
    async with Agent(warm_server, tools=[counter.move], rollout={"max_tokens": 40}) as agent:
        result = await agent.run("The treasure lies south.\nYou stand in row 2, column 2.", num_chains=4)
    assert result.rewards == [None] * 4
    assert not any(t.outcome.failed for t in result.trajectories)
    worked = [t.metrics["tool/move/calls"] - t.metrics["tool/move/errors"] for t in result.trajectories]
    assert counter.calls == sum(worked) > 0, "a method of an object acts on that object"


async def test_it_opens_by_itself_and_again_after_it_was_closed(warm_server: str) -> None:
    agent = Agent(warm_server, rollout={"max_tokens": 5})
    for _ in range(2):
        # each in a separate task, like the cells of a notebook
        results = await asyncio.gather(*(asyncio.create_task(agent.run("go", max_turns=1)) for _ in range(2)))
        assert len({t.id for result in results for t in result.trajectories}) == 2
        await asyncio.create_task(agent.close())
    await agent.close()


async def test_a_model_gets_a_server_that_ends_with_the_agent(warm_start: Path) -> None:
    before = children()
    server = {"max_model_len": 512}
    async with Agent(warm_start, engine="embedded", model={"dtype": "float32"}, server=server) as agent:
        started = children() - before
        assert len(started) == 1
        result = await agent.run("go", max_turns=1, num_chains=2)
        assert all(t.outcome in (Outcome.COMPLETED, Outcome.MAX_TOKENS, Outcome.MAX_TURNS) for t in result.trajectories)
        assert all(len(t.rows[0].token_ids) <= 512 for t in result.trajectories)
    assert not children() & started
    agent = Agent(warm_start, engine="embedded", server={**server, "retry_seconds": 1.0})
    async with agent:
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ChildFailed, match="the server was ended by signal 9"):
            await agent.run("go")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_what_cannot_work_is_said(warm_server: str, warm_start: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no model to run; give model_or_url"):
        await Agent().run("go")
    with pytest.raises(ValueError, match=r"server\.options\.gpu_memory_utilization: unknown key .*engine is embedded"):
        Agent(warm_start, engine="embedded", server={"options": {"gpu_memory_utilization": 0.5}})
    with pytest.raises(ValueError, match=r"^temperature: unknown key .*; fix: did you mean rollout\.temperature\?$"):
        Agent(warm_start, temperature=0.5)
    with pytest.raises(ValueError, match="num_chains=0; use at least 1"):
        await Agent(warm_server).run("go", num_chains=0)
    with pytest.raises(ValueError, match="has none called 'best'; it has policy"):
        await Agent(warm_server, weights="best").run("go")
    with pytest.raises(ChildFailed, match="the model is no local folder, and cannot be fetched"):
        await Agent(tmp_path / "none", engine="embedded").run("go")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(RunFolderError, match=r"an adapter for .*gone, which does not exist; fix: move"):
        await Agent(tmp_path, engine="embedded").run("go")

    @reward
    def wants(prediction: str, answer: str) -> bool:
        return prediction == answer

    for given in (wants, "exact_match", [wants, "exact_match"]):
        with pytest.raises(ValueError, match="'answer'"):
            await Agent(warm_server, reward=given).run("go")
    with pytest.raises(ValueError, match="exact_mach"):
        Agent(warm_server, reward="exact_mach")


PAGE = (Path(__file__).parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")


async def test_the_page_runs(warm_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, agents = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    await load_object("script.py:main", tmp_path)(warm_server)
    assert len(capsys.readouterr().out.splitlines()) >= 8
    (tmp_path / "agents.py").write_text(agents)
    for name in ("ThinksBriefly", "BestOfTwo", "Strict"):
        kind = load_object(f"agents.py:{name}", tmp_path)
        assert type(load_agent(AgentConfig(name=f"agents.py:{name}"), tmp_path)) is kind
        async with kind(warm_server, rollout={"max_tokens": 30}) as agent:
            (trajectory,) = (await agent.run("go", max_turns=2)).trajectories
        assert not trajectory.outcome.failed, trajectory.error
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    RolloutConfig.model_validate(yaml.safe_load(recipe)["rollout"])
