"""The environment: gold paths through chains, failures, concurrent chains, lost Java processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import pytest

from agentfactory.base.messages import ToolCall, ToolInfrastructureError
from agentfactory.tools.sessions.toolset import Toolset
from agentfactory.tools.tool import Finish
from agentfactory.worlds.scienceworld import jvm as jvm_module
from agentfactory.worlds.scienceworld.jvm import Jvms
from agentfactory.worlds.scienceworld.published_tasks import TASKS, Split, resolved
from agentfactory.worlds.scienceworld.scienceworld import ScienceWorld
from tests.conftest import REPOSITORY
from tests.server_process import only_loopback
from tests.waiting import wait_for
from tests.worlds.opening import Open, tools_of
from tests.worlds.scienceworld.games import QUICK, act, follow, gold_path, needs_java

pytestmark = [pytest.mark.processes, pytest.mark.extended, needs_java]


@pytest.fixture(scope="module")
def jvms() -> Iterator[Jvms]:
    """A Java process for gold paths, and for games without a chain."""
    opened = Jvms(heap_mb=384, games_per_jvm=8)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def paths(jvms: Jvms) -> dict[str, list[str]]:
    """The gold paths of the quick tasks."""
    made = {task: gold_path(jvms, task, variation) for task, variation in QUICK.items()}
    assert only_loopback(os.getpid())
    return made


laboratory = partial(tools_of, "scienceworld")


async def gauges(toolset: Toolset) -> dict[str, float]:
    return {name.rpartition("/")[2]: value for name, value in (await toolset.gauges()).items()}


async def test_gold_paths_through_chains_reach_a_hundred(paths: dict[str, list[str]]) -> None:
    async with laboratory(games_per_jvm=3) as toolset:

        async def run(task: str) -> dict[str, float]:
            async with toolset.chain(task, {"task": task, "variation": QUICK[task]}) as session:
                assert session.opening.startswith("Your task is to")
                judged, results = await follow(session, paths[task])
                assert results[-1].finish
                changes = [result.info["reward"] for result in results]
                assert sum(changes) == pytest.approx(judged["reward"])
                assert results[-1].info["score"] == judged["score"]
                return judged

        for task, judged in zip(QUICK, await asyncio.gather(*map(run, QUICK)), strict=True):
            assert {**judged, "moves": 0} == {"reward": 1, "success": 1, "score": 100, "failed": 0, "moves": 0}, task
            assert 0 < judged["moves"] <= 100
        told = await gauges(toolset)
        assert (told["jvms"], told["games"], told["jvms_lost"]) == (2, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_gold_paths_of_all_tasks_reach_a_hundred_and_the_engine_has_our_numbers(jvms: Jvms) -> None:
    async with laboratory(max_moves=10_000) as toolset:
        for task, (_, count) in TASKS.items():
            play = jvms.play(task, 0, resolved("easy", task), gold=True)
            engine = play.game.engine
            assert engine.getTaskMaxVariations(task) == count
            for split in Split:
                theirs = getattr(engine, f"getVariations{split.capitalize()}")()
                assert list(theirs) == list(split.variations(task)), task
            path = play.game.gold_path()
            play.end()
            async with toolset.chain(task, {"task": task, "variation": 0}) as session:
                judged, _ = await follow(session, path)
                assert judged["score"] == 100, task


async def test_a_wrong_focus_fails_the_task_and_ends_the_chain() -> None:
    async with laboratory() as toolset, toolset.chain("a", {"task": "4-4", "variation": 3}) as session:
        judged, results = await follow(session, ["look around", "teleport to kitchen", "focus on stove", "wait"])
        assert len(results) == 3
        assert judged == {"reward": -1, "success": 0, "score": 0, "failed": 1, "moves": results[-1].info["moves"]}


async def test_a_chain_ends_after_its_moves() -> None:
    async with laboratory(max_moves=12) as toolset, toolset.chain("a", {"task": "boil", "variation": 0}) as session:
        judged, results = await follow(session, ["wait", "nonsense", *["open door to kitchen"] * 5])
        # as in the published environment, which ends when the limit is exceeded; `wait` takes ten moves and its own
        assert [result.info["moves"] for result in results] == [11, 11, 12, 13]
        assert judged == {"reward": 0, "success": 0, "score": 0, "failed": 0, "moves": 13}


async def test_valid_actions_are_told_on_demand_and_in_the_observation() -> None:
    row = {"task": "boil", "variation": 0}
    async with laboratory(show_actions=True) as toolset, toolset.chain("a", row) as session:
        *_, line = session.opening.splitlines()
        assert line.startswith("Valid actions: ")
        assert "teleport to kitchen" in line
        said = str((await act(session, "teleport to kitchen")).content)
        assert "move OBJ to OBJ" in said
        assert "move metal pot" not in said

        async def valid(**about: str) -> str:
            return str((await session.call(ToolCall("1", "valid_actions", about))).content)

        assert ", ".join((await valid()).splitlines()) == said.splitlines()[-1].removeprefix("Valid actions: ")
        assert await valid(about="activate Stove") == "activate stove"
        objects = await valid(about="move")
        assert len(objects.splitlines()) == 101
        assert objects.endswith("more; give more words)")
        assert await valid(about="dragon") == "No valid action contains dragon."
        assert (await act(session, "look around")).info["moves"] == 1


async def test_hostile_actions_are_not_understood() -> None:
    async with laboratory() as toolset, toolset.chain("a", {"task": "boil", "variation": 0}) as session:
        for text in ("", " ", "\x00", "\n", "🙂" * 500, "a" * 100_000, "open " * 300, "y\n\rq", "!sp", "0"):
            assert "Unknown action" in (said := str((await act(session, text)).content)) or "No known" in said, text
        assert "thermometer" not in str((await act(session, "inventory")).content)


def transcripts(jvms: Jvms, games: list[tuple[str, int, str]], paths: list[list[str]]) -> list[list[Any]]:
    """Interleave games, one action of each at a time; return each game's observations and its number of objects."""
    plays = [jvms.play(task, variation, resolved(how, task)) for task, variation, how in games]
    shown: list[list[Any]] = [[play.game.description(), play.game.look()] for play in plays]
    for number in range(max(map(len, paths))):
        for play, path, text in zip(plays, paths, shown, strict=True):
            if number < len(path):
                text.append(play.game.step(path[number]))
    for play, text in zip(plays, shown, strict=True):
        text.append(play.game.valid_actions())
        text.append(play.game._call(play.game.jvm._numbers.count))
        play.end()
    return shown


