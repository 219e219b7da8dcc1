"""`agentfactory chat RUN`: talk to a run's checkpoint in the terminal, with its tools."""

import argparse
import asyncio
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message, ToolInfrastructureError, text_of
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.launching.run_folder import RECIPE, RunFolder, RunFolderError, check_run_of
from agentfactory.launching.served_weights import Served, what_is_served
from agentfactory.launching.start_server import serve
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.composition import COMMAND_LINE
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import stages_of
from agentfactory.rollout.chains.chain_runner import ChainRunner, begin
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.policy_turns import PolicyTurns
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.tool_loop import TakenTurn, ToolLoop
from agentfactory.rollout.config import Part
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.images.parts import clean_row, text_part
from agentfactory.rollout.images.store import stored_digest
from agentfactory.rollout.inference.http_transport import ContextOverflowError, InferenceError, ServerUnreachableError
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.trajectory import StopReason
from agentfactory.tools.images.decode import size_of
from agentfactory.tools.sessions.tool_session import ToolSession

NEW = "/new"
IMAGE = "/image"
_COMMAND = re.compile(r"/\w*(\s|$)")  # pattern of a command line; a path such as /etc/hosts does not match
_COMMANDS = f"{NEW} begins a new conversation, {IMAGE} PATH attaches an image to your next line, Ctrl-D ends"


@dataclass(frozen=True)
class UserLine:
    text: str
    images: list[str]

    def row(self) -> Task:
        """Return the line as a row of data. Raises ValueError if its text has more or fewer image placeholders."""
        return clean_row({"question": self.text, **({"images": self.images} if self.images else {})}, Path.cwd())


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Talk to the run's last checkpoint, or `options.checkpoint`. Raises SettingError, RunFolderError, ChildFailed."""
    folder = options.run.expanduser().resolve()
    if not (folder / RECIPE).is_file():
        fix = "name one, such as runs/quickstart"
        raise SettingError("RUN", f"{folder} is not a run folder", fix, source=COMMAND_LINE)
    check_run_of(folder / RECIPE)
    # the run folder may have moved, and the chat starts its own server
    recipe = load_recipe(folder / RECIPE, [f"output={folder}", "server.url=null"], "serve")
    check_recipe(recipe, "serve")
    last = stages_of(recipe)[-1]
    found = options.checkpoint or RunFolder(last.output).last_checkpoint()
    if found is None:
        raise RunFolderError(f"{last.output} holds no checkpoint; fix: name one by --checkpoint, or train first")
    served = what_is_served(last, found)
    say(f"starting the {served.recipe.server.engine} server on {served.label}")
    run_interruptibly(_chat(served))


async def _chat(served: Served) -> None:
    recipe = served.recipe
    async with serve(recipe, served.adapters) as (child, url):
        try:
            # that of the first task that the run was evaluated or trained on
            part = next(iter([*recipe.held_out_parts(), *recipe.parts()]), Part("data", recipe))
            async with open_runner(part.recipe, Path.cwd(), url, rewards=Rewards([], Path.cwd())) as runner:
                # load data only if environments need it: it may be large, or on the hub
                data = part.recipe.data if runner.toolset.environments else None
                row = {} if data is None else load_tasks(data, part.section)[0]
                await _converse(runner, Sampling(served.name, recipe.rollout.temperature, "chat"), row)
        except ServerUnreachableError:
            if child.process.poll() is not None:
                raise child.failure() from None
            raise


async def _converse(runner: ChainRunner, sampling: Sampling, row: Task) -> None:
    tools = ", ".join(spec.name for spec in runner.toolset.specs) or "none"
    _say(f"its tools: {tools}; {_COMMANDS}")
    if runner.toolset.environments:
        _say("its environment begins with the first task of the run's data; an empty line asks that task's question")
    lines = _lines()
    number = 0
    while (said := await _next(lines)) is not None:
        if said.text == NEW or not (said.text or runner.toolset.environments):
            continue
        try:
            task = {**{k: v for k, v in row.items() if k != "messages"}, **said.row()} if said.text else row
            task = await runner.take(task, "the images")
        except ValueError as error:
            _say(f"  [not sent: {error}]")
            continue
        number += 1
        try:
            async with runner.toolset.chain(f"chat{number}", runner.for_tools(task)) as session:
                await Conversation(runner, task, sampling, f"chat{number}").hold(session, lines, shown=bool(said.text))
                verdict = await session.reward()
                if verdict is not None:
                    beside = "".join(f"; {name} {value:g}" for name, value in verdict.metrics.items())
                    _say(f"  [the environment's reward: {verdict.reward:g}{beside}]")
        except (InferenceError, ToolInfrastructureError) as error:
            _say(f"  [the conversation failed: {error}]")


