"""`Play`: tau2's side of a chain, in its own process (`game_processes`), which serves one domain."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from loguru import logger
from tau2.data_model.message import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from tau2.data_model.tasks import RewardType, Task
from tau2.environment.environment import Environment
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_env import EnvironmentEvaluator
from tau2.utils import utils

from agentfactory.people.tau2.prompts import AGENT_PROMPT, GREETING, USER_PROMPT
from agentfactory.worlds.game_processes.refused import Refused

CALL_SECONDS = 5.0
"""CPU time of a call, after which it is an error that the caller reads: `calculate` computes any power."""
MOST_ERRORS = 10
"""Failed calls at which tau2 ends a conversation, without a reward."""

logger.remove()


class Play:
    def tools(self, domain: str) -> dict[str, list[dict[str, Any]]]:
        """Return the schemas of a domain's tools: the `agent`'s, and the `user`'s."""
        environment = self._environment(domain)
        user = environment.get_user_tools() if environment.user_tools is not None else []
        return {
            "agent": [tool.openai_schema["function"] for tool in environment.get_tools()],
            "user": [tool.openai_schema["function"] for tool in user],
        }

    def rows(self, domain: str, folder: str | None, split: str) -> list[dict[str, Any]]:
        """Return the data rows of a split. Raises Refused."""
        module = self._domain(domain, folder)
        splits = module.get_tasks_split()
        if split not in splits:
            raise Refused("split", f"got {split!r}, which {domain} does not have", f"use {' or '.join(splits)}")
        environment = self._environment(domain)
        suffix = "" if environment.user_tools is None else "_tools"
        path = utils.DATA_DIR / "tau2" / "user_simulator" / f"simulation_guidelines{suffix}.md"
        guidelines, policy = path.read_text(), environment.get_policy()
        rows = []
        for task in module.get_tasks(split):
            check_task(task)
            criteria, history = task.evaluation_criteria, list(_history(task)) or [GREETING]
            tells = criteria is not None and RewardType.COMMUNICATE in criteria.reward_basis
            row = {
                "domain": domain,
                "folder": folder,
                "task": task.model_dump(mode="json", exclude_unset=True),
                "communicate": (criteria.communicate_info or []) if tells else [],
            }
            system = {"role": "system", "content": AGENT_PROMPT.format(policy=policy)}
            prompt = USER_PROMPT.format(guidelines=guidelines, scenario=task.user_scenario)
            rows.append({"messages": [system, *history], "user_prompt": prompt, "tau2": row})
        return rows

    def reset(self, domain: str, folder: str | None, task: dict[str, Any]) -> dict[str, Any]:
        """Begin a task."""
        self._domain(domain, folder)
        self._task = Task.model_validate(task)
        check_task(self._task)
        self._live, begun = self._environment(domain), self._task.initial_state
        self._users = set() if self._live.user_tools is None else set(self._live.user_tools.tools)
        self._calls: list[Message] = [] if begun is None else [*(begun.message_history or [])]
        self._errors = 0
        self._live.set_state(
            begun.initialization_data if begun is not None else None,
            begun.initialization_actions if begun is not None else None,
            [*self._calls],
        )
        return {"anchor": None}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the agent or of the user, and return what it reads."""
        requestor = "user" if name in self._users else "assistant"
        call = ToolCall(id=f"call_{len(self._calls)}", name=name, arguments=arguments, requestor=requestor)
        signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, CALL_SECONDS)
        try:
            answer = self._live.get_response(call)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._live.sync_tools()
        caller = UserMessage if requestor == "user" else AssistantMessage
        self._calls += [caller(role=requestor, tool_calls=[call]), answer]
        self._errors += answer.error
        return answer.content or ""

    def reward(self) -> dict[str, float]:
        """Return the `reward` by tau2's evaluators, without what the agent had to communicate, the value of each other
        part of the task's basis, and the failed calls (`errors`)."""
        domain, criteria, live = self._live.domain_name, self._task.evaluation_criteria, self._live
        found: dict[str, float] = {}
        if criteria is not None:

            def make(solo_mode: bool | None = None) -> Environment:
                # the evaluator asks for the agent's with solo_mode, and would make all calls again in it
                return self._environment(domain) if solo_mode is None else live

            live.set_state = lambda *state, **named: None
            live.run_env_assertion = partial(_is_met, live.run_env_assertion)
            parts = EnvironmentEvaluator.calculate_reward(make, self._task, self._calls).reward_breakdown or {}
            parts |= ActionEvaluator.calculate_reward(self._task, self._calls).reward_breakdown or {}
            found = {part.value.lower(): parts[part] for part in parts if part in criteria.reward_basis}
        reward = float(self._errors < MOST_ERRORS)
        for value in found.values():
            reward *= value
        return {"reward": reward, **found, "errors": float(self._errors)}

    def _domain(self, domain: str, folder: str | None) -> Any:
        if folder is not None:
            # before the import of the domain, which keeps its paths
            utils.DATA_DIR = Path(folder)
        return import_module(f"tau2.domains.{domain}.environment")

    def _environment(self, domain: str) -> Any:
        return self._domain(domain, None).get_environment()


def check_task(task: Task) -> None:
    """Raise Refused if a task needs a judge, or names functions that are not for tasks."""
    criteria, begun = task.evaluation_criteria, task.initial_state
    if criteria is not None and RewardType.NL_ASSERTION in criteria.reward_basis:
        problem = f"task {task.id} is judged by a language model (NL_ASSERTION in its reward_basis)"
        raise Refused("split", problem, "use a split without it")
    functions = [
        *((begun.initialization_actions if begun is not None else None) or []),
        *((criteria.env_assertions if criteria is not None else None) or []),
    ]
    for function in functions:
        if function.func_name.startswith("_"):
            raise Refused("folder", f"task {task.id} calls {function.func_name}", "name functions of the domain")


def _history(task: Task) -> Iterator[dict[str, Any]]:
    """Yield the messages with which a task begins, as the agent has them."""
    for message in (task.initial_state and task.initial_state.message_history) or []:
        if isinstance(message, ToolMessage):
            if message.requestor == "assistant":
                yield {"role": "tool", "tool_call_id": message.id, "content": message.content or ""}
        elif isinstance(message, AssistantMessage) or not message.is_tool_call():
            calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls or []
            ]
            yield {"role": message.role, "content": message.content or "", **({"tool_calls": calls} if calls else {})}


def _is_met(run: Callable[..., bool], *arguments: Any, **named: Any) -> bool:
    """Run an assertion. One about what the agent did not create raises, with which tau2's evaluation would end."""
    try:
        return run(*arguments, **named)
    except Exception:  # boundary: an assertion of a domain
        return False


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the call took longer than {CALL_SECONDS:g} seconds")
