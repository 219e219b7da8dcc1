"""Domains of tau2-bench: rewards equal tau2's own, number by number; chains with a simulated user; hostile tasks."""

import ast
import importlib
import json
import random
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward, ToolCall
from agentfactory.people.tau2 import prompts
from agentfactory.people.tau2.domain import conversation
from agentfactory.people.tau2.tasks import Tau2Source
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from agentfactory.tools.sessions.toolset import open_toolset
from tests.conftest import REPOSITORY
from tests.scripted_chains import call, scripted_chains

pytestmark = [pytest.mark.processes, pytest.mark.extended]

Play: Any = pytest.importorskip("agentfactory.people.tau2.play", exc_type=ImportError).Play
needs_models = pytest.mark.skipif(
    find_spec("litellm") is None, reason="tau2's evaluate_simulation imports litellm: `make test-tau2` has it"
)

COUNTS = {"mock": 9, "retail": 20, "airline": 20, "telecom": 20}
CASES = [pytest.param(domain, n, id=f"{domain}-{n}") for domain, count in COUNTS.items() for n in range(count)]
MOCK = {"tau2": {"module": "tau2", "options": {"domain": "mock"}}}


@cache
def tasks_of(domain: str) -> dict[str, Any]:
    module = importlib.import_module(f"tau2.domains.{domain}.environment")
    return {task.id: task for task in module.get_tasks()}


