"""The environment through chains: episodes, images, and environments that fail, hang, print or end their process."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall, ToolInfrastructureError, ToolResult
from agentfactory.rollout.config import DataConfig
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.game_processes import game_process
from agentfactory.worlds.gymnasium.gym import Gym
from agentfactory.worlds.gymnasium.tasks import GymSource
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

ODD = "tests.worlds.gymnasium.odd_gyms"
RECIPE = ToolsRecipe(tools=["gym"])


async def act(session: ToolSession, action: Any) -> ToolResult:
    return await session.call(ToolCall("1", "act", {"action": action}))


def rows(**fields: Any) -> list[dict[str, Any]]:
    source = GymSource(**{"tasks": 2, **fields})
    return source.rows()


async def test_the_name_alone_gives_tasks_and_world() -> None:
    data = DataConfig.model_validate({"gym": {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "tasks": 3}})
    assert data.world == "gym"
    tasks = data.registered[1].rows()
    assert [task["seed"] for task in tasks] == [0, 1, 2]
    async with open_toolset(RECIPE, Path.cwd()) as toolset:
        assert [spec.name for spec in toolset.specs] == ["act"]
        toolset.check_rows(tasks, "data", False)
        async with toolset.chain("a", tasks[0]) as session:
            assert "[S]FFF\nFHFH" in str(session.opening)
            told = await act(session, "jump")
            assert told.error is not None
            assert "the actions are 0 (Move left)" in str(told.content)
            for action in (1, 1, "Move right", 2, "1"):
                assert not (await act(session, action)).finish
            last = await act(session, 2)
            assert last.finish
            assert "The episode has ended. Return: 1." in str(last.content)
            judged = await session.reward()
    assert judged.reward == 1
    assert judged.metrics == {"steps": 6, "ended": 1, "success": 1}


async def test_pixels() -> None:
    pytest.importorskip("pygame")
    (task, _) = rows(id="CartPole-v1", render_mode="rgb_array")
    async with open_toolset(RECIPE, Path.cwd()) as toolset, toolset.chain("a", task) as session:
        shown = (await act(session, 1)).content
    assert [part["type"] for part in shown] == ["image_url"]


@pytest.mark.parametrize(
    ("kind", "action", "told"),
    [
        ("Raises", 0, "gymnasium failed in act(): RuntimeError: out of ice"),
        ("Exits", 0, "gymnasium failed in act(): SystemExit: 3"),
        ("Exits", 1, "gymnasium ended its process in act()"),
        ("Hangs", 1, "gymnasium did not answer within 4 s in act()"),
    ],
)
async def test_failures_end_one_chain_alone(kind: str, action: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "Hangs":
        monkeypatch.setattr(game_process.GameProcess.__init__, "__defaults__", (4.0,))
    task, other = rows(id=f"{ODD}:{kind}-v0")
    (fine,) = rows(id="CartPole-v1", tasks=1)
    async with open_toolset(RECIPE, Path.cwd()) as toolset, toolset.chain("good", fine) as good:
        async with toolset.chain("bad", task) as bad:
            with pytest.raises(ToolInfrastructureError, match=told.replace("(", r"\(").replace(")", r"\)")):
                await act(bad, action)
        assert (await act(good, 0)).error is None
        # the next chain of the broken instance's place begins
        async with toolset.chain("next", other) as after:
            assert after.opening


async def test_what_an_environment_prints_stays_out_of_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    task, _ = rows(id=f"{ODD}:Prints-v0")
    async with open_toolset(RECIPE, Path.cwd()) as toolset, toolset.chain("a", task) as session:
        assert (await act(session, 0)).content == "1"
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "hello from the lake" in printed.err


def test_processes_end_with_their_last_user() -> None:
    (task, _) = rows(id="CartPole-v1")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    games = [Gym(), Gym()]
    for game in games:
        game.reset(**task)
    ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert len(ours) == 3  # the fork server and two forks
    for game in games:
        game.close()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in ours))
