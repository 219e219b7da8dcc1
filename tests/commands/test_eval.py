"""`agentfactory eval`: a checkpoint to the figure that training logged for it, and any chat endpoint beside it."""

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.commands import eval_command
from agentfactory.commands.eval_command import tables
from agentfactory.commands.main import main
from agentfactory.launching.served_weights import trained_in
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.evaluation.evaluate import Evaluation
from agentfactory.rollout.evaluation.first_look import Look, Offer
from agentfactory.rollout.evaluation.pass_at_k import Estimate
from agentfactory.rollout.evaluation.side_by_side import read_other
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.text.parsers import load_parser
from tests.chat_server import model_behind, serve_chat
from tests.project import Command

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
def test_a_checkpoint_evaluates_to_what_training_logged(
    agentfactory: Command, quickstart_run: Path, whole: Path
) -> None:
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
        result = agentfactory("eval", recipe, *small, "--url", server.url, status=0)
    assert f"querying teacher at {server.url} by OpenAI's chat API" in result.stdout
    assert "pass@2" in result.stdout
    chains = [chain for group in read_groups(whole / "eval" / "trajectories") for chain in group.trajectories]
    assert len(chains) == 4 * 2 + 4
    assert sum(chain.metrics["tool_calls"] for chain in chains) > 0
    assert json.loads((whole / "eval" / "summary.json").read_text())["checkpoint"] == f"teacher at {server.url}"
    # the same model by token ids, as the server that takes them says of itself
    result = agentfactory("eval", recipe, *small, "--url", warm_server, "--beside", str(whole / "eval"), status=0)
    assert f"querying policy at {warm_server} by token ids" in result.stdout
    assert "step" not in figures(whole / "eval-2"), "nobody knows it of a server's own weights"
    by_messages, by_ids = figures(whole / "eval"), figures(whole / "eval-2")
    reward = by_ids["eval/greedy/reward"]
    assert by_messages["eval/greedy/reward"] == reward
    beside = result.stdout.partition("greedy, beside ")[2]
    assert re.search(rf"reward +│ +{reward:.4f} │ +{reward:.4f} │ +\+0\.0000 │ +not known +│ +4 ", beside), (
        result.stdout
    )


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
def test_options_that_cannot_be_are_refused(
    overrides: tuple[str, ...], asked: tuple[Any, ...], told: str | None, project: Path
) -> None:
    with nullcontext() if told is None else pytest.raises(SettingError, match=told):
        eval_command.check(load_recipe("recipe.yaml", overrides, "eval"), *asked)


def test_a_server_that_does_not_answer_is_told(
    agentfactory: Command, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