@cache
def rows_of(domain: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(json.dumps(Play().rows(domain, None, "base")))
    return rows


Made = tuple[str, str, dict[str, Any]]
"""Who calls, the tool, and its arguments."""


def variants(domain: str, row: dict[str, Any], rng: random.Random) -> dict[str, tuple[list[Made], list[str]]]:
    """Return the calls and the agent's texts of conversations: the gold ones, changed ones, and random ones."""
    actions = [action for task in tasks_of(domain).values() for action in (task.evaluation_criteria.actions or [])]
    schemas = Play().tools(domain)
    gold = [
        (action.get("requestor", "assistant"), action["name"], action["arguments"])
        for action in (row["tau2"]["task"].get("evaluation_criteria") or {}).get("actions") or []
    ]
    told = [f"It is {info.upper()}, as you asked." for info in row["tau2"]["communicate"]]
    found: dict[str, tuple[list[Made], list[str]]] = {"gold": (gold, told), "idle": ([], told)}
    if gold:
        at = rng.randrange(len(gold))
        found["one left out"] = ([*gold[:at], *gold[at + 1 :]], told)
        who, name, arguments = gold[at]
        changed = {key: f"{value}x" if isinstance(value, str) else None for key, value in arguments.items()}
        found["one changed"] = ([*gold[:at], (who, name, changed), *gold[at + 1 :]], told[:-1])
    wild: list[Made] = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.7:
            drawn = rng.choice(actions)
            wild.append((drawn.requestor, drawn.name, drawn.arguments))
        else:
            side = rng.choice([side for side in ("agent", "user") if schemas[side]])
            tool = rng.choice(schemas[side])
            names = tool["parameters"].get("properties", {})
            arguments = {each: rng.choice(["x", 1, None, ["y"]]) for each in names}
            wild.append(("user" if side == "user" else "assistant", tool["name"], arguments))
    found["random"] = (wild, rng.sample(told, rng.randint(0, len(told))))
    found["random after gold"] = ([*gold, *wild], told)
    return found


def theirs(domain: str, row: dict[str, Any], calls: list[Made], texts: list[str], reason: str = "user_stop") -> Any:
    """Return tau2's own RewardInfo of a conversation, in an environment of its own; None if its evaluation fails, as it
    does if the task of an assertion was never created."""
    from tau2.data_model import message as of
    from tau2.data_model.simulation import SimulationRun
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    task = tasks_of(domain)[row["tau2"]["task"]["id"]]
    environment = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment()
    begun = task.initial_state
    history = [*((begun.message_history if begun is not None else None) or [])]
    data = begun.initialization_data if begun is not None else None
    environment.set_state(data, begun.initialization_actions if begun is not None else None, history)
    messages = [*history, of.AssistantMessage(role="assistant", content="Hi! How can I help you today?")]
    messages.append(of.UserMessage(role="user", content="Help."))
    for number, (who, name, arguments) in enumerate(calls):
        made = of.ToolCall(id=str(number), name=name, arguments=arguments, requestor=who)
        caller = of.UserMessage if who == "user" else of.AssistantMessage
        messages += [caller(role=who, tool_calls=[made]), environment.get_response(made)]
    messages += [of.AssistantMessage(role="assistant", content=text) for text in texts]
    messages.append(of.UserMessage(role="user", content="###STOP###"))
    run = SimulationRun(
        id="1", task_id=task.id, start_time="", end_time="", duration=0, termination_reason=reason, messages=messages
    )
    try:
        return evaluate_simulation(run, task, EvaluationType.ALL, False, domain)
    except ValueError as error:
        if str(error) != "Task task_2 not found":
            raise
        return None


def ours(row: dict[str, Any], calls: list[Made], texts: list[str], stop: StopReason = StopReason.USER_DONE) -> Any:
    """Return our reward's numbers of the same conversation."""
    play = Play()
    play.reset(row["tau2"]["domain"], row["tau2"]["folder"], row["tau2"]["task"])
    for _, name, arguments in calls:
        play.call(name, arguments)
    judged = EnvironmentReward.parse(play.reward(), "tau2")
    messages = [*row["messages"], *({"role": "assistant", "content": text} for text in texts)]
    chain = Trajectory("c", messages, [], Outcome.COMPLETED, stop_reason=stop)
    return judged.metrics | conversation(trajectory=chain, environment=judged, tau2=row["tau2"])


@needs_models
@pytest.mark.parametrize(("domain", "number"), CASES)
def test_rewards_are_tau2s(domain: str, number: int) -> None:
    row = rows_of(domain)[number]
    for name, (calls, texts) in variants(domain, row, random.Random(number)).items():
        found = ours(row, calls, texts)
        if (expected := theirs(domain, row, calls, texts)) is None:
            assert found["reward"] == 0
            continue
        parts = {part.value.lower(): value for part, value in (expected.reward_breakdown or {}).items()}
        if not row["tau2"]["communicate"]:
            parts.pop("communicate", None)
        assert {part: found[part] for part in parts} == parts, name
        assert found["reward"] == expected.reward, name
        if name == "gold":
            # tau2's own gold actions fail two of its tasks of mock, which have none
            assert found["reward"] == 1 or not calls


@needs_models
def test_a_conversation_that_the_user_does_not_end_has_no_reward() -> None:
    row = rows_of("mock")[0]
    calls, texts = variants("mock", row, random.Random(0))["gold"]
    assert theirs("mock", row, calls, texts).reward == ours(row, calls, texts)["reward"] == 1
    assert theirs("mock", row, calls, texts, "max_steps").reward == 0
    assert ours(row, calls, texts, StopReason.MAX_TURNS)["reward"] == 0
    # tau2 ends a conversation at the tenth failed call
    fails: list[Made] = [("assistant", "update_task_status", {"task_id": "x", "status": "y"})] * 10
    assert ours(row, [*calls, *fails[:9]], texts)["reward"] == 1
    assert ours(row, [*calls, *fails], texts)["reward"] == 0


def test_prompts_are_tau2s() -> None:
    folder = Path(str(find_spec("tau2").origin)).parent  # type: ignore[union-attr]

    def texts(file: str) -> dict[str, str]:
        tree = ast.parse((folder / file).read_text())
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        found = {}
        for node in assigned:
            if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
                found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value.func.value).strip()
        return found

    agent, user = texts("agent/llm_agent.py"), texts("user/user_simulator.py")
    instruction = agent["AGENT_INSTRUCTION"]
    assert prompts.AGENT_PROMPT.format(policy="P") == agent["SYSTEM_PROMPT"].format(
        agent_instruction=instruction, domain_policy="P"
    )
    assert prompts.USER_PROMPT.format(guidelines="G", scenario="S") == user["SYSTEM_PROMPT"].format(
        global_user_sim_guidelines="G", instructions="S"
    )
    orchestrator = (folder / "orchestrator" / "orchestrator.py").read_text()
    assert f'role="assistant", content="{prompts.GREETING["content"]}"' in orchestrator