def test_a_game_repeats_in_another_process(opened: Open) -> None:
    # each room lists its things in the order of a set
    actions = ["go to outside", "look around", *["wait1", "look around"] * 6, "go to greenhouse", "look around"]
    games = [("find-animal", 3, "easy"), ("grow-fruit", 1, "easy")]
    shown = []
    for others in ([], [("boil", 0, "easy")]):
        jvms = opened(Jvms, heap_mb=384, games_per_jvm=8)
        shown.append(transcripts(jvms, [*others, *games], [actions] * len([*others, *games]))[len(others) :])
    assert shown[0] == shown[1]


async def test_a_killed_java_process_loses_its_chains_only(paths: dict[str, list[str]]) -> None:
    row = {"task": "find-animal", "variation": QUICK["find-animal"]}
    path = paths["find-animal"]
    others = java_processes()
    async with laboratory(games_per_jvm=2) as toolset:
        async with toolset.chain("a", row) as first, toolset.chain("b", row) as second:
            await act(first, "look around")
            (doomed,) = java_processes() - others
            async with toolset.chain("c", row) as third:
                await act(third, path[0])
                os.kill(doomed.pid, signal.SIGKILL)
                for lost in (first, second):
                    with pytest.raises(ToolInfrastructureError, match="the Java process ended with status -9"):
                        await act(lost, "look around")
                async with toolset.chain("d", row) as fourth:
                    assert (await follow(fourth, path))[0]["score"] == 100
                assert (await follow(third, path[1:]))[0]["score"] == 100
        told = await gauges(toolset)
        assert (told["jvms"], told["games"], told["jvms_lost"], told["broken"]) == (1, 0, 1, 2)
    assert java_processes() == others


async def test_a_java_process_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm_module, "_ANSWER_SECONDS", 5.0)
    others = java_processes()
    async with laboratory() as toolset:
        async with toolset.chain("a", {"task": "boil", "variation": 0}) as session:
            (process,) = java_processes() - others
            process.suspend()
            with pytest.raises(ToolInfrastructureError, match="Java did not answer within 5 s"):
                await act(session, "look around")
        assert java_processes() == others
        async with toolset.chain("b", {"task": "boil", "variation": 0}) as session:
            assert "hallway" in str((await act(session, "look around")).content)


CHILD = """
import sys
from agentfactory.worlds.scienceworld.scienceworld import ScienceWorld
world = ScienceWorld()
world.reset("boil", 0)
print(*world._jvms.pids(), flush=True)
sys.stdin.read()
"""


def test_java_ends_with_the_process_that_started_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    java = psutil.Process(int(child.stdout.readline()))
    child.kill()
    child.wait()
    wait_for(lambda: not java.is_running() or java.status() == psutil.STATUS_ZOMBIE)
    child.stdin.close()
    child.stdout.close()


def test_the_experiment_on_the_page_is_what_the_world_shows(opened: Open) -> None:
    page = (REPOSITORY / "docs" / "scienceworld.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| **act", "| the world"))]
    world = opened(ScienceWorld)
    shown: Any = {"observation": world.reset("find-living-thing", 0)}
    for speaker, text, *score in rows:
        if speaker == "**act**":
            shown = world.act(text.rstrip(" |"))
            shown = shown.value if isinstance(shown, Finish) else shown
            continue
        said = " ".join(shown["observation"].replace("\n\t", " ").split())
        for part in text.rstrip(" |.").replace(",", "").replace("picture.", "picture").split(" ... "):
            assert part in said.replace(",", "")
        assert [str(shown.get("score"))] == score or "score" not in shown
    assert world.reward()["success"] == 1


def java_processes() -> set[psutil.Process]:
    """The Java processes of this one."""
    return {child for child in psutil.Process().children() if child.name() == "java"}
