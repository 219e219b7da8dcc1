"""`agentfactory chat`: a conversation with a run's last checkpoint, from piped lines."""

import argparse
import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.commands import chat
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.launching.served_weights import Served
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.tokenizer import load_tokenizer
from tests.forked import COMMAND, Forked
from tests.seeing_server import serve_seeing
from tests.vision_models import make_vision_model

pytestmark = pytest.mark.processes


@pytest.mark.extended
def test_a_conversation_with_tools(quickstart_run: Path, tmp_path: Path) -> None:
    typed, log, errors = (tmp_path / name for name in ("typed", "log", "errors"))
    typed.write_text("\nthank you\n/quit\n/new\nHello there")
    status = Forked(COMMAND, "chat", str(quickstart_run), log=log, errors=errors, typed=typed).wait()
    assert status == 0, errors.read_text()
    assert "Traceback" not in errors.read_text()
    starting, tools, *said = log.read_text().splitlines()
    last = max((quickstart_run / "grpo" / "checkpoints").iterdir())
    assert starting == f"starting the embedded server on {last}"
    assert tools.startswith("its tools: move;")
    text = "\n".join(said)
    assert f"you> /quit\n  [there is no command /quit: {chat._COMMANDS}]\nyou> /new\n" in text
    first, second = text.split("you> /new")
    # the task's own question, the agent's calls, and what the environment answered
    assert re.search(r"task> The treasure lies [a-z-]+\.\n +You stand in row \d, column \d", first)
    assert re.search(r"  -> move\(direction='(north|east|south|west)'\)\n  <- ", first)
    # the conversation went on after the answer, in the same environment
    before, after = first.split("you> thank you")
    assert "agent> " in before
    assert "agent> " in after or "  -> " in after
    assert re.match(r"\n  \[the environment's reward: [\d.]+; success [01]\]\n", second)
    # and a new one began with the person's own words
    assert "you> Hello there\n" in second
    assert "You stand in row" not in second.partition("you> Hello there")[2].partition("->")[0]
    assert text.count("[the environment's reward") == 2


def test_only_environments_need_the_data(
    project: Path,
    warm_start: Path,
    warm_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = load_recipe("recipe.yaml", [f"model.path={warm_start}", "rollout.max_tokens=4"])
    for data in ("tasks.jsonl", "heldout.jsonl"):
        (project / data).unlink()

    @asynccontextmanager
    async def serve(*_: object) -> AsyncIterator[tuple[None, str]]:
        yield None, warm_server

    async def lines() -> AsyncIterator[str]:
        yield "Hello"

    monkeypatch.setattr(chat, "serve", serve)
    monkeypatch.setattr(chat, "_lines", lines)
    asyncio.run(chat._chat(Served(recipe, str(warm_start))))
    said = capsys.readouterr().out
    assert said.startswith("its tools: search;")
    assert "you> Hello\n" in said


async def test_images_are_shown_by_their_paths_in_any_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(make_vision_model(tmp_path / "model"))
    for name, colour in (("first", "red"), ("second", "blue"), ("third", "white")):
        Image.new("RGB", (64, 32), colour).save(f"{name}.png")
    vision = load_vision(model)
    answer = load_tokenizer(model).encode("as it is<|im_end|>", add_special_tokens=False)

    async def lines() -> AsyncIterator[str]:
        typed = "/image none.png", "/image first.png", "", "/image second.png", "What are <image> and <image>?"
        for line in (*typed, "/image third.png", "And <image> and <image>?", "/image third.png", "And this?", "Bye"):
            yield line

    monkeypatch.setattr(chat, "_lines", lines)
    recipe = RolloutRecipe.model_validate({"model": {"path": model}})
    async with serve_seeing(lambda _: answer, vision) as server:
        opened = open_runner(recipe, tmp_path, server.url, rewards=Rewards([], tmp_path), images=tmp_path / "seen")
        async with opened as runner:
            await chat._converse(runner, Sampling("policy", 1.0, "chat"), {})
    told = capsys.readouterr().out
    assert "you> /image none.png\n  [the image none.png cannot be read: No such file or directory]\n" in told
    assert told.count("an image of 64 x 32 pixels") == 4
    assert "[not sent: it has 1 images, but its text has placeholders (<image>) for 2]" in told
    # both of the first line, in their places, and the one of the later line
    with Image.open("first.png") as first:
        each = vision.tokens(vision.grid(vision.fit(first)))
    assert [prompt.count(vision.image_token_id) for prompt in server.prompts] == [2 * each, 3 * each, 3 * each]
    assert told.count("agent> as it is") == 3


def test_what_cannot_be_talked_to_is_told(project: Path) -> None:
    def refused(run: str, checkpoint: Path | None = None) -> str:
        with pytest.raises((SettingError, RunFolderError)) as told:
            chat.run(argparse.Namespace(run=Path(run), checkpoint=checkpoint), print)
        return str(told.value)

    assert "nowhere is not a run folder" in refused("nowhere")
    assert "holds no checkpoint" in refused(".")
    assert "--checkpoint" in refused(".", Path("none"))
