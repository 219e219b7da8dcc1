"""Prompts of a teacher that is a model with more in its context than the policy (teacher.context). When a group has
ended, the opening of each chain is rendered again, with a text appended to its last user message. The teacher's row
consists of these tokens and of the chain's own from the first sampled one on, so that it has the policy's tokens
exactly, and only the prompt is stored (Row.teacher_prompt)."""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message, ToolSpec, text_of
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.loading import load_for
from agentfactory.rollout.chains.chain_runner import ChainRunner, FirstVerdicts
from agentfactory.rollout.chains.opening_prompt import add_text
from agentfactory.rollout.chains.row_rendering import RowRenderer
from agentfactory.rollout.data import Task
from agentfactory.rollout.groups.curriculum import successes
from agentfactory.rollout.rewards.reward_spec import RewardError, RewardSpec
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.parsers.parser import call_of, split_reasoning
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.tools.calls.limits import Deadline

logger = logging.getLogger(__name__)

FIELD = "teacher.context"
OFFERED = ("trajectory", "task", "trajectories")

SOLUTION = "A solution of this task that succeeded:\n\n{}\n\nNow solve the task yourself."
ANSWER = "The answer of this task is: {}\n\nNow solve the task yourself."
ERRORS = "An earlier attempt at this task got these errors:\n\n{}\n\nNow solve the task yourself."