class Conversation(PolicyTurns):
    """The policy's turns in a chain that the user continues; prints messages, calls and results as they happen."""

    def __init__(self, runner: ChainRunner, task: Task, sampling: Sampling, name: str) -> None:
        episode = Episode(runner.setup, begin(name), task, sampling)
        super().__init__(episode, runner.renderer, runner.sampler, runner.agent)
        self._loop = ToolLoop(episode, self)
        self._runner = runner
        self._shown = 0

    async def hold(self, session: ToolSession, lines: AsyncIterator[str], shown: bool) -> None:
        """Answer the task, and then each line, until NEW or their end. `shown`: the question is on the screen."""
        self._shown = len(self.episode.trajectory.messages) if shown else 0
        stopped = await self._loop.play(session)
        while True:
            self._show()
            if stopped is not StopReason.ANSWER:
                _say(f"  [stopped: {stopped}]")
            if stopped in (StopReason.FINISH, StopReason.CONTEXT_OVERFLOW) or self.episode.limits.stopped:
                return
            message = None
            while message is None:
                said = await _next(lines)
                if said is None or said.text == NEW:
                    return
                message = await self._message(said) if said.text else None
            stopped = await self._hear(session, message)

    async def _message(self, said: UserLine) -> Message | None:
        """Return a line as a message with stored images; if they are unusable, print the reason and return None."""
        try:
            row = await self._runner.take(said.row(), "the images")
        except ValueError as error:
            _say(f"  [not sent: {error}]")
            return None
        if not said.images:
            return {"role": "user", "content": said.text}
        return self.episode.limits.settle_message(row["messages"][0])

    async def _hear(self, session: ToolSession, message: Message) -> StopReason:
        self.episode.trajectory.messages.append(message)
        self._shown = len(self.episode.trajectory.messages)
        self.context.hear([message])
        # each line allows as many turns as a chain
        self.episode.max_turns = self.episode.trajectory.turns + self._runner.setup.config.max_turns
        try:
            # include the results of the last turn, which may have reached the turn limit
            await self.go_on(self.context.turns[-1][1:])
        except ContextOverflowError:
            return StopReason.CONTEXT_OVERFLOW
        return await self._loop.act(session)

    async def take(self, anchor: str | None) -> TakenTurn:
        self._show()
        taken = await super().take(anchor)
        self._show()
        return taken

    def _show(self) -> None:
        for message in self.episode.trajectory.messages[self._shown :]:
            _show_message(message, self._content_text(message), opening=self.episode.trajectory.turns == 0)
        self._shown = len(self.episode.trajectory.messages)

    def _content_text(self, message: Message) -> str:
        """Return a message's content as text, with the files of the images that the model gets."""
        content = message.get("content") or ""
        if isinstance(content, str):
            return content
        files = iter(self._runner.setup.images.files_of([message]))
        is_stored = [part["type"] == "image_url" and bool(stored_digest(part["image_url"]["url"])) for part in content]
        parts = zip(content, is_stored, strict=True)
        return text_of([text_part(f"[image: {next(files)}]") if stored else part for part, stored in parts])


def _show_message(message: Message, content: str, opening: bool) -> None:
    """Print a message with this text. `opening`: a user message belongs to the task."""
    match message["role"]:
        case "system":
            return
        case "assistant":
            if thought := message.get("reasoning_content"):
                _say(f"  (thinks) {_indented(thought)}")
            if content.strip():
                _say(f"agent> {_indented(content.strip())}")
            for call in message.get("tool_calls") or []:
                arguments = (f"{name}={value!r}" for name, value in call["function"]["arguments"].items())
                _say(f"  -> {call['function']['name']}({', '.join(arguments)})")
        case "user" if opening:
            _say(f"task> {_indented(content)}")
        case _:
            _say(f"  <- {_indented(content)}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")


def _say(text: str) -> None:
    print(text, flush=True)


async def _next(lines: AsyncIterator[str]) -> UserLine | None:
    """Return the next line with its images; None at the end. Report unknown commands and unusable images."""
    typed = sys.stdin.isatty()
    images: list[str] = []
    while True:
        if typed:
            print("you> ", end="", flush=True)
        text = await anext(lines, None)
        if text and not typed:
            _say(f"you> {text}")
        if text is None:
            return None
        if text == NEW or not _COMMAND.match(text):
            if text or not images:
                return UserLine(text, images)
        elif text.split()[0] == IMAGE:
            path = str(Path(text.removeprefix(IMAGE).strip()).expanduser())
            try:
                width, height = size_of(path)
            except ValueError as error:
                _say(f"  [{error}]")
            else:
                images.append(path)
                _say(f"  [an image of {width} x {height} pixels; it is attached to your next line]")
        else:
            _say(f"  [there is no command {text.split()[0]}: {_COMMANDS}]")


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of the standard input. A thread reads them, so that connections stay alive while the user thinks;
    it reads the file descriptor, because at exit a thread that waits in sys.stdin would hold its lock."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        while data := os.read(sys.stdin.fileno(), 1 << 16):
            loop.call_soon_threadsafe(arrived.put_nowait, data)
        loop.call_soon_threadsafe(arrived.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    rest = b""
    while data := await arrived.get():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").strip()
    if rest:
        yield rest.decode(errors="replace").strip()