@pytest.mark.parametrize("domain", [*COUNTS])
def test_nothing_of_a_task_is_in_the_agents_messages(domain: str) -> None:
    for row in Tau2Source(domain=domain, tasks=5).rows():
        shown = json.dumps(row["messages"])
        scenario = row["tau2"]["task"]["user_scenario"]["instructions"]
        words = scenario if isinstance(scenario, str) else scenario["reason_for_call"]
        assert words not in shown
        assert words.splitlines()[0] in row["user_prompt"]
        for action in (row["tau2"]["task"]["evaluation_criteria"].get("actions")) or []:
            assert json.dumps(action["arguments"]) not in shown
        assert all(token in row["user_prompt"] for token in ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"))


async def test_an_agent_and_a_user_share_a_phone() -> None:
    (row,) = Tau2Source(domain="telecom", tasks=1).rows()
    options = {"domain": "telecom", "user_tools": True}
    recipe = ToolsRecipe(mcp_servers={"tau2": {"module": "tau2", "options": options}})
    async with open_toolset(recipe, Path.cwd()) as toolset:
        users = [schema["name"] for schema in Play().tools("telecom")["user"]]
        given = toolset.give_to_user(users)
        assert [spec.name for spec in given] == users
        listed = yaml.safe_load((REPOSITORY / "recipes/tau2/telecom-3b-lora-24gb.yaml").read_text())
        assert listed["rollout"]["user"]["tools"] == users
        assert {"get_customer_by_phone", "resume_line"} <= {spec.name for spec in toolset.specs}
        assert not {spec.name for spec in toolset.specs} & {*users}
        async with toolset.chain("c", row) as session:
            seen = await session.call(ToolCall("1", "check_status_bar", {}), by_user=True)
            assert "Status Bar" in str(seen.content)
            refused = await session.call(ToolCall("2", "toggle_airplane_mode", {}))
            assert "There is no tool" in str(refused.content)
            wrong = await session.call(ToolCall("3", "get_customer_by_phone", {"number": 1}))
            assert str(wrong.content).startswith("Error: ")
            found = await session.reward()
    assert (found.reward, found.metrics["errors"]) == (0, 1)


async def test_a_call_that_computes_for_ever_is_an_error_of_the_model() -> None:
    (row,) = Tau2Source(domain="retail", tasks=1).rows()
    recipe = ToolsRecipe(mcp_servers={"tau2": {"module": "tau2", "options": {"domain": "retail"}}})
    async with open_toolset(recipe, Path.cwd()) as toolset, toolset.chain("c", row) as session:
        found = await session.call(ToolCall("1", "calculate", {"expression": "9**9**9"}))
        assert "Error: the call took longer than 5 seconds" in str(found.content)
        assert "4" in str((await session.call(ToolCall("2", "calculate", {"expression": "2 + 2"}))).content)


async def test_a_chain_serves_a_simulated_user(tmp_path: Path) -> None:
    row = Tau2Source(domain="mock", tasks=1).rows()[0]

    def answer(prompt: str) -> str:
        if "User Simulation Guidelines" in prompt:
            return "###TRANSFER###" if "It is done." in prompt else "Create the task 'Important Meeting' for user_1."
        if "task_2" in prompt:
            return "It is done."
        return call("create_task", user_id="user_1", title="Important Meeting")

    stops = ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"]
    user = {"name": "model", "options": {"prompt": "{user_prompt}", "guidelines": "{situation}", "done": stops}}
    rollout = {"user": user, "max_turns": 6, "max_total_tokens": 8192}
    sections: dict[str, Any] = {"tools": [], "mcp_servers": MOCK, "rewards": ["tau2"], "rollout": rollout}
    async with scripted_chains(tmp_path, answer, **sections) as chains:
        chain = await chains.run(**row)
    assert (chain.outcome, chain.stop_reason, chain.reward) == (Outcome.COMPLETED, StopReason.USER_DONE, 1)
    assert chain.metrics["success"] == chain.metrics["db"] == 1
    roles = [message["role"] for message in chain.messages]
    assert roles == ["system", "assistant", "user", "assistant", "tool", "assistant"]


def _folder(place: Path, **changes: Any) -> str:
    source = Path(str(find_spec("tau2").origin)).parent / "data"  # type: ignore[union-attr]
    for part in ("domains/mock", "user_simulator"):
        shutil.copytree(source / "tau2" / part, place / "tau2" / part)
    file = place / "tau2" / "domains" / "mock" / "tasks.json"
    tasks = json.loads(file.read_text())
    tasks[1].update(changes)
    file.write_text(json.dumps(tasks))
    return str(place)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = _folder(tmp_path, user_scenario={"instructions": "Say hello."})
    (tmp_path / "tau2" / "domains" / "mock" / "policy.md").write_text("Be kind.")
    row = Tau2Source(domain="mock", folder=folder).rows()[1]
    assert "<policy>\nBe kind.\n</policy>" in row["messages"][0]["content"]
    assert "Say hello." in row["user_prompt"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"evaluation_criteria": {"reward_basis": ["NL_ASSERTION"]}}, "is judged by a language model (NL_ASSERTION"),
        (
            {
                "initial_state": {
                    "initialization_actions": [{"env_type": "assistant", "func_name": "__init__", "arguments": {}}]
                }
            },
            "calls __init__",
        ),
        ({"user_scenario": 1}, "tau2.folder: got "),
    ],
)
def test_tasks_that_cannot_be_judged_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError) as refused:
        Tau2Source(domain="mock", folder=_folder(tmp_path, **changes)).rows()
    assert told in str(refused.value)


def test_a_wrong_split_is_named() -> None:
    with pytest.raises(SettingError, match=r"tau2\.split: got 'dev', which mock does not have; fix: use base"):
        Tau2Source(domain="mock", split="dev").rows()


async def test_what_must_be_communicated_needs_the_reward() -> None:
    rows = Tau2Source(domain="mock").rows()
    async with open_toolset(ToolsRecipe(mcp_servers=MOCK), Path.cwd()) as toolset:
        toolset.check_rows(rows, "data", True)
        with pytest.raises(SettingError, match=r"which only the messages show: set rewards: \[tau2\]"):
            toolset.check_rows(rows, "data", False)
