"""A run whose chains act on pages of ours in a real Chromium: the scripted player's actions, as a model would state
them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentfactory.base.messages import Message, ToolCall, ToolResult
from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.images.store import ImageStore, url_of
from agentfactory.rollout.trajectory import Group
from agentfactory.tools.calls.mcp_results import INFO_KEY, content_of, result_of
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule
from agentfactory.tools.images.decode import decode
from agentfactory.worlds.screens.screen import Screen
from tests.saved_groups import write_groups
from tests.viewer.viewer_runs import chain
from tests.worlds.screens.players import PLAYERS, Player

SIZE = (320, 240)
SIZES = SizeRule(28, 28 * 28, 64 * 28 * 28)
"""A model that gets the screen reduced, to 252 x 196 pixels."""


class Recorder:
    """A screen that keeps each action and its result as messages: the player says pixels, the model its own numbers."""

    def __init__(self, screen: Screen, view: ModelView, store: ImageStore) -> None:
        self.screen, self.view, self.store = screen, view, store
        self.messages: list[Message] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]] | Any:
        if name.startswith("_"):
            return getattr(self.screen, name)

        async def act(*given: Any) -> Any:
            tool = getattr(self.screen, name)
            arguments = dict(zip(tool.spec.parameters["properties"], given, strict=False))
            places = [key for key in arguments if key in ("x", "y", "start_x", "start_y")]
            stated = self.view.from_pixels([arguments[key] for key in places], SIZE)
            arguments |= {key: round(number, 3) for key, number in zip(places, stated, strict=True)}
            value = await tool(**arguments)
            call = ToolCall("call_0", name, arguments)
            self.messages.append({"role": "assistant", "content": "", "tool_calls": [call.to_openai()]})
            result = result_of(value)
            info = (result.meta or {}).get(INFO_KEY, {})
            self.messages.append(ToolResult(self.stored(content_of(result)), info=info).to_message(call))
            return value

        return act

    def stored(self, content: Any) -> Any:
        """Content with its images as those that the run has stored."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        urls = [part["image_url"]["url"] if part["type"] == "image_url" else None for part in parts]
        return [
            part if url is None else {"type": "image_url", "image_url": {"url": url_of(self.store.put(decode(url)))}}
            for part, url in zip(parts, urls, strict=True)
        ]


async def record(page: str, coordinates: Coordinates, store: ImageStore) -> list[Message]:
    """The messages of a chain in which the player solves a page of ours."""
    view = ModelView(coordinates, SIZES)
    screen = Screen(*SIZE)
    try:
        instruction, picture = await screen.reset(page=page, seed=0, model_view=view.to_json())
        recorder = Recorder(screen, view, store)
        opening = recorder.stored(content_of(result_of([instruction, picture])))
        recorder.messages.append({"role": "user", "content": opening})
        await PLAYERS[page](Player(recorder, instruction))
        assert screen.reward()["success"] == 1
    finally:
        await screen.close()
    return recorder.messages


async def screen_run(
    folder: Path, pages: list[str], coordinates: Coordinates = Coordinates.RELATIVE1000, source: str = ""
) -> RunFolder:
    """A run with a chain for each page. The coordinates are those of the source, if it has one."""
    settings = f"rollout: {{coordinates: {coordinates}}}\n"
    if source:
        settings = (
            f"data: {{sources: [{{name: {source}, coordinates: {coordinates}}}]}}\nrollout: {{coordinates: pixels}}\n"
        )
    run = RunFolder.create(folder, f"name: screens\nmodel: {{path: x}}\n{settings}")
    store = ImageStore(run.images)
    groups = []
    for number, page in enumerate(pages):
        messages = await record(page, coordinates, store)
        one = chain(f"g{number:06d}.0", messages, [], metrics={"success": 1.0})
        groups.append(Group(f"g{number:06d}", {"question": "", "page": page}, [one], source=source))
    write_groups(run.trajectories / "train.jsonl", groups)
    return run
