"""`agentfactory eval`: a checkpoint to the figure that training logged for it, and any chat endpoint beside it. And
`agentfactory chat`: a conversation with the last checkpoint of a run, from piped lines."""

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.commands import chat, eval_command
from agentfactory.commands.eval_command import tables
from agentfactory.commands.main import main
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.launching.served_weights import Served, trained_in
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.evaluation.evaluate import Evaluation, open_runner
from agentfactory.rollout.evaluation.first_look import Look, Offer
from agentfactory.rollout.evaluation.pass_at_k import Estimate
from agentfactory.rollout.evaluation.side_by_side import read_other
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.parsers import load_parser
from agentfactory.rollout.text.tokenizer import load_tokenizer
from tests.chat_server import model_behind, serve_chat
from tests.forked import COMMAND, Forked
from tests.project import Command
from tests.seeing_server import serve_seeing
from tests.vision_models import make_vision_model

pytestmark = pytest.mark.processes

LOOK = Look(Offer(RolloutConfig(), [], load_parser("hermes")))


@pytest.fixture
def whole(quickstart_run: Path, tmp_path: Path) -> Path:
    output = tmp_path / "run"
    output.mkdir()
    (output / "prepared").symlink_to(quickstart_run / "prepared")
    return output


def figures(folder: Path) -> dict[str, Any]:
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.mark.extended
def test_a_checkpoint_evaluates_to_what_was_logged(agentfactory: Command, quickstart_run: Path, whole: Path) -> None:
    checkpoint = max((quickstart_run / "grpo" / "checkpoints").iterdir())
    arguments = [str(quickstart_run / "recipe.yaml"), f"output={whole}", "--checkpoint", str(checkpoint)]
    result = agentfactory("eval", *arguments, status=0)
    lines = [json.loads(line) for line in (quickstart_run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "eval/sampled/reward" in line][-1]
    found = figures(whole / "eval")
    # all that is no time
    names = [name for name in logged if name.startswith("eval/") and "seconds" not in name]
    assert len(names) > 20
    assert {name: found[name] for name in names} == {name: logged[name] for name in names}
    summary = json.loads((whole / "eval" / "summary.json").read_text())
    assert summary["checkpoint"] == str(checkpoint)
    assert found.pop("step") == logged["step"], "so that curves show both at one place"
    assert all(summary[name.removeprefix("eval/")] == found[name] for name in found)
    low, high = found["eval/sampled/reward/low"], found["eval/sampled/reward/high"]
    told = f"{found['eval/sampled/reward']:.4f} │ {low:.4f} to {high:.4f}"
    assert re.search(rf"reward +│ +{re.escape(told)} +│ +10", result.stdout), result.stdout
    assert "greedy, all tasks" in result.stdout
    assert re.search(
        r"what the sampled chains did:\n  \d+ chains of 10 tasks\n  calls: \d+ of \d+ chains called a tool",
        result.stdout,
    )


def test_any_chat_endpoint_is_a_baseline(
    agentfactory: Command, quickstart_run: Path, whole: Path, warm_server: str, warm_start: Path
) -> None:
    recipe = str(quickstart_run / "recipe.yaml")
    small = [f"output={whole}", "grpo.eval.data.limit=4", "--samples", "2"]
    with serve_chat(model_behind(warm_server, warm_start)) as server:
        done = agentfactory("eval", recipe, *small, "--url", server.url, status=0)
    assert f"querying teacher at {server.url} by OpenAI's chat API" in done.stdout
    assert "pass@2" in done.stdout
    chains = [chain for group in read_groups(whole / "eval" / "trajectories") for chain in group.trajectories]
    assert len(chains) == 4 * 2 + 4
    assert sum(chain.metrics["tool_calls"] for chain in chains) > 0
    assert json.loads((whole / "eval" / "summary.json").read_text())["checkpoint"] == f"teacher at {server.url}"
    # the same model by token ids, as the server that takes them says of itself
    done = agentfactory("eval", recipe, *small, "--url", warm_server, "--beside", str(whole / "eval"), status=0)
    assert f"querying policy at {warm_server} by token ids" in done.stdout
    assert "step" not in figures(whole / "eval-2"), "nobody knows it of a server's own weights"
    by_messages, by_ids = figures(whole / "eval"), figures(whole / "eval-2")
    reward = by_ids["eval/greedy/reward"]
    assert by_messages["eval/greedy/reward"] == reward
    beside = done.stdout.partition("greedy, beside ")[2]
    assert re.search(rf"reward +│ +{reward:.4f} │ +{reward:.4f} │ +\+0\.0000 │ +not known +│ +4 ", beside), done.stdout


def test_of_a_run_of_one_stage_it_is_the_last_checkpoint(project: Path) -> None:
    run = project / "runs" / "mine"
    recipe = load_recipe("recipe.yaml", purpose="eval")
    assert trained_in(run, recipe, []) is None, "nothing is trained"
    for step in (2, 10):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert trained_in(run, recipe, ["eval.samples=4"]) == run / "checkpoints" / "step-000010"
    assert trained_in(run, recipe, ["model.path=x/y"]) is None
    assert trained_in(run, load_recipe("recipe.yaml", ["server.url=http://h:1"], "eval"), []) is None


OWN, THERE = (), ("server.url=http://h:1",)


@pytest.mark.parametrize(
    ("overrides", "asked", "told"),
    [
        (OWN, (Path(), "x/y", None, None), "--checkpoint: given with --model"),
        (OWN, (None, None, None, 0), "--samples: got 0"),
        (THERE, (Path(), None, None, None), r"--checkpoint: given with server\.url, .*; fix: set server\.url=null"),
        (THERE, (None, "x/y", None, None), r"--model: given with server\.url"),
        (THERE, (None, "x/y", "http://h:1", None), None),
    ],
)
def test_refused_options(overrides: tuple[str, ...], asked: tuple[Any, ...], told: str | None, project: Path) -> None:
    with nullcontext() if told is None else pytest.raises(SettingError, match=told):
        eval_command.check(load_recipe("recipe.yaml", overrides, "eval"), *asked)


def test_a_silent_server_is_told(agentfactory: Command, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "no server answers at http://127.0.0.1:9"
    result = agentfactory("rollout", "recipe.yaml", "server.url=http://127.0.0.1:9")
    assert (result.returncode, told in result.stderr, "Traceback" in result.stderr) == (1, True, False)
    assert main(["eval", "recipe.yaml", "--url", "http://127.0.0.1:9"]) == 1
    assert told in capsys.readouterr().err
    with pytest.raises(SettingError, match="--beside: runs is not the run folder of an evaluation; fix: name the run"):
        read_other(Path("runs"))
    assert not list(project.glob("runs/*/*"))


def test_the_weights_of_a_token_server_are_those_that_it_has(project: Path, warm_server: str) -> None:
    recipe = load_recipe("recipe.yaml", [f"server.url={warm_server}"], "eval")
    there = eval_command.look_at(recipe, warm_server, None)
    assert (there.model, there.by_token_ids) == ("policy", True)
    assert there.recipe.model.path != recipe.model.path, "the tokenizer is the server's"
    with pytest.raises(SettingError, match=r"--model: .* serves no 'teacher'; fix: name one of policy"):
        eval_command.look_at(recipe, warm_server, "teacher")


def test_sources_and_failed_chains_are_told() -> None:
    figures = {"success": Estimate(0.5, 0.25, 0.75, 8), "reward": Estimate(1.0, None, None, 8)}
    found = Evaluation(
        {"sampled/success": 0.5, "sampled/failed": 0.2, "sampled/tool_calls": 3.0},
        {"sampled": {"": figures, "aime": figures}},
        Counter({"timeout: too long": 3, "inference_error: gone": 1}),
        20,
        LOOK,
    )
    whole, source, failed = tables(found)
    assert max(map(len, whole.splitlines())) <= 80
    assert whole.startswith("sampled, all tasks")
    assert source.startswith("sampled, source aime")
    assert re.search(r"success +│ 0\.5000 │ 0\.2500 to 0\.7500 │ +8", source)
    assert re.search(r"reward +│ 1\.0000 │ not known +│ +8", source)
    assert "tool_calls" in whole
    assert "tool_calls" not in source
    assert failed == "4 of 20 chains failed and are excluded, 3 of them with: timeout: too long"


# ---- agentfactory chat


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