class TeacherContext:
    def __init__(self, choice: str, runner: ChainRunner, tasks: Sequence[Task], base: Path = Path()) -> None:
        """`choice` is solution, answer, errors or FILE.py:NAME, with paths relative to `base`; `tasks` are the rows of
        the data. Raise SettingError if the chains of `runner` cannot have such prompts."""
        config = runner.setup.config
        self._choice = choice
        self._runner = runner
        self._rows = RowRenderer(runner.renderer)
        self._own = load_context(choice, base) if ".py:" in choice else None
        fix = "correct the function of teacher.context"
        self._verdicts = FirstVerdicts(config.group_size, len(tasks), Outcome.REWARD_ERROR, fix)
        if runner.renderer.info["choice"] in ("fork", "drop") and config.max_turns > 1:
            problem = "set, but the chat template rewrites earlier turns, so that a chain may have several rows"
            raise SettingError(FIELD, problem, "set rollout.reasoning=keep")
        check_answers(choice, tasks)

    async def add_to(self, chains: Sequence[Trajectory], task: Task) -> None:
        """Set the teacher's prompt of the rows of `chains`, a group's chains that have ended, unless there is no text.
        If a user's function fails, its chain ends as reward_error, without a reward. Raise RolloutStoppedError if it
        fails for all first chains, and ValueError if the chains do not report what the context needs."""
        scored = [chain for chain in chains if chain.reward is not None and any(any(row.mask) for row in chain.rows)]
        texts = await asyncio.gather(*(self._text(chain, scored, task) for chain in scored))
        for chain, text in zip(scored, texts, strict=True):
            if self._own is not None:
                self._verdicts.note(chain, task)
            if text is not None and chain.reward is not None:
                self._add(chain, text)

    async def _text(self, chain: Trajectory, chains: Sequence[Trajectory], task: Task) -> str | None:
        if self._own is not None:
            offered = {"trajectory": chain, "task": task, "trajectories": list(chains)}
            try:
                limit = Deadline.after(self._runner.setup.config.timeout_seconds, "rollout.timeout_seconds")
                text = await self._own.ask(offered, {}, limit)
                if text is not None and not isinstance(text, str):
                    raise RewardError(f"{self._own.name} returned {text!r:.100}; it must return text, or None")
            except RewardError as error:
                chain.outcome, chain.error = Outcome.REWARD_ERROR, f"{FIELD}: {error}"
                chain.reward = chain.turn_rewards = None
                return None
            return text
        if chain.metrics.get("success") == 1.0:
            # there is nothing to correct, and a policy that always succeeds would still drift with its own teacher
            return None
        match self._choice:
            case "solution":
                won = successes(chains, f"{FIELD}=solution", "use another context")
                found = next((other for other, success in zip(chains, won, strict=True) if success == 1.0), None)
                if found is None:
                    return None
                parser, turns = self._runner.renderer.dialogue.parser, found.messages[_opening_length(found) :]
                return SOLUTION.format(shown(turns, parser, self._runner.setup.specs))
            case "answer":
                answer = task["answer"]
                return ANSWER.format(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
            case _:
                return ERRORS.format("\n".join(chain.errors)) if chain.errors else None

    def _add(self, chain: Trajectory, text: str) -> None:
        if len(chain.rows) > 1:
            # some templates rewrite earlier turns only after a turn that could not be parsed
            text = f"chain {chain.id} has {len(chain.rows)} rows, because the chat template rewrites its earlier turns"
            notify(logger, f"{FIELD}: chains of several rows", f"{text}; {FIELD} needs one, and does not grade it")
            return
        [row] = chain.rows
        specs = self._runner.setup.specs
        opening = chain.messages[: _opening_length(chain)]
        own = self._rows.open(opening, specs)
        if row.token_ids[: len(own.ids)] != own.ids:
            raise ValueError(f"chain {chain.id} does not begin with its opening messages (a bug)")
        piece = self._rows.open(with_text(opening, text), specs) if text else own
        row.teacher_prompt = piece.ids + row.token_ids[len(own.ids) : row.mask.index(1)]
        moved = [(image.offset, image.digest) for image in row.images_for_teacher()[: len(piece.images)]]
        if moved != [(image.offset, image.digest) for image in piece.images]:
            raise ValueError(f"the chat template moves the images of chain {chain.id} if {FIELD} adds text (a bug)")


def with_text(opening: Sequence[Message], text: str) -> list[Message]:
    """Return opening messages with `text` appended to the last one of a user. Raise ValueError if there is none."""
    last = next((n for n in reversed(range(len(opening))) if opening[n]["role"] == "user"), None)
    if last is None:
        raise ValueError(f"{FIELD}: a chain opens without a message of the user to which text could be added")
    return [*add_text(opening[: last + 1], text), *opening[last + 1 :]]


def shown(turns: Sequence[Message], parser: Parser, specs: Sequence[ToolSpec]) -> str:
    """Return messages as text: the assistant's without reasoning, with calls in the format of `parser`; and results."""
    lines = []
    for message in turns:
        content = text_of(message.get("content") or "")
        if message["role"] != "assistant":
            lines.append(content)
            continue
        lines.append(split_reasoning(content, opened=False)[2].strip())
        if calls := message.get("tool_calls"):
            lines.append(parser.write([call_of(call) for call in calls], specs))
    return "\n".join(line for line in lines if line)


def load_context(reference: str, base: Path) -> RewardSpec:
    """Load a user's function of `teacher.context`. Raise SettingError if it cannot be used."""
    function: Callable[..., Any] = load_for(FIELD, reference, base)
    name = reference.rpartition(":")[2]
    if not callable(function) or inspect.isclass(function):
        problem = f"{name} is not a function but a {type(function).__name__}"
        raise SettingError(FIELD, problem, "name a function that returns the text, or None")
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or (parameter.name not in OFFERED and parameter.default is parameter.empty):
            problem = f"{name} has a parameter {parameter.name!r}"
            raise SettingError(FIELD, problem, f"take any of {', '.join(OFFERED)}, by these names")
    return RewardSpec(FIELD, name, function, parameters, 1.0, math.inf, {})


def check_answers(choice: str, tasks: Sequence[Task]) -> None:
    """Raise SettingError if the context is the answer, and a row of the data has none."""
    for number, task in enumerate(tasks if choice == "answer" else (), 1):
        if task.get("answer") in (None, ""):
            problem = f"got 'answer', but row {number} of data has no answer ({', '.join(task)})"
            raise SettingError(FIELD, problem, "rename the field with the answer by data.columns={answer: FIELD}")


def _opening_length(chain: Trajectory) -> int:
    """Return the number of messages before the first turn. The messages of a task may contain turns, too."""
    turns = [number for number, message in enumerate(chain.messages) if message["role"] == "assistant"]
    # the last turn has no message if a user's agent could not parse it
    first = max(0, len(turns) - chain.turns)
    return turns[first] if first < len(turns) else len(chain.messages)
